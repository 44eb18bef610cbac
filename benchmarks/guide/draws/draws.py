"""What is drawn: a network, its loss, a batch, an optimizer, a budget, and what a person asks for.

Every draw is made by its seed alone. Budgets lie between seven tenths of what one sample a
micro-batch holds and what the undivided batch holds, evenly on a logarithmic scale, so that some
of them are too small for anything.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp, log
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import anybatch
from anybatch.cli.models.resnet import resnet20
from benchmarks.mbs.models import LSTM, MLP, ResNet, TransformerLM, UNet
from benchmarks.mbs.prediction.models import densenet

BELOW = 0.7
"""Of the floor: the least budget."""

Made = tuple[nn.Module, Callable[..., Tensor], Callable[[int], tuple[Tensor, Tensor]]]
"""A network, its loss, and what makes so many rows for it."""


def dice(out: Tensor, target: Tensor) -> Tensor:
    """One less twice the overlap, over the whole batch: samples meet in it."""
    share = out.sigmoid()
    return 1 - 2 * (share * target).sum() / (share.sum() + target.sum() + 1)


def tokenwise(out: Tensor, target: Tensor) -> Tensor:
    """The mean over all tokens."""
    return functional.cross_entropy(out.flatten(0, 1), target.flatten())


def _images(side: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randn(n, 3, side, side), torch.randint(10, (n,)))


def _masks(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, 64, 64), torch.rand(n, 1, 64, 64).round()


def _tokens(n: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(64, (n, 64))
    return x, x.roll(-1, 1)


def _long() -> nn.Module:
    """Two depthwise convolutions over long signals, whose fast algorithms want workspace."""
    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [nn.Conv1d(16, 16, 255, padding=127, groups=16), nn.GELU()]
    return nn.Sequential(nn.Conv1d(1, 16, 1), *layers, nn.AdaptiveAvgPool1d(1), nn.Flatten())


def _signals(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 1, 2048), torch.randint(10, (n,))


ENTROPY = functional.cross_entropy
NETWORKS: dict[str, Callable[[], Made]] = {
    "ResNet, GroupNorm": lambda: (ResNet(10, 16, (1, 1)), ENTROPY, _images(32)),
    "ResNet, BatchNorm": lambda: (
        resnet20(num_classes=10, in_channels=3, norm="batch"),
        ENTROPY,
        _images(24),
    ),
    "DenseNet, BatchNorm": lambda: (densenet((3, 3), growth=8), ENTROPY, _images(16)),
    "U-Net": lambda: (UNet(width=8, depth=2), nn.BCEWithLogitsLoss(), _masks),
    "U-Net, Dice": lambda: (UNet(width=8, depth=2), dice, _masks),
    "transformer": lambda: (TransformerLM(64, 64, 2, 4, 64), tokenwise, _tokens),
    "LSTM": lambda: (LSTM(width=128), tokenwise, _tokens),
    "long convolutions": lambda: (_long(), ENTROPY, _signals),
    "wide layers": lambda: (
        MLP(64, 1024, 1024, 10),
        ENTROPY,
        lambda n: (torch.randn(n, 64), torch.randint(10, (n,))),
    ),
}
REQUESTS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"timed": False},
    {"offload": "off"},
    {"offload": "file"},
    {"states": "auto"},
    {"workspace": "auto"},
    {"workspace": "4MiB"},
    {"rng": "batch"},
    {"micro_batch": 2},
)
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
}
SIZES = (5, 9, 16, 33, 48, 64)


@dataclass(eq=False)
class Draw:
    """A training, the bytes it may hold, and what a person asks of its plan."""

    seed: int
    network: str = field(init=False)
    optimizer: str = field(init=False)
    size: int = field(init=False)
    requests: dict[str, Any] = field(init=False)
    share: float = field(init=False)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.network = rng.choice([*NETWORKS])
        self.optimizer = rng.choice([*OPTIMIZERS])
        self.size = rng.choice(SIZES) * (8 if self.network == "wide layers" else 1)
        self.requests = rng.choice(REQUESTS)
        self.share = rng.random()

    def make(self) -> "Training":
        """Return the training; the same one each time."""
        torch.manual_seed(self.seed)
        model, loss_fn, rows = NETWORKS[self.network]()
        return Training(model, loss_fn, rows(self.size), OPTIMIZERS[self.optimizer](model))

    def budget(self, training: "Training") -> int:
        """Return the bytes it may hold."""
        memory = training.plan("1TiB", timed=False, offload="off").memory
        assert memory is not None
        assert memory.floor is not None
        low, high = sorted((memory.floor, memory.undivided))
        return round(exp(log(BELOW * low) + self.share * (log(high) - log(BELOW * low))))


@dataclass(eq=False)
class Training:
    """A network, its loss, a batch and an optimizer."""

    model: nn.Module
    loss_fn: Callable[..., Tensor]
    batch: tuple[Tensor, Tensor]
    optimizer: torch.optim.Optimizer

    def plan(self, memory: int | str, **options: Any) -> anybatch.Plan:
        """Return the plan of a step within so many bytes."""
        return anybatch.plan(
            self.model, self.loss_fn, self.batch, memory=memory, optimizer=self.optimizer, **options
        )
