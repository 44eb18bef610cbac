"""Rows that are no tensors: whether a loss reads the lists, texts and arrays of its samples.

torch can trace operations on tensors, but not Python's on a list, such as the largest of its
entries. So a loss is first called with placeholders, which have no values: if it reads one, its
result may depend on the other samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anybatch.core import tree

ASKS = (
    "len getitem setitem delitem iter next reversed contains bool int float index complex hash "
    "repr str format bytes array array_function array_ufunc eq ne lt le gt ge add radd iadd sub "
    "rsub mul rmul imul truediv rtruediv floordiv mod pow neg abs and or xor invert call enter"
).split()
"""Names, without underscores, that Python looks up on a type and not on the object."""


class UnreadError(Exception):
    """Error for a read of a stand-in, which has no values."""


class StandIn:
    """Stand-in for a list, text or array of samples, which records a read and fails.

    Args:
        leaf: the value that it replaces.
        reads: the type of the leaf is added to it, for each read.
    """

    def __init__(self, leaf: Any, reads: list[type]) -> None:
        object.__setattr__(self, "_stands", (type(leaf), reads))

    def __getattribute__(self, name: str) -> Any:
        """Return its class, which all parts of the batch share; record and refuse other reads."""
        type_, reads = object.__getattribute__(self, "_stands")
        if name == "__class__":
            return type_
        reads.append(type_)
        raise UnreadError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse it."""
        getattr(self, name)


def _reader(name: str) -> Callable[..., Any]:
    def read(self: StandIn, *_: Any) -> Any:
        return getattr(self, name)

    return read


for _name in (f"__{name}__" for name in ASKS):
    setattr(StandIn, _name, _reader(_name))


def is_entries(leaf: Any) -> bool:
    """Say whether a leaf of a tree has one entry a sample and is no tensor."""
    if isinstance(leaf, np.ndarray):
        return leaf.ndim > 0
    return isinstance(leaf, tree.LISTS)  # of samples, or of texts: others are structure


def holds(values: Any) -> bool:
    """Say whether a tree holds rows that are no tensors."""
    return any(is_entries(leaf) for _, leaf in tree.leaves(values))


@dataclass(frozen=True)
class StandInReads:
    """Types of the stand-ins that were read: one for each read."""

    outputs: list[type] = field(default_factory=list)
    targets: list[type] = field(default_factory=list)


def unread(values: Any, reads: list[type]) -> Any:
    """Return a tree with stand-ins for the rows that are no tensors.

    Args:
        values: outputs or targets.
        reads: the type of each leaf that is read is added to it.
    """
    return tree.map_leaves(lambda x: StandIn(x, reads) if is_entries(x) else x, values)
