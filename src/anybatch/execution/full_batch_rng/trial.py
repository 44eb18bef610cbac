"""Trials of each sample's entries of a draw: a change of them must show in that sample only.

NaN goes through every product, also with a weight that is still zero; a comparison ends it, so
where it shows nowhere the least and the largest values that a draw can have are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anybatch.core import tree
from anybatch.core.pieces import places
from anybatch.execution.full_batch_rng.law import Law
from anybatch.execution.full_batch_rng.learning import Mark
from anybatch.execution.step import Layout

TRIES = 6
"""How often a draw is tried at most."""

ENOUGH = 2
"""How often it has to show."""


Differ = Callable[[Tensor, Tensor], Tensor]
"""Returns where two pieces differ."""


class Trial(NamedTuple):
    """Trial that finds the layout of one draw.

    Attributes:
        draw: its place among those of unknown layout.
        call: returns the outputs of forward where one sample's entries are marked; None where the
            model cannot take that.
        outputs: those where nothing is marked.
        layout: where they hold the samples.
        size: how many samples.
    """

    draw: int
    call: Callable[[Mark], Any]
    outputs: Any
    layout: Layout
    size: int

    def holds(self, law: Law) -> bool:
        """Say whether a layout assigns the first and the last sample their own entries."""
        return all(self._reached(law, sample) == {sample} for sample in {0, self.size - 1})

    def _reached(self, law: Law, sample: int) -> set[int]:
        """Return the samples with outputs that depend on the entries of one sample by `law`.

        Dropout may have dropped the entries that would show it, so it is tried until shown twice.
        """
        found: list[set[int]] = []
        for salt in range(TRIES):
            found += [reached] if (reached := self._once(law, sample, salt)) else []
            if len(found) == ENOUGH:
                break
        return set().union(*found)

    def _once(self, law: Law, sample: int, salt: int) -> set[int]:
        marked = self.call(Mark(self.draw, law, sample, "nan", salt))
        reached = set() if marked is None else self._rows(_nans, marked, self.outputs)
        if reached:
            return reached
        least = self.call(Mark(self.draw, law, sample, "least", salt))
        most = self.call(Mark(self.draw, law, sample, "most", salt))
        return set() if least is None or most is None else self._rows(_others, least, most)

    def _rows(self, differ: Callable[[Tensor], Differ], one: Any, other: Any) -> set[int]:
        found: set[int] = set()
        pairs = zip(tree.tensors(one), tree.tensors(other), strict=False)
        for ((_, a), (_, b)), axis in zip(pairs, self.layout, strict=False):
            if axis is None or a.shape != b.shape or a.layout != torch.strided:
                continue
            differs = differ(a)
            where = torch.zeros(a.shape[axis], dtype=torch.bool, device=a.device)
            for place in places(a.shape):
                rows = differs(a[place], b[place]).movedim(axis, 0)
                here = place[axis] if axis < len(place) else slice(None)
                where[here] |= rows.reshape(len(rows), -1).any(1)
            found |= set(where.nonzero().flatten().tolist())
        return found


def _nans(_: Tensor) -> Differ:
    return lambda a, b: a.isnan() & ~b.isnan()


def _others(every: Tensor) -> Differ:
    """Return a function that says where two pieces differ by more than rounding.

    Args:
        every: the first output.
    """
    if not every.is_floating_point() or every.itemsize == 1:
        return torch.ne
    largest = torch.ones((), dtype=every.dtype, device=every.device)
    for place in places(every.shape):
        largest = torch.maximum(largest, every[place].abs().nan_to_num_(0.0, 0.0, 0.0).amax())
    bound = torch.finfo(every.dtype).eps ** 0.5 * largest
    return lambda a, b: ((a - b).abs() > bound) | (a.isnan() != b.isnan())
