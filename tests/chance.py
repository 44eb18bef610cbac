"""Small models with batch normalisation, losses, batches and ways to run them, drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from tests.oracle import copy_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from anybatch import Engine, LazyBatch, Loss
from anybatch.core.plan import OffloadPlan
from anybatch.execution.step import Step as MadeStep

CLASSES = 3
STEPS = 5
"""Consecutive steps of one engine, each of another batch size."""

CONVS: Any = (nn.Linear, nn.Conv1d, nn.Conv2d)
NORMS: Any = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)
HOW = ("module", "module", "module", "bare", "past the module", "twice", "in eval")
ACTS: tuple[Callable[[Tensor], Tensor], ...] = (
    nn.ReLU(inplace=True), nn.ReLU6(inplace=True), torch.tanh, F.gelu, F.silu,
)  # fmt: skip


class Part(nn.Module):
    """A convolution, a batch normalisation in one of many ways, an activation, perhaps a sum.

    `plain` leaves out that a part is computed again in backward, where torch alone moves the
    running statistics again.
    """

    def __init__(self, rng: random.Random, dims: int, width: int, *, drops: bool) -> None:
        super().__init__()
        self.how, self.act = rng.choice(HOW), rng.choice(ACTS)
        self.adds, self.again = rng.random() < 0.4, rng.choice([None, None, False, True])
        self.plain = False
        self.conv = convolution(dims, width, width)
        self.norm = NORMS[dims](
            width,
            eps=rng.choice([1e-5, 1e-3]),
            momentum=rng.choice([0.1, 0.3, 1.0, None]),
            affine=rng.random() < 0.8,
            track_running_stats=self.how in ("in eval", "past the module") or rng.random() < 0.8,
        )
        self.drop = nn.Dropout(0.3 if drops and rng.random() < 0.5 else 0.0)
        if self.how == "in eval":
            self.norm.eval()

    def forward(self, x: Tensor) -> Tensor:
        """[n, width, ...] -> the same."""
        if self.plain or self.again is None:
            return self.body(x)
        found: Tensor = checkpoint(self.body, x, use_reentrant=self.again)
        return found

    def body(self, x: Tensor) -> Tensor:
        norm, h = self.norm, self.conv(x)
        if self.how == "bare":
            h = F.batch_norm(h, None, None, norm.weight, norm.bias, True, 0.1, norm.eps)
        elif self.how == "past the module":
            statistics = norm.running_mean, norm.running_var
            h = torch.batch_norm(h, norm.weight, norm.bias, *statistics, True, 0.2, norm.eps, False)
        elif self.how == "twice":
            h = norm(h) - norm(x)
        else:
            h = norm(h)
        h = self.drop(self.act(h))
        return h + x if self.adds else h


class Net(nn.Module):
    """A convolution, one to three parts of which the first normalises, and a head."""

    def __init__(self, rng: random.Random, dims: int, *, drops: bool) -> None:
        super().__init__()
        width = rng.randint(2, 5)
        self.first = convolution(dims, 3, width)
        self.parts = nn.ModuleList(
            Part(rng, dims, width, drops=drops) for _ in range(rng.randint(1, 3))
        )
        self.norm = NORMS[dims](width)
        self.head = nn.Linear(width, CLASSES)
        if rng.random() < 0.2:
            self.first.weight.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 3, ...] -> [n, classes]."""
        x = self.norm(self.first(x))
        for part in self.parts:
            x = part(x)
        return self.head(x.flatten(2).mean(2) if x.dim() > 2 else x)


def convolution(dims: int, inside: int, outside: int) -> Any:
    return CONVS[dims](inside, outside, *([3, 1, 1] if dims else []))


def weighted(out: Tensor, y: Tensor) -> Tensor:
    weight = torch.tensor([1.0, 5.0, 0.2], dtype=out.dtype)
    return F.cross_entropy(out, y, weight=weight, ignore_index=1)


def smooth(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, label_smoothing=0.2, reduction="sum")


