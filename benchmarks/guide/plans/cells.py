"""The trainings that are planned: usual networks, with and without BatchNorm, small enough to run.

Budgets are drawn between what one sample a micro-batch holds and what the undivided batch holds,
evenly on a logarithmic scale.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import exp, log

import torch
from torch.nn import functional

import anybatch
from anybatch.cli.models.resnet import resnet20 as resnet20_of
from benchmarks.mbs.choice.problems import resnet20, transformer, unet96
from benchmarks.mbs.prediction.models import Recurrent, densenet, next_token
from benchmarks.mbs.problem import Problem, term

TOKENS = 256


def batchnorm20(batch: int = 32) -> Problem:
    """ResNet-20 with BatchNorm on 32x32 images: micro-batches go in lanes."""
    inputs, targets = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    model = resnet20_of(num_classes=10, in_channels=3, norm="batch")
    return Problem(model, torch.nn.CrossEntropyLoss(), None, inputs, targets, batch)


def dense(batch: int = 24) -> Problem:
    """A small DenseNet with BatchNorm on 16x16 images: concatenations, and lanes."""
    inputs, targets = torch.randn(batch, 3, 16, 16), torch.randint(10, (batch,))
    model = densenet((4, 4, 4), growth=8)
    return Problem(model, torch.nn.CrossEntropyLoss(), None, inputs, targets, batch)


def lstm(batch: int = 48) -> Problem:
    """An LSTM of two layers on 64 tokens, whose kernel keeps a workspace for backward."""
    tokens = torch.randint(TOKENS, (batch, 65))
    sums = term(
        lambda o, t: functional.cross_entropy(o.flatten(0, 1), t.flatten(), reduction="sum"),
        torch.Tensor.numel,
    )
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return Problem(Recurrent(), next_token, None, inputs, targets, batch, (sums,))


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "ResNet-20, GroupNorm": lambda: resnet20(32),
    "ResNet-20, BatchNorm": batchnorm20,
    "U-Net": lambda: unet96(8),
    "transformer": lambda: transformer(32),
    "LSTM": lstm,
    "DenseNet, BatchNorm": dense,
}


@dataclass(frozen=True, eq=False)
class Cell:
    """A training within a budget, in bytes."""

    name: str
    problem: Problem
    budget: int


def cells(names: list[str], each: int, seed: int) -> Iterator[Cell]:
    """Yield so many budgets for each of the problems."""
    for name in names:
        torch.manual_seed(seed)
        problem = PROBLEMS[name]()
        low, high = _bounds(problem)
        draw = random.Random(f"{seed} {name}")
        for _ in range(each):
            yield Cell(name, problem, round(exp(draw.uniform(log(low), log(high)))))


def _bounds(problem: Problem) -> tuple[int, int]:
    """Return the bytes of one sample a micro-batch, and of the undivided batch."""
    batch = problem.inputs, problem.targets
    found = anybatch.plan(
        problem.model, problem.loss_fn, batch, memory="1TiB", timed=False, offload="off"
    ).memory
    assert found is not None
    assert found.floor is not None
    return found.floor, found.undivided
