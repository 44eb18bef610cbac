"""The images of a training in memory, and their mini-batches, drawn alike for every arm.

The command reads images as it trains; here arms are compared whose only difference must be their
BatchNorm, so what they see is drawn from the seed and the epoch alone: the order, where an image is
cropped after a border of 4 pixels, and whether it is mirrored. Samples that fill no mini-batch are
left out of the epoch, others each time, so that every step has the batch size that is told.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from anybatch.cli.images import SUFFIXES, Unreadable, read_pixels, unit_range

BORDER = 4  # pixels around an image before it is cropped
EPOCHS = 1000  # a seed's epochs never draw what those of another seed do


@dataclass(frozen=True)
class Images:
    """Pixels [N, 3, H, W] in float32, of mean 0 and deviation 1 by channel, and classes [N]."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)


def read(folder: Path, samples: int, tests: int) -> tuple[Images, Images]:
    """Return training and test images of `folder`, which holds train/CLASS/* and test/CLASS/*.

    Each class gives its first files by name, in equal shares. Both are scaled by the mean and the
    deviation of the training images.

    Raises:
        ValueError: a file cannot be read, or the classes have fewer images than were asked for.
    """
    train, train_classes = _pixels(folder / "train", samples)
    test, test_classes = _pixels(folder / "test", tests)
    mean = train.mean((0, 2, 3), keepdim=True)
    deviation = train.std((0, 2, 3), keepdim=True)
    return (
        Images((train - mean) / deviation, train_classes),
        Images((test - mean) / deviation, test_classes),
    )


def _pixels(folder: Path, count: int) -> tuple[Tensor, Tensor]:
    classes = sorted(at for at in folder.iterdir() if at.is_dir())
    found, targets = [], []
    for number, each in enumerate(classes):
        files = sorted(at for at in each.iterdir() if at.suffix.lower() in SUFFIXES)
        for file in files[: count // len(classes)]:
            pixels = read_pixels(file, 3, None)
            if isinstance(pixels, Unreadable):
                raise ValueError(f"every image must be readable; {file.name}: {pixels.reason}")
            found.append(unit_range(pixels))
            targets.append(number)
    if len(found) != count:
        raise ValueError(
            f"{folder.name} must give {count} images in equal shares; its {len(classes)} classes "
            f"give {len(found)}: ask for fewer"
        )
    return torch.from_numpy(np.stack(found)), torch.tensor(targets)


def mini_batches(
    images: Images, batch: int, seed: int, epoch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the mini-batches of an epoch: inputs [batch, 3, H, W] and classes [batch]."""
    draw = torch.Generator().manual_seed(EPOCHS * seed + epoch)
    order = torch.randperm(len(images), generator=draw)
    for chosen in torch.split(order[: len(images) // batch * batch], batch):
        yield moved(images.inputs[chosen], draw), images.targets[chosen]


def moved(x: Tensor, draw: torch.Generator) -> Tensor:
    """Return the images cropped after a border of zeros, and half of them mirrored."""
    count, channels, height, width = x.shape
    wide = F.pad(x, (BORDER,) * 4)
    top, left = torch.randint(2 * BORDER + 1, (2, count, 1), generator=draw)
    rows, columns = top + torch.arange(height), left + torch.arange(width)
    each = torch.arange(count)[:, None, None, None]
    channel = torch.arange(channels)[:, None, None]
    found = wide[each, channel, rows[:, None, :, None], columns[:, None, None, :]]
    mirrored = torch.rand(count, 1, 1, 1, generator=draw) < 0.5
    return torch.where(mirrored, found.flip(3), found)
