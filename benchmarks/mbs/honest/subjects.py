"""What an honest network is: a model, a loss, and rows of a batch; the register of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS = 7
"""Samples of a batch: no micro-batch divides them but one of one sample."""


@dataclass(frozen=True, eq=False)
class Problem:
    """A model, its inputs, its targets (None: the loss takes outputs alone) and its loss.

    Where the loss is None, the model returns it.
    """

    model: nn.Module
    inputs: Any
    targets: Any
    loss_fn: Any


@dataclass(frozen=True, eq=False)
class Subject:
    """One network.

    Attributes:
        name: such as "ViT".
        group: a row of the table.
        make: the problem; the generator is seeded and float64 is the default dtype.
        rng: the engine's; "batch" where it draws.
        dtype: that of the model and of its floating inputs.
    """

    name: str
    group: str
    make: Callable[[], Problem]
    rng: str | None = None
    dtype: torch.dtype = torch.float64


SUBJECTS: dict[str, Subject] = {}


def subject(name: str, group: str, **options: Any) -> Callable[[Any], Any]:
    """Register the function below, which returns a `Problem`."""

    def register(make: Callable[[], Problem]) -> Callable[[], Problem]:
        assert name not in SUBJECTS, name
        SUBJECTS[name] = Subject(name, group, make, **options)
        return make

    return register


def classes(model: nn.Module, inputs: Any, count: int = 3) -> Problem:
    """A classifier with one class a sample."""
    return Problem(model, inputs, torch.randint(count, (ROWS,)), F.cross_entropy)


def tokens(model: nn.Module, inputs: Any, length: int, count: int) -> Problem:
    """A model of ``[n, length, count]`` scores, some of whose labels are ignored."""
    labels = torch.randint(count, (ROWS, length))
    labels[::2, -1] = -100
    return Problem(model, inputs, labels, _by_token)


def values(model: nn.Module, inputs: Any, *shape: int) -> Problem:
    """A model of ``[n, ...]`` numbers, whose squared distance from others is the loss."""
    return Problem(model, inputs, torch.randn(ROWS, *shape), F.mse_loss)


def squared(model: nn.Module, inputs: Any) -> Problem:
    """A model of numbers of any shape, whose mean square is the loss."""
    return Problem(model, inputs, None, _square)


def _by_token(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def _square(found: Tensor) -> Tensor:
    return F.mse_loss(found, torch.zeros_like(found))


def rows(*shape: int) -> Tensor:
    """Samples of uneven size."""
    return torch.randn(ROWS, *shape) * torch.linspace(0.4, 1.6, ROWS).view(-1, *[1] * len(shape))
