"""How large the rows have been of batches that are loaded on the way: no plan may be for less.

The samples of a `LazyBatch` are unknown before they are loaded. A few of them are loaded to plan
with; if a micro-batch has longer rows, the step ends before it is run, everything is restored, and
the step begins again under a plan for such rows.

    planned for rows of 30 │ mu_0: 12 │ mu_1: 28 │ mu_2: 45: again │ planned for 45 │ mu_0 ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor

from anybatch.core import tree
from anybatch.core.batch import LazyBatch, MicroBatch, TensorBatch
from anybatch.core.rng import RNGState
from anybatch.core.undo import AgainError
from anybatch.execution.case import MICRO_BATCHES, stretched
from anybatch.execution.signature import HasRows, Shapes, elements, shapes_of, tensor_signature

FEW = MICRO_BATCHES * MICRO_BATCHES
"""Rows that are loaded to plan with."""

T = TypeVar("T")


class LargerRowsError(AgainError):
    """A micro-batch has larger rows than any before it."""

    def __init__(self, micro: MicroBatch) -> None:
        super().__init__("rows larger than any before")
        self.micro = micro


class Reach:
    """The largest rows so far, for each signature (paths, dimensions and dtypes)."""

    def __init__(self) -> None:
        self._largest_rows: dict[Any, TensorBatch] = {}

    def rows(self, batch: LazyBatch) -> TensorBatch:
        """Return a few rows as large as any so far; the first ones, where there are none yet.

        The RNG state is restored.
        """
        if not self._largest_rows:
            rng = RNGState.now()
            self._take(next(iter(batch.micro_batches(min(batch.size, FEW)))))
            rng.put_back()
        return max(self._largest_rows.values(), key=lambda rows: elements(shapes_of(rows)))

    def again(self, run: Callable[[], T]) -> T:
        """Run a step, and where it has found out more, take that in and run it again."""
        while True:
            try:
                return run()
            except LargerRowsError as larger:
                self._take(larger.micro)
            except AgainError:
                pass

    def watch(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield micro-batches.

        Raises:
            LargerRowsError: one has larger rows than any before it.
        """
        for micro in micro_batches:
            largest = self._largest_rows.get(tensor_signature(micro))
            if largest is None or shapes_of(largest) != _largest(largest, micro):
                raise LargerRowsError(micro)
            yield micro

    def _take(self, micro: MicroBatch) -> None:
        largest = self._largest_rows.get(tensor_signature(micro))
        shapes = shapes_of(micro) if largest is None else _largest(largest, micro)
        few = stretched(TensorBatch(micro.inputs, micro.targets, micro.size), shapes, FEW)
        inputs, targets = tree.map_tensors(Tensor.clone, (few.inputs, few.targets))
        self._largest_rows[tensor_signature(micro)] = TensorBatch(inputs, targets, few.size)


def _largest(one: HasRows, other: HasRows) -> Shapes:
    """Return the shapes that hold the rows of both."""
    pairs = zip(shapes_of(one), shapes_of(other), strict=True)
    return tuple(tuple(map(max, a, b)) for a, b in pairs)
