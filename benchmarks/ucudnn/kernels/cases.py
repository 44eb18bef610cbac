"""The layers that are measured, and a network of them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layer:
    """A convolution whose output is as large as its input.

    Attributes:
        title: in words.
        channels: of input and output.
        image: sizes of the input.
        window: sizes of the filters, odd.
        groups: of channels.
        samples: of a mini-batch.
    """

    title: str
    channels: int
    image: tuple[int, ...]
    window: tuple[int, ...]
    groups: int
    samples: int

    def make(self) -> nn.Module:
        """Return it, with random filters."""
        layer_class: Callable[..., nn.Module] = nn.Conv1d if len(self.image) == 1 else nn.Conv2d
        padding = tuple(k // 2 for k in self.window)
        options = {"padding": padding, "groups": self.groups, "bias": False}
        return layer_class(self.channels, self.channels, self.window, **options)

    def rows(self) -> Tensor:
        """Return a random mini-batch."""
        return torch.randn(self.samples, self.channels, *self.image)


LAYERS = {
    "depthwise 31": Layer(
        "depthwise 31x31, 128 channels, 56x56, 32 images", 128, (56, 56), (31, 31), 128, 32
    ),
    "long depthwise": Layer(
        "depthwise 1023, 64 channels of 8192, 8 rows", 64, (8192,), (1023,), 64, 8
    ),
    "dense 31": Layer("dense 31x31, 32 channels, 56x56, 8 images", 32, (56, 56), (31, 31), 1, 8),
    "long dense": Layer("dense 255, 64 channels of 4096, 16 rows", 64, (4096,), (255,), 1, 16),
    "usual": Layer("dense 3x3, 64 channels, 56x56, 16 images", 64, (56, 56), (3, 3), 1, 16),
}


class Block(nn.Module):
    """A depthwise convolution with a large window between two of one pixel, beside a shortcut."""

    def __init__(self, channels: int, window: int) -> None:
        super().__init__()
        self.into = nn.Sequential(nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels))
        self.large = nn.Conv2d(channels, channels, window, padding=window // 2, groups=channels)
        self.out = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU())
        self.last = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return as much as came in."""
        y: Tensor = x + self.last(self.out(self.large(self.into(x).relu())))
        return y


def large_windows() -> nn.Module:
    """Return a small network in the manner of RepLKNet: windows of 31, 29 and 27 pixels."""
    widths, windows = (32, 64, 128), (31, 29, 27)
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 2, 1)]
    for at, (width, window) in enumerate(zip(widths, windows, strict=True)):
        layers.append(Block(width, window))
        if at + 1 < len(widths):
            layers.append(nn.Conv2d(width, widths[at + 1], 3, 2, 1))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))
