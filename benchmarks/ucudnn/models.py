"""The networks of the u-cuDNN paper, one with large windows, and two modules of parallel branches.

ResNets are those of the command line. AlexNet is the single column of Krizhevsky (2014), which the
paper has. DenseNet-40 is that of Huang et al. (2017) without bottlenecks, of growth 40 as in the
paper's section IV-B2. Module 3a is of Szegedy et al. (2015), Table 1. On a CPU torch has a fast
path for all of these; it has none for large windows, so a network of those is beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from anybatch.cli.models.resnet import resnet
from benchmarks.ucudnn.kernels.cases import large_windows


@dataclass(frozen=True)
class Network:
    """A network and its mini-batches.

    Attributes:
        title: in words.
        make: returns it.
        image: sizes of an input without its samples.
        batch: samples of the tables of kernels.
        few: samples of whole steps, both malloc modes and layouts of which are timed.
        paper: samples in the paper.
        inner: it stands inside a network, so its input needs a gradient.
    """

    title: str
    make: Callable[[], nn.Module]
    image: tuple[int, ...]
    batch: int
    few: int
    paper: str = "none"
    inner: bool = False


def alexnet(classes: int = 1000) -> nn.Module:
    """AlexNet of one column: [n, 3, 224, 224] -> logits [n, 1000]; 61.1 million parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(inplace=True)]
    layers += [nn.MaxPool2d(3, 2), nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2))
    for inside, outside in ((192, 384), (384, 256), (256, 256)):
        layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU(inplace=True)]
    layers += [nn.MaxPool2d(3, 2), nn.Flatten()]
    for inside in (256 * 6 * 6, 4096):
        layers += [nn.Dropout(), nn.Linear(inside, 4096), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(4096, classes))


class Grown(nn.Module):
    """A layer of a dense block without a bottleneck: what comes in, and `growth` channels more."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        conv = nn.Conv2d(channels, growth, 3, padding=1, bias=False)
        self.make = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(inplace=True), conv)

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, H, W] -> [n, channels + growth, H, W]."""
        return torch.cat([x, self.make(x)], 1)


def densenet40(classes: int = 10, growth: int = 40, layers: int = 12) -> nn.Module:
    """DenseNet-40: [n, 3, 32, 32] -> logits [n, 10], three blocks of 12 layers."""
    channels = 16
    found: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
    for block in range(3):
        if block:
            found += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
            found += [nn.Conv2d(channels, channels, 1, bias=False), nn.AvgPool2d(2)]
        for _ in range(layers):
            found.append(Grown(channels, growth))
            channels += growth
    found += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*found, nn.Flatten(), nn.Linear(channels, classes))


class Branches(nn.Module):
    """Modules side by side on one input, joined by channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """[n, c, H, W] -> all that the branches make of it, one after another."""
        return torch.cat([branch(x) for branch in self.branches], 1)


def inception_3a() -> nn.Module:
    """GoogLeNet's module 3a: [n, 192, 28, 28] -> [n, 256, 28, 28]."""
    return Branches(
        nn.Conv2d(192, 64, 1),
        nn.Sequential(nn.Conv2d(192, 96, 1), nn.ReLU(), nn.Conv2d(96, 128, 3, padding=1)),
        nn.Sequential(nn.Conv2d(192, 16, 1), nn.ReLU(), nn.Conv2d(16, 32, 5, padding=2)),
        nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(192, 32, 1)),
    )


def wide_branches(channels: int = 32, windows: tuple[int, ...] = (7, 15, 23, 31)) -> nn.Module:
    """Depthwise convolutions with windows of several sizes side by side."""
    each = (nn.Conv2d(channels, channels, k, padding=k // 2, groups=channels) for k in windows)
    return Branches(*each)


LARGE = "large windows"

NETWORKS = {
    "alexnet": Network("AlexNet", alexnet, (3, 224, 224), 16, 8, "256"),
    "resnet18": Network("ResNet-18", partial(resnet, 18, norm="batch"), (3, 224, 224), 8, 4, "128"),
    "resnet50": Network(
        "ResNet-50", partial(resnet, 50, norm="batch"), (3, 224, 224), 8, 2, "32 and 64"
    ),
    "densenet40": Network("DenseNet-40, growth 40", densenet40, (3, 32, 32), 8, 2, "256"),
    LARGE: Network("windows of 31, 29 and 27", large_windows, (3, 96, 96), 16, 4),
}

MODULES = {
    "inception 3a": Network(
        "GoogLeNet's module 3a", inception_3a, (192, 28, 28), 16, 4, inner=True
    ),
    "wide branches": Network(
        "branches with windows of 7, 15, 23 and 31", wide_branches, (32, 40, 40), 8, 4, inner=True
    ),
}
