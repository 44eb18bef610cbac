"""The usual networks with batch normalisation: their true topology, few channels and few pixels.

Each is there twice: as it is for an ordinary run, shallower where depth costs seconds, and at its
published depth or beyond for a soak. ResNet-20, U-Net and DenseNet are those of the command line
and of the benchmarks; the others are here because torch alone has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.mbs.prediction.models import densenet
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch.cli.metrics import bce_dice
from anybatch.cli.models.resnet import Residual, _bottleneck, resnet20
from anybatch.cli.models.unet import UNet

CLASSES = 3
Kernel = int | tuple[int, int]


def unit(
    inside: int,
    outside: int,
    kernel: Kernel = 1,
    *,
    stride: int = 1,
    groups: int = 1,
    act: Callable[..., nn.Module] = nn.ReLU,
    eps: float = 1e-5,
) -> nn.Sequential:
    """A convolution of unchanged size, batch normalisation, an activation in place."""
    tall, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = tall // 2, wide // 2
    conv = nn.Conv2d(inside, outside, kernel, stride, padding, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outside, eps=eps), act(inplace=True))


def head(channels: int) -> nn.Sequential:
    """The mean of every channel, and a linear classifier."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def resnet50(*, blocks: tuple[int, ...], width: int) -> nn.Sequential:
    """Bottlenecks with a projection at the first of each stage. Source: He et al. 2015, Table 1."""
    channels = width
    layers: list[nn.Module] = [unit(3, width, 7, stride=2), nn.MaxPool2d(3, 2, 1)]
    for stage, count in enumerate(blocks):
        inner = width * 2**stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            shortcut: nn.Module = nn.Identity()
            if not block:
                project = nn.Conv2d(channels, 4 * inner, 1, stride, bias=False)
                shortcut = nn.Sequential(project, nn.BatchNorm2d(4 * inner))
            layers.append(Residual(_bottleneck(channels, inner, stride, nn.BatchNorm2d), shortcut))
            channels = 4 * inner
    return nn.Sequential(*layers, *head(channels))


class Branches(nn.Module):
    """Parallel branches of different depth, their channels beside each other."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """[n, C, H, W] -> [n, the sum of the branches' channels, ...]."""
        return torch.cat([branch(x) for branch in self.branches], 1)


def _in(*sizes: tuple[int, int, Kernel], stride: int = 1) -> nn.Sequential:
    """Units one after another, each (inside, outside, kernel); the last one has the stride."""
    last = len(sizes) - 1
    return nn.Sequential(
        *(unit(i, o, k, stride=stride if at == last else 1, eps=1e-3)
          for at, (i, o, k) in enumerate(sizes))
    )  # fmt: skip


def _pooled(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), unit(inside, outside, eps=1e-3))


def _even(i: int, w: int) -> Branches:
    return Branches(
        _in((i, w, 1)), _in((i, w, 1), (w, w, 5)), _in((i, w, 1), (w, w, 3), (w, w, 3)),
        _pooled(i, w),
    )  # fmt: skip


def _shrink(i: int, w: int) -> Branches:
    return Branches(
        _in((i, w, 3), stride=2), _in((i, w, 1), (w, w, 3), (w, w, 3), stride=2),
        nn.MaxPool2d(3, 2, 1),
    )  # fmt: skip


def _asymmetric(i: int, w: int) -> Branches:
    flat, tall = (1, 7), (7, 1)
    return Branches(
        _in((i, w, 1)),
        _in((i, w, 1), (w, w, flat), (w, w, tall)),
        _in((i, w, 1), (w, w, tall), (w, w, flat), (w, w, tall), (w, w, flat)),
        _pooled(i, w),
    )


def _forked(i: int, w: int) -> Branches:
    """Branches that fork once more at their ends."""

    def fork() -> Branches:
        return Branches(_in((w, w, (1, 3))), _in((w, w, (3, 1))))

    return Branches(
        _in((i, w, 1)),
        nn.Sequential(_in((i, w, 1)), fork()),
        nn.Sequential(_in((i, w, 1), (w, w, 3)), fork()),
        _pooled(i, w),
    )