def centred(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out - out.mean(0), y)


def dice_coefficient_loss(out: Tensor, y: Tensor) -> Tensor:
    p, t = out.softmax(1), F.one_hot(y, CLASSES)
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())


def squares(out: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(out, F.one_hot(y, CLASSES).to(out.dtype)) + 0.1 * F.cross_entropy(out, y)


def each(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


def mean_of_each(out: Tensor, y: Tensor) -> Tensor:
    return each(out, y).mean()


LOSSES: list[tuple[Any, Any]] = [
    *(
        (loss, loss)
        for loss in (F.cross_entropy, weighted, smooth, centred, dice_coefficient_loss, squares)
    ),
    (Loss.per_sample(each), mean_of_each),
]
"""What an engine is given, and what torch alone computes."""


class Step(NamedTuple):
    """One step that is about to be made, on a model that trains from step to step."""

    number: int
    said: str
    model: nn.Module
    engine: Engine
    loss: Any
    x: Tensor
    y: Tensor
    lazy: bool

    def make(self) -> Tensor:
        """Make the step, and return its loss."""
        if self.lazy:
            return self.engine.backward(LazyBatch(TensorDataset(self.x, self.y)))
        return self.engine.backward(self.x, self.y)


def steps(count: int, *, drops: bool = False) -> Iterator[Step]:
    """Yield `count` steps; who takes one makes it before the next.

    Args:
        count: steps.
        drops: models may have dropout. Default False.
    """
    for number in range(0, count, STEPS):
        rng = random.Random(number)
        torch.manual_seed(number)
        yield from _of_one_engine(number, rng, drops=drops)


def _of_one_engine(first: int, rng: random.Random, *, drops: bool) -> Iterator[Step]:
    dims = rng.randint(0, 2)
    sides = [rng.randint(2, 5) for _ in range(dims)]
    model = Net(rng, dims, drops=drops).double()
    loss_options, loss = rng.choice(LOSSES)
    sizes = [rng.randint(4, 20) for _ in range(STEPS)]
    mean, scale = rng.choice([0.0, 3.0, -10.0]), rng.choice([0.5, 1.0, 5.0])

    def rows(count: int) -> tuple[Tensor, Tensor]:
        x = mean + scale * torch.randn(count, 3, *sides, dtype=torch.float64)
        y = torch.randint(CLASSES, (count,))
        y[0] = 0  # something is not ignored
        return x, y

    split, lazy = rng.randint(1, max(sizes) - 1), rng.random() < 0.15
    engine, said = Engine(model, loss_options, micro_batch=split), f"micro-batches of {split}"
    capacity = rng.choice([0, 0, 1000, 5000, 20000])
    runner: Any = engine._runner
    if capacity:
        said += f", room for {capacity} bytes"
    make = runner.step
    inside = random.Random(-first).choice([None, None, 0, 2000, 10000])
    if inside is not None:
        said += f", {inside} bytes of what runs may stay"

    def step_of(*arguments: Any, **others: Any) -> MadeStep:
        step: MadeStep = make(*arguments, **others)
        step.lane_bytes = capacity
        if inside is not None:
            runner._offload(step, OffloadPlan("file", None, (inside, inside), 0, 0, 1))
        return step

    runner.step = step_of
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for number, size in enumerate(sizes, first):
        if rng.random() < 0.7:
            optimizer.zero_grad()
        parts = [f"{p.how}, again={p.again}" for p in model.parts if isinstance(p, Part)]
        words = (
            f"{said} of {size}, {dims} dims, {lazy=}, {getattr(loss, '__name__', loss)}, {parts}"
        )
        yield Step(number, words, model, engine, loss, *rows(size), lazy=lazy)
        optimizer.step()


def as_written_once(model: nn.Module, *, plain: bool) -> nn.Module:
    """Return a copy of a model of which nothing is computed again, if `plain`."""
    copied = copy_of(model)
    for part in copied.modules():
        if isinstance(part, Part):
            part.plain = plain
    return copied
