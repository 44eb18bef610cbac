"""Two small trainings in whose networks most time goes to convolutions that torch has no way for.

Images: three blocks in the manner of RepLKNet (Ding et al. 2022), depthwise windows of 31, 29 and
27 pixels, on CIFAR-10. Sequences: two blocks in the manner of Hyena (Poli et al. 2023), a long
depthwise convolution of each channel times the channel itself, on a made task: a sequence of noise
comes once more, weaker, after one of four delays, and the class is which. No window shorter than
the delay sees anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.agbn.images import mini_batches, read
from benchmarks.ucudnn.kernels.cases import Block

Batches = Iterator[tuple[Tensor, Tensor]]

WIDTHS, WINDOWS = (12, 24, 48), (31, 29, 27)
LENGTH, LONG, CHANNELS = 2048, 1023, 8
DELAYS = (100, 200, 300, 400)
ECHO = 0.8


@dataclass(frozen=True)
class Size:
    """How much is trained.

    Attributes:
        batch: samples of a step, and of an evaluation.
        steps: of an epoch.
        epochs: number of them.
        tests: samples that are never trained on.
        compared: samples of the steps that are compared.
    """

    batch: int
    steps: int
    epochs: int
    tests: int
    compared: int


@dataclass(frozen=True)
class Task:
    """A training.

    Attributes:
        title: in words.
        make: returns its network, as the generator of torch draws it.
        batches: samples of a step, seed, epoch -> the mini-batches of that epoch.
        tests: inputs and classes that are never trained on.
        lr: learning rate of SGD with a momentum of 0.9.
        size: how much of it.
    """

    title: str
    make: Callable[[], nn.Module]
    batches: Callable[[int, int, int], Batches]
    tests: tuple[Tensor, Tensor]
    lr: float
    size: Size


IMAGES = Size(batch=16, steps=32, epochs=2, tests=160, compared=4)
SEQUENCES = Size(batch=8, steps=32, epochs=2, tests=80, compared=4)
QUICK = Size(batch=4, steps=2, epochs=1, tests=8, compared=4)


def images(folder: Path, size: Size) -> Task:
    """Return the training on images; a folder has train/CLASS/* and test/CLASS/*, 32x32 pixels."""
    samples = -(-size.batch * size.steps // 10) * 10
    train, test = read(folder, samples, max(10, size.tests // 10 * 10))
    tests = test.inputs[: size.tests], test.targets[: size.tests]
    batches = partial(mini_batches, train)
    return Task("CIFAR-10, windows of 31, 29 and 27", replknet, batches, tests, 0.01, size)


def sequences(size: Size) -> Task:
    """Return the training on sequences."""
    tests = echoes(size.tests, torch.Generator().manual_seed(1 << 20))

    def batches(batch: int, seed: int, epoch: int) -> Batches:
        draw = torch.Generator().manual_seed(1000 * seed + epoch)
        for _ in range(size.steps * size.batch // batch):
            yield echoes(batch, draw)

    return Task(f"echoes in {LENGTH} steps, windows of {LONG}", hyena, batches, tests, 0.02, size)


def echoes(count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sequences [count, 1, LENGTH] of noise with an echo, and which delay it has [count]."""
    classes = torch.randint(len(DELAYS), (count,), generator=draw)
    noise = torch.randn(count, LENGTH, generator=draw)
    late = torch.stack(
        [row.roll(DELAYS[c]) for row, c in zip(noise, classes.tolist(), strict=True)]
    )
    return (noise + ECHO * late)[:, None] / (1 + ECHO**2) ** 0.5, classes


def replknet(widths: tuple[int, ...] = WIDTHS, windows: tuple[int, ...] = WINDOWS) -> nn.Module:
    """Return blocks with large windows: images [n, 3, 32, 32] -> logits [n, 10]."""
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, padding=1)]
    for at, (width, window) in enumerate(zip(widths, windows, strict=True)):
        if at:
            layers.append(nn.Conv2d(widths[at - 1], width, 3, 2, 1))
        layers.append(Block(width, window))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


class Gated(nn.Module):
    """A long convolution of each channel times the channel itself, beside a shortcut."""

    def __init__(self, channels: int, window: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, channels)
        self.long = nn.Conv1d(channels, channels, window, padding=window // 2, groups=channels)
        self.mix = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return as much as came in: [n, channels, length]."""
        y = self.norm(x)
        found: Tensor = x + self.mix(y * self.long(y))
        return found


def hyena(channels: int = CHANNELS, window: int = LONG, blocks: int = 2) -> nn.Module:
    """Return blocks with long windows: sequences [n, 1, length] -> logits [n, len(DELAYS)]."""
    layers: list[nn.Module] = [nn.Conv1d(1, channels, 1)]
    layers += [Gated(channels, window) for _ in range(blocks)]
    head = nn.Linear(channels, len(DELAYS))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), head)
