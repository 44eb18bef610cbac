"""What a plan belongs to, and what it allows: the kind of a batch, and how it is run.

Two batches of one kind hold the same bytes. One kind bounds another where every row of it is at
least as large, because a kernel on fewer elements needs no more memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from anybatch._plan import Memory


@dataclass(frozen=True)
class Kind:
    """What a plan belongs to: everything about a batch that decides what a step holds.

    Attributes:
        names: path, dtype and dimensions of each tensor of the batch, the modes of the modules, and
            which parameters are frozen.
        trains: with backward; else forward only.
        shapes: the shape of one row of each tensor.
        size: N_B, samples in the mini-batch.
        before: bytes of gradients that are there already and are added to.
    """

    names: Any
    trains: bool
    shapes: tuple[tuple[int, ...], ...]
    size: int
    before: int

    @property
    def elements(self) -> int:
        """Elements of one sample."""
        return sum(prod(shape) for shape in self.shapes)

    def bounds(self, other: Kind) -> bool:
        """Say whether a step of `other` holds no more than one of this, at the same micro-batch."""
        like = other.names == self.names and (self.trains or not other.trains)
        return like and all(
            all(mine >= its for mine, its in zip(a, b, strict=True))
            for a, b in zip(self.shapes, other.shapes, strict=True)
        )


@dataclass(frozen=True)
class Allowed:
    """How a batch is run.

    Attributes:
        micro_batch: samples in a micro-batch.
        apart: gradients are summed in an accumulator, so that running out of memory costs one
            micro-batch.
        memory: what the plan says of it.
        coupled: the loss needs all outputs at once.
        loss: the loss in words.
    """

    micro_batch: int
    apart: bool
    memory: Memory
    coupled: bool
    loss: str


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor; of a sparse one, of the entries that are there."""
    if not tensor.is_sparse:
        return tensor.numel() * tensor.element_size()
    parts = tensor._indices(), tensor._values()
    return sum(part.numel() * part.element_size() for part in parts)
