"""A small convolutional network: the default for images of a few pixels, such as the digits.

A ResNet is too much for an 8x8 image. Two levels of two convolutions cover all of it, and train on
two CPU cores in seconds.
"""

from __future__ import annotations

from torch import nn

from anybatch.cli.models.norm import make_norm


def cnn(
    *, num_classes: int = 10, in_channels: int = 1, width: int = 32, norm: str = "group"
) -> nn.Sequential:
    """Return a network of four convolutions: [N, in_channels, H, W] -> logits [N, num_classes]."""

    def once(inside: int, outside: int) -> tuple[nn.Module, ...]:
        conv = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
        return conv, make_norm(norm, outside), nn.ReLU(inplace=True)

    return nn.Sequential(
        *once(in_channels, width),
        *once(width, width),
        nn.MaxPool2d(2, ceil_mode=True),
        *once(width, 2 * width),
        *once(2 * width, 2 * width),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, num_classes),
    )
