"""Views of a sample for a model: random ones to train on, fixed ones to test on; and the loader.

torchvision's transforms draw from a global generator, so an image's crop depends on the number of
workers and on other draws. Here the sampler yields (epoch, index) and a view is drawn only from
(seed, epoch, index): the same images in the same order for any number of workers.

    training    pad, random crop, random flip        test, classes    centre crop
                                                     test, masks      whole tiles of the crop's size

A batch carries the files that could not be read, and the samples that could.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from types import TracebackType
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from anybatch.cli.data import Data, Sample, Source, cached, corrupt
from anybatch.cli.faults import DataError, SettingsError, deaf
from anybatch.cli.images import Pixels, Size, Unreadable, unit_range
from anybatch.cli.progress import Progress
from anybatch.cli.team import SINGLE_PROCESS, Team

Key = tuple[int, int]  # epoch, index of the view
View = tuple[Tensor, Tensor]
A = TypeVar("A", bound=np.generic)


class Share(NamedTuple):
    """Which part of a mini-batch is a rank's: the `rank`-th of `size`, as equal as they can be."""

    rank: int
    size: int

    def of(self, samples: int) -> slice:
        """Return the rank's rows of so many samples."""
        return slice(self.rank * samples // self.size, (self.rank + 1) * samples // self.size)

    def count(self, samples: int) -> int:
        """Return how many they are."""
        rows = self.of(samples)
        return int(rows.stop - rows.start)


FULL_SHARE = Share(0, 1)


class LoadedBatch(NamedTuple):
    """A mini-batch on the host: inputs [N, C, H, W], targets [N] or [N, 1, H, W], bad files."""

    inputs: Tensor
    targets: Tensor
    unreadable: tuple[Unreadable, ...]


class InEpochs(Sampler[list[Key]]):
    """Hands out mini-batches of (epoch, index): shuffled anew each epoch, or in order.

    The order is a function of seed and epoch, so an epoch can begin at its `start`-th mini-batch.
    Of several ranks each gets its share of every mini-batch, which may be empty.
    """

    def __init__(
        self, size: int, batch_size: int, seed: int, *, shuffle: bool, share: Share = FULL_SHARE
    ) -> None:
        self.size, self.batch_size, self.seed, self.shuffle = size, batch_size, seed, shuffle
        self.share = share
        self.epoch = self.start = 0

    def __len__(self) -> int:
        return math.ceil(self.size / self.batch_size)

    def __iter__(self) -> Iterator[list[Key]]:
        order = np.arange(self.size)
        if self.shuffle:
            order = np.random.default_rng((self.seed, self.epoch)).permutation(self.size)
        for begin in range(self.start * self.batch_size, self.size, self.batch_size):
            rows = order[begin : begin + self.batch_size]
            yield [(self.epoch, int(index)) for index in rows[self.share.of(len(rows))]]


@dataclass
class Views(Dataset[View | Unreadable]):
    """The views of a source: random ones of each sample, or all its fixed ones.

    `offsets` are the (top, left) corners of the fixed views; None means `crops` random ones.
    `masks` says that targets are masks, not classes.
    """

    source: Source
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: Size
    offsets: tuple[tuple[int, int], ...] | None = None
    crops: int = 1
    pad: int = 0
    flip: bool = False
    seed: int = 0
    masks: bool = False
    _read: Callable[[int], Sample | Unreadable] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.source) * self._each()

    def __getitem__(self, key: Key) -> View | Unreadable:
        epoch, index = key
        views = self._each()
        if self._read is None:  # made where it is used: a cache does not travel to a worker
            self._read = cached(self.source)
        sample = self._read(index // views)
        if isinstance(sample, Unreadable):
            return sample
        pixels, target = sample
        if self.offsets:
            corner, mirrored = self.offsets[index % views], False
        else:
            corner, mirrored = self._draw((self.seed, epoch, index), pixels.shape)
        if self.pad and not self.offsets:  # padding is zero, the mean, so it comes after scaling
            image = self._cut(self._scaled(pixels), corner, mirrored=mirrored)
        else:
            image = self._scaled(self._cut(pixels, corner, mirrored=mirrored))
        if isinstance(target, int):
            return torch.from_numpy(image), torch.tensor(target)
        mask = self._cut(target, corner, mirrored=mirrored)
        return torch.from_numpy(image), torch.from_numpy(mask).float()

    def none(self) -> View:
        """Return no sample at all: inputs and targets as they are stacked, with 0 rows."""
        targets = torch.empty(0, 1, *self.crop) if self.masks else torch.empty(0, dtype=torch.int64)
        return torch.empty(0, len(self.mean), *self.crop), targets

    def _each(self) -> int:
        return len(self.offsets) if self.offsets else self.crops

    def _scaled(self, pixels: Pixels) -> NDArray[np.float32]:
        image = unit_range(pixels)
        image -= np.asarray(self.mean, np.float32)[:, None, None]
        image /= np.asarray(self.std, np.float32)[:, None, None]
        return image

    def _draw(self, key: tuple[int, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], bool]:
        draw = np.random.default_rng(key)
        positions = [s + 2 * self.pad - c + 1 for s, c in zip(shape[1:], self.crop, strict=True)]
        corner = (int(draw.integers(positions[0])), int(draw.integers(positions[1])))
        return corner, self.flip and bool(draw.integers(2))

    def _cut(self, image: NDArray[A], corner: tuple[int, int], *, mirrored: bool) -> NDArray[A]:
        if self.pad and not self.offsets:
            image = np.pad(image, ((0, 0), (self.pad, self.pad), (self.pad, self.pad)))
        (top, left), (height, width) = corner, self.crop
        part = image[:, top : top + height, left : left + width]
        return np.ascontiguousarray(part[:, :, ::-1] if mirrored else part)


def fixed_offsets(size: Size, crop: Size, *, tiles: bool) -> tuple[tuple[int, int], ...]:
    """Return the corners of the test views: as many full tiles as fit, or one; centred."""
    counts = [s // c if tiles else 1 for s, c in zip(size, crop, strict=True)]
    starts = [(s - n * c) // 2 for s, c, n in zip(size, crop, counts, strict=True)]
    tops, lefts = (
        [a + i * c for i in range(n)] for a, c, n in zip(starts, crop, counts, strict=True)
    )
    return tuple((top, left) for top in tops for left in lefts)


def make_views(
    data: Data, *, crop: int | None, crops: int, pad: int, flip: bool, seed: int
) -> tuple[Views, Views]:
    """Return the training views and the test views of `data`.

    Raises:
        SettingsError: when the crop is larger than the padded image.
    """
    window = (crop, crop) if crop is not None else data.size
    if crop is not None and crop > min(data.size):
        raise SettingsError(
            f"crop must be at most the image's {min(data.size)} pixels; got {crop}. "
            "Use a larger --image-size or a smaller --crop."
        )
    masks = data.task == "segmentation"
    offsets = fixed_offsets(data.size, window, tiles=masks)
    common = (data.mean, data.std, window)
    return (
        Views(data.train, *common, None, crops, pad, flip, seed, masks),
        Views(data.test, *common, offsets, masks=masks),
    )


class Loader:
    """Mini-batches of views, epoch by epoch; the last one of an epoch may be smaller.

    Of several ranks each reads only its `share`. `batch_size` is that of all. `torch` is torch's
    own loader, at the epoch that was requested last.
    """

    def __init__(
        self,
        views: Views,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool,
        workers: int,
        share: Share = FULL_SHARE,
    ) -> None:
        self.order = InEpochs(len(views), batch_size, seed, shuffle=shuffle, share=share)
        self.torch: DataLoader[View | Unreadable] = DataLoader(
            views,
            batch_sampler=self.order,
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=partial(collate, none=views.none()),
            worker_init_fn=_begin_worker,
            generator=torch.Generator().manual_seed(seed),
        )

    def __len__(self) -> int:
        return len(self.order)

    def epoch(self, number: int, skip: int = 0) -> Iterator[LoadedBatch]:
        """Yield the mini-batches of epoch `number` but the first `skip`, which are not read."""
        self.order.epoch, self.order.start = number, skip
        return iter(self.torch)

    def micro_batches(self, micro_batch: int, skip: int = 0) -> int:
        """Return the micro-batches of an epoch, less `skip` mini-batches, if all can be read."""
        size, share = self.order.batch_size, self.order.share
        full, rest = divmod(max(0, self.order.size - skip * size), size)
        return full * -(-share.count(size) // micro_batch) + -(-share.count(rest) // micro_batch)


def _begin_worker(_number: int) -> None:
    deaf()
    sys.excepthook = _of_reader


def _of_reader(
    error_type: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Print an error of a reader's threads, unless the run ended while it sent an image."""
    # Python prints it beside the one line of an interrupted run
    # (test_a_reader_that_sends_to_a_run_that_has_ended_is_silent).
    if not isinstance(error, EOFError | ConnectionError):
        sys.__excepthook__(error_type, error, traceback)


def collate(items: Sequence[View | Unreadable], none: View) -> LoadedBatch:
    """Stack the views that could be read, `none` if there are none; keep the bad files."""
    broken = tuple(item for item in items if isinstance(item, Unreadable))
    views = [item for item in items if not isinstance(item, Unreadable)]
    if not views:
        return LoadedBatch(*none, broken)
    images, targets = zip(*views, strict=True)
    return LoadedBatch(torch.stack(images), torch.stack(targets), broken)


# Mini-batches of an epoch that can be trained on, and the treatment of broken files.
#
# A DataLoader that reads a broken file ends the training, hours in, with the traceback of a worker.
# Here a broken file is returned with the samples that could be read (`views`): it ends the run in
# one line that names it, or, on request, is reported once, counted and skipped.
#
# Of several ranks each reads its own rows. A mini-batch counts where any rank has a sample: the
# others then join the step with none. Unreadable files of one rank are reported to all.


class Reading:
    """Reads mini-batches; `unreadable` holds the paths of all files left out so far."""

    def __init__(
        self, progress: Progress, *, skip_corrupt: bool, team: Team = SINGLE_PROCESS
    ) -> None:
        self.progress, self.skip_corrupt, self.team = progress, skip_corrupt, team
        self.unreadable: set[str] = set()

    def epoch(
        self, loader: Loader, number: int, skip: int = 0
    ) -> Iterator[tuple[int, LoadedBatch]]:
        """Yield the mini-batches that have a sample, and how many are done with each.

        The first `skip` mini-batches are left out.

        Raises:
            DataError: at a broken file, or when there is no sample at all.
            RankError: the same, on another rank.
        """
        empty = not skip
        batches = loader.epoch(number, skip)
        for done in count(skip + 1):
            batch = self.team.together(partial(self._next, batches))
            if batch is None:
                break
            if self._share_unreadable(batch):
                empty = False
                yield done, batch
        if empty:
            raise DataError(
                "no sample of an epoch could be read: all were skipped. Check the files."
            )

    def first(self, loader: Loader, number: int) -> LoadedBatch:
        """Return the first mini-batch of an epoch of which every rank has a sample.

        Raises:
            SettingsError: there is none.
        """
        for _, batch in self.epoch(loader, number):
            if all(samples for [samples] in self.team.gather(len(batch.inputs))):
                return batch
        raise SettingsError(
            f"every rank must have a sample to plan with; {self.team.size} ranks share a "
            "mini-batch. Use a larger --batch-size, fewer ranks, or --micro-batch without "
            "--memory, which plans nothing."
        )

    def _next(self, batches: Iterator[LoadedBatch]) -> LoadedBatch | None:
        batch = next(batches, None)
        if batch is not None and batch.unreadable and not self.skip_corrupt:
            raise corrupt(batch.unreadable)
        return batch

    def _share_unreadable(self, batch: LoadedBatch) -> bool:
        """Share the unreadable files with all ranks; return whether any rank has a sample."""
        new = [(b.path, b.reason) for b in batch.unreadable if b.path not in self.unreadable]
        rows = self.team.gather(len(batch.inputs), len(new))
        if any(broken for _, broken in rows):
            for path, reason in dict.fromkeys(chain.from_iterable(self.team.objects(new))):
                self.unreadable.add(path)
                self.progress.say(f"skipped {path}: {reason}")
        return any(samples for samples, _ in rows)
