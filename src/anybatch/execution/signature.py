"""Signature of a batch, to which a plan belongs, and the run that the plan permits.

Two batches of one signature hold the same bytes. One bounds another where every row of it is at
least as large, because a kernel on fewer elements needs no more memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from anybatch.core import tree
from anybatch.core.memory import Memory
from anybatch.core.modules import local
from anybatch.core.plan import OffloadPlan
from anybatch.memory.step_timeline import StepTimeline

Shapes = tuple[tuple[int, ...], ...]
"""The shape of one row of each tensor of a batch."""


class HasRows(Protocol):
    """Inputs and targets with rows: a mini-batch or a micro-batch."""

    @property
    def inputs(self) -> Any:
        """Tree of tensors [n, ...]."""

    @property
    def targets(self) -> Any:
        """The same."""


@dataclass(frozen=True)
class Signature:
    """Signature that a plan belongs to: all properties of a batch that decide a step's bytes.

    Attributes:
        tensors: path, dimensions and dtype of each tensor of the batch.
        modes: whether it is loaded during the step, the modes of the modules, the frozen
            parameters, and the options that are on in the optimizer.
        numbers: path and value of entries that are no tensors.
        lanes: micro-batches wait for each other in BatchNorm.
        trains: with backward; else forward only.
        shapes: the shape of one row of each tensor.
        size: N_B, samples in the mini-batch.
        before: bytes of gradients that are there already and are added to.
        global_samples: samples of all ranks that are planned for; 0 (default) is one process.
        most: samples that a micro-batch may have, where memory ran out with all of them at once; 0
            (default) where it did not.
    """

    tensors: Any
    modes: Any
    numbers: tuple[tuple[str, Any], ...]
    lanes: bool
    trains: bool
    shapes: Shapes
    size: int
    before: int
    global_samples: int = 0
    most: int = 0

    @property
    def largest(self) -> int:
        """The most samples that a micro-batch may have."""
        return self.most or self.size

    @property
    def elements(self) -> int:
        """Elements of one sample."""
        return elements(self.shapes)

    def like(self, other: Signature) -> bool:
        """Say whether they differ in sizes and numbers only."""
        return (self.tensors, self.modes, self.lanes) == (other.tensors, other.modes, other.lanes)

    def bounds(self, other: Signature) -> bool:
        """Say whether a step of `other` holds no more than one of this, at the same micro-batch."""
        like = self.like(other) and self.numbers == other.numbers
        return (
            like
            and (self.trains or not other.trains)
            and all(
                all(mine >= its for mine, its in zip(a, b, strict=True))
                for a, b in zip(self.shapes, other.shapes, strict=True)
            )
        )


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run: division of the batch, and offloaded tensors.

    Attributes:
        micro_batch: samples in a micro-batch.
        accumulator: gradients are summed in one, so out of memory costs one micro-batch.
        memory: that of the plan.
        coupled: the loss needs all outputs at once.
        loss: the loss in words.
        lanes: micro-batches wait for each other.
        offload: which saved tensors are offloaded; None (default) where none is.
        passes: returns that step as it passes; None (default) where that was not foreseen.
    """

    micro_batch: int
    accumulator: bool
    memory: Memory
    coupled: bool
    loss: str
    lanes: bool = False
    offload: OffloadPlan | None = None
    passes: Callable[[], StepTimeline] | None = field(default=None, compare=False, repr=False)


def tensor_signature(rows: HasRows) -> tuple[Any, ...]:
    """Return path, dimensions and dtype of every tensor."""
    return tuple((path, t.dim(), t.dtype) for path, t in tree.tensors((rows.inputs, rows.targets)))


def shapes_of(rows: HasRows) -> Shapes:
    """Return the shape of one row of every tensor."""
    return tuple(tuple(t.shape[1:]) for _, t in tree.tensors((rows.inputs, rows.targets)))


def numbers_of(rows: HasRows) -> tuple[tuple[str, Any], ...]:
    """Return path and value of every number, flag and text that is no row."""
    leaves = tree.leaves((rows.inputs, rows.targets))
    return tuple((path, leaf) for path, leaf in leaves if isinstance(leaf, PLAIN))


PLAIN = bool | int | float | str


RATES = frozenset(("lr", "initial_lr", "max_lr", "min_lr"))
"""Entries of torch's schedules in a group of parameters."""


def switched_on(optimizer: torch.optim.Optimizer | None) -> tuple[Any, ...]:
    """Return how many parameters each group has, and which of its options are not off.

    A learning rate changes no memory, and is 0 for a step where a schedule warms up from it or ends
    at it; a momentum that is there does.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    return tuple(
        (
            len(group["params"]),
            *(k for k, v in group.items() if isinstance(v, PLAIN) and v and k not in RATES),
        )
        for group in groups
    )


def elements(shapes: Shapes) -> int:
    """Return the elements of one sample."""
    return sum(map(prod, shapes))


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor that are here; of a sparse one, of the entries that are."""
    tensor = local(tensor)
    if not tensor.is_sparse:
        return tensor.numel() * tensor.element_size()
    parts = tensor._indices(), tensor._values()
    return sum(part.numel() * part.element_size() for part in parts)