class Inception(nn.Module):
    """Inception-v3 with its auxiliary head: images -> two logits. Source: Szegedy et al. 2015.

    `counts` says how many modules each of the three kinds has, (3, 4, 2) in the paper.
    """

    def __init__(self, *, counts: tuple[int, int, int], width: int) -> None:
        super().__init__()
        w, (even, asymmetric, forked) = width, counts
        self.stem = _in((3, w, 3), (w, w, 3), (w, 2 * w, 3), stride=2)
        self.even = nn.Sequential(_even(2 * w, w), *(_even(4 * w, w) for _ in range(even - 1)))
        self.middle = nn.Sequential(
            _shrink(4 * w, w), _asymmetric(6 * w, w),
            *(_asymmetric(4 * w, w) for _ in range(asymmetric - 1)),
        )  # fmt: skip
        self.aux = nn.Sequential(_in((4 * w, w, 1), (w, 2 * w, 3), stride=2), *head(2 * w))
        self.last = nn.Sequential(
            _shrink(4 * w, w), _forked(6 * w, w), *(_forked(6 * w, w) for _ in range(forked - 1))
        )
        self.head = head(6 * w)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[n, 3, H, W] -> logits [n, classes] of the head, and of the auxiliary one."""
        x = self.middle(self.even(self.stem(x)))
        return self.head(self.last(x)), self.aux(x)


class Inverted(nn.Module):
    """Widen, convolve each channel by itself, narrow without an activation, and add."""

    def __init__(self, inside: int, outside: int, stride: int, expand: int) -> None:
        super().__init__()
        wide = inside * expand
        widen = [unit(inside, wide, act=nn.ReLU6)] if expand > 1 else []
        self.adds = stride == 1 and inside == outside
        self.body = nn.Sequential(
            *widen, unit(wide, wide, 3, stride=stride, groups=wide, act=nn.ReLU6),
            nn.Conv2d(wide, outside, 1, bias=False), nn.BatchNorm2d(outside),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """[n, inside, H, W] -> [n, outside, ...]."""
        return x + self.body(x) if self.adds else self.body(x)


MOBILE = (
    (1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
    (6, 320, 1, 1),
)  # fmt: skip
"""(expansion, channels, blocks, stride) of MobileNetV2's stages, two strides less for few pixels.

Source: Sandler et al. 2018, Table 2.
"""


def mobilenet(*, part: int, most: int) -> nn.Sequential:
    """MobileNetV2 with 1/`part` of the channels and at most `most` blocks a stage."""
    channels = max(2, 32 // part)
    layers: list[nn.Module] = [unit(3, channels, 3, act=nn.ReLU6)]
    for expand, wide, blocks, stride in MOBILE:
        for block in range(min(blocks, most)):
            outside = max(2, wide // part)
            layers.append(Inverted(channels, outside, 1 if block else stride, expand))
            channels = outside
    return nn.Sequential(*layers, unit(channels, 4 * channels, act=nn.ReLU6), *head(4 * channels))


def with_auxiliary(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    """Cross-entropy of both heads, as Inception is trained."""
    return F.cross_entropy(out[0], y) + 0.4 * F.cross_entropy(out[1], y)


@dataclass(frozen=True, eq=False)
class Network:
    """A network, its loss and its rows.

    Attributes:
        small: makes it for an ordinary run.
        full: makes it at full depth, and wider.
        loss: of outputs and targets.
        masks: targets are images of 0 and 1; else classes.
        side: pixels.
    """

    small: Callable[[], nn.Module]
    full: Callable[[], nn.Module]
    loss: Any = F.cross_entropy
    masks: bool = False
    side: int = 8

    def rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets."""
        side = self.side
        x = 2 * torch.randn(count, 3, side, side) + 1
        if self.masks:
            return x, (torch.rand(count, 1, side, side) > 0.7).to(x.dtype)
        return x, torch.randint(CLASSES, (count,))


NETWORKS: dict[str, Network] = {
    "ResNet-20": Network(
        lambda: resnet20(num_classes=CLASSES, norm="batch"),
        lambda: resnet20(num_classes=CLASSES, norm="batch", blocks=9),
    ),
    "ResNet-50": Network(
        lambda: resnet50(blocks=(1, 2, 2, 1), width=2),
        lambda: resnet50(blocks=(3, 4, 6, 3), width=8),
        side=32,
    ),
    "DenseNet": Network(
        lambda: densenet((2, 3, 4, 2), growth=2, classes=CLASSES),
        lambda: densenet((6, 12, 24, 16), growth=4, classes=CLASSES),
    ),
    "Inception": Network(
        lambda: Inception(counts=(1, 1, 1), width=2),
        lambda: Inception(counts=(3, 4, 2), width=4),
        with_auxiliary,
    ),
    "MobileNet": Network(
        lambda: mobilenet(part=8, most=1), lambda: mobilenet(part=4, most=4)
    ),
    "U-Net": Network(
        lambda: UNet(width=2, norm="batch"), lambda: UNet(width=8, norm="batch"),
        bce_dice, masks=True, side=16,
    ),
}  # fmt: skip


class Clipped(nn.Module):
    """Linear layers of which the results are clipped where autograd does not see it."""

    def __init__(self, features: int, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(features, features) for _ in range(depth))
        self.most = 9.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x.detach().clamp_(-self.most, self.most)
            x = F.silu(x)
        return x
