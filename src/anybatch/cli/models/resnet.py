"""Residual networks: ResNet-18, 34, 50, 101 for large images and small, and ResNet-20 for CIFAR.

torchvision has the large ones, but only with a stem that shrinks a 32x32 image to 8x8 before the
first block, and with no build for every torch. Here the stem and the normalisation are parameters;
with `stem="imagenet", norm="batch"` the parameter counts are the published ones.

Source: He et al. 2015, "Deep residual learning", sections 3.3 and 4.2; the stride of a bottleneck
sits in its 3x3 convolution, as in torchvision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch.cli.faults import ModelError
from anybatch.cli.models.norm import make_norm

Stem = Literal["imagenet", "cifar"]
MakeNorm = Callable[[int], nn.Module]

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
SMALL_IMAGE = 64  # pixels: at most this gets the CIFAR stem


def _conv(inside: int, outside: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, kernel, stride, padding=kernel // 2, bias=False)


class PadShortcut(nn.Module):
    """Every `stride`-th pixel, with zeros for the new channels: no parameter (option A)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.stride, self.more = stride, outside - inside

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, inside, H, W] to [N, outside, ceil(H / stride), ceil(W / stride)]."""
        low = self.more // 2
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, low, self.more - low))


class Residual(nn.Module):
    """relu(branch(x) + shortcut(x))."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut = branch, shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, C, H, W] to the shape that branch and shortcut share."""
        return torch.relu(self.branch(x) + self.shortcut(x))


def _basic(inside: int, width: int, stride: int, norm: MakeNorm) -> nn.Sequential:
    return nn.Sequential(
        *(_conv(inside, width, 3, stride), norm(width), nn.ReLU(inplace=True)),
        *(_conv(width, width, 3), norm(width)),
    )


def _bottleneck(inside: int, width: int, stride: int, norm: MakeNorm) -> nn.Sequential:
    return nn.Sequential(
        *(_conv(inside, width, 1), norm(width), nn.ReLU(inplace=True)),
        *(_conv(width, width, 3, stride), norm(width), nn.ReLU(inplace=True)),
        *(_conv(width, 4 * width, 1), norm(4 * width)),
    )


def _stem(in_channels: int, width: int, stem: Stem, norm: MakeNorm) -> list[nn.Module]:
    if stem == "cifar":
        return [_conv(in_channels, width, 3), norm(width), nn.ReLU(inplace=True)]
    if stem == "imagenet":
        shrink = nn.MaxPool2d(3, stride=2, padding=1)
        return [_conv(in_channels, width, 7, 2), norm(width), nn.ReLU(inplace=True), shrink]
    raise ModelError(f"stem must be 'imagenet' or 'cifar'; got {stem!r}.")


def _finish(layers: list[nn.Module], channels: int, num_classes: int) -> nn.Sequential:
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)]
    model = nn.Sequential(*layers, *head)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def resnet(
    depth: int,
    *,
    num_classes: int = 1000,
    in_channels: int = 3,
    norm: str = "group",
    stem: Stem = "imagenet",
) -> nn.Sequential:
    """Return ResNet-`depth` (18, 34, 50 or 101): [N, in_channels, H, W] -> logits [N, num_classes].

    `stem="imagenet"` divides height and width by 4 before the first block, `"cifar"` by 1.

    Raises:
        ModelError: for another depth or stem.

    Source: He et al. 2015, Table 1.
    """
    if depth not in BLOCKS:
        raise ModelError(f"depth must be one of {sorted(BLOCKS)}; got {depth}.")
    make = functools.partial(make_norm, norm)
    branch, growth = (_basic, 1) if depth < 50 else (_bottleneck, 4)
    layers, channels = _stem(in_channels, 64, stem, make), 64
    for stage, blocks in enumerate(BLOCKS[depth]):
        width = 64 * 2**stage
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            shortcut: nn.Module = nn.Identity()
            if stride != 1 or channels != growth * width:
                shortcut = nn.Sequential(
                    _conv(channels, growth * width, 1, stride), make(growth * width)
                )
            layers.append(Residual(branch(channels, width, stride, make), shortcut))
            channels = growth * width
    return _finish(layers, channels, num_classes)


def resnet20(
    *, num_classes: int = 10, in_channels: int = 3, norm: str = "group", blocks: int = 3
) -> nn.Sequential:
    """Return the CIFAR ResNet of depth 6 x `blocks` + 2, with shortcuts without weights.

    Maps [N, in_channels, H, W] to logits [N, num_classes]. Source: He et al. 2015, section 4.2.
    """
    make = functools.partial(make_norm, norm)
    layers, channels = _stem(in_channels, 16, "cifar", make), 16
    for width in (16, 32, 64):
        for block in range(blocks):
            stride = 2 if width > 16 and block == 0 else 1
            shortcut = PadShortcut(channels, width, stride) if stride != 1 else nn.Identity()
            layers.append(Residual(_basic(channels, width, stride, make), shortcut))
            channels = width
    return _finish(layers, channels, num_classes)
