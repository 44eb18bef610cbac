"""Sum of the denominators of a step's micro-batches, compared with that of the full batch.

A denominator is counted before the first backward, as if every micro-batch had the shapes of the
first one. A model that cuts its rows to the longest of a micro-batch has other ones:

    labels of the full batch, cut as the first micro-batch was     20
    what the micro-batches were divided by                          9 + 14
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from anybatch.core.accelerator import of
from anybatch.core.batch import MicroBatch
from anybatch.errors import LossError
from anybatch.memory.fakes import is_fake

Count = float | int | Tensor

ROUNDING = 1e-4
"""Relative difference of counts that are no integers, such as sums of class weights."""


class Tally:
    """The denominators of one step.

    Args:
        size: samples of the batch.
        denominators: of each term of the loss over the full batch; None where it cannot be counted.
        waits: whether a device may be waited for.

    Attributes:
        done: all samples have come, and were compared.
    """

    def __init__(self, size: int, denominators: Sequence[Count | None], *, waits: bool) -> None:
        self._size, self._denominators, self._waits = size, denominators, waits
        self._parts: dict[int, tuple[int, Sequence[Count]]] = {}
        self.done = False

    def add(self, micro: MicroBatch, counts: Sequence[Count], names: Sequence[str]) -> None:
        """Add the denominators of a micro-batch; pieces of one that is run again replace it.

        Args:
            micro: its rows.
            counts: of each term.
            names: of each term.

        Raises:
            LossError: it was the last one, and the sum is not that of the full batch.
        """
        end = micro.begin + micro.size
        others = [
            (at, n) for at, (n, _) in self._parts.items() if at < end and at + n > micro.begin
        ]
        for at, _ in others:
            del self._parts[at]
        self._parts[micro.begin] = micro.size, counts
        if sum(n for n, _ in self._parts.values()) != self._size:
            return
        every = [counts for _, counts in self._parts.values()]
        sums = [sum(each[1:], each[0]) for each in zip(*every, strict=True)]
        for denominator, found, name in zip(self._denominators, sums, names, strict=True):
            if denominator is None or not (self._here(denominator) and self._here(found)):
                continue
            if not same(float(found), float(denominator), *map(rounding, (found, denominator))):
                raise LossError(
                    "a loss inside the model must be divided by a sum over all samples, and "
                    f"{name} is divided by {float(found):g} in the micro-batches and by "
                    f"{float(denominator):g} in the full batch: the model cuts its rows to the "
                    "longest of a micro-batch, or chooses among them. Use one length "
                    "(total_length=) and mask rows that do not count, or give micro_batch >= the "
                    "batch size"
                )
        self.done = True

    def _here(self, count: Count) -> bool:
        if not isinstance(count, Tensor):
            return True
        return not is_fake(count) and (self._waits or of(count.device).host)


def same(a: float, b: float, *rounding: float) -> bool:
    """Return whether two counts agree: integers exactly, others up to rounding.

    Args:
        a: a count.
        b: another.
        rounding: by which they may differ all the same, relative to themselves. Default: none.
    """
    if math.isnan(a) or math.isnan(b):
        return True
    integers = a.is_integer() and b.is_integer()
    return math.isclose(a, b, rel_tol=max((0.0 if integers else ROUNDING), *rounding, 0.0))


def rounding(count: Count) -> float:
    """Return the relative error of a sum in half precision; 0 for all other counts."""
    half = isinstance(count, Tensor) and count.dtype in (torch.bfloat16, torch.float16)
    return 4 * torch.finfo(count.dtype).eps if half and isinstance(count, Tensor) else 0.0


def agree(some: Sequence[float], others: Sequence[float]) -> bool:
    """Say whether numbers that were made twice are the same but for rounding; NaN is any."""
    pairs = list(zip(some, others, strict=False))
    close = (math.isclose(a, b, rel_tol=1e-6) or math.isnan(a) or math.isnan(b) for a, b in pairs)
    return len(some) == len(others) and all(close)
