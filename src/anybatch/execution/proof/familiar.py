"""Record of the models inspected for a signature, so that a change is inspected again.

A model may compute something else in a later step: a warm-up ends, a switch is set, a module is
replaced. Most of that shows in the autograd graph of a micro-batch, or in the plain numbers of the
user's own modules, in their hooks and functions, in the names that these use, and in the values of
a batch outside of its rows. Both are compared in every step; if Python reads numbers of tensors, so
are the tensors of one number. Additions of forward itself to a list or an object are no change of
it. A declared loss is inspected with the model, and so is compared with it. Other changes are found
in the steps that inspect samples again anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from anybatch.core import graph
from anybatch.execution.outside import (
    Named,
    Outside,
    batch_constants,
    parts,
    plain_numbers,
    read_held,
    single_numbers,
)

MOST = 16
"""Graphs, and models, of a signature that are inspected; a coupled loss has a graph, too."""


class Familiar:
    """The graphs and the models that were inspected."""

    def __init__(self) -> None:
        self._now: Any = None
        self._parts: Any = None
        self._outside = Outside(())
        self._held: list[tuple[Named, dict[str, Any]]] = []
        self._contents: dict[Named, Any] = {}
        self._left: dict[Named, Any] = {}
        self._reads = True
        self._graphs: set[int] = set()
        self._models: set[Any] = set()
        self._varying: set[Named] = set()

    @property
    def full(self) -> bool:
        """Whether no more graphs are inspected."""
        return len(self._graphs) >= MOST

    def has_model(
        self,
        modules: Sequence[tuple[str, nn.Module]],
        functions: Sequence[Any] = (),
        arguments: Any = None,
    ) -> bool:
        """Say whether a model need not be inspected.

        Args:
            modules: paths and modules, of a declared loss too.
            functions: of a declared loss. Default: there is none.
            arguments: trees of arguments of the model, and of such a loss. Default: unknown.
        """
        now = parts(modules)
        if now != self._parts:  # to follow the code takes longer than to read what it names
            self._parts, self._outside = now, _outside(modules, functions)
        self._now = self._model(modules, arguments)
        if self._now in self._models or len(self._models) >= MOST:
            return True
        if self._models:  # a function may have been replaced, and the new one names others
            self._outside = _outside(modules, functions)
            self._now = self._model(modules, arguments)
        return self._now in self._models

    def _model(self, modules: Sequence[tuple[str, nn.Module]], arguments: Any) -> Any:
        """Return the parts and the numbers of a model, for comparison."""
        numbers, self._held = plain_numbers(modules)
        self._contents = {
            at: self._contents[at] if at in self._left and self._left[at] == value else value
            for at, value in read_held(self._held).items()
        }
        numbers |= self._contents | self._outside.numbers()
        numbers |= batch_constants(arguments, singles=self._reads)
        if self._reads:
            singles = single_numbers(modules) | self._outside.singles()
            numbers |= {("a tensor", ".".join(at)): one for at, one in singles.items()}
        some = tuple(item for item in numbers.items() if item[0] not in self._varying)
        return self._parts, some

    def keep(self, *, reads: bool) -> None:
        """Make the model of this step familiar: the step was made, so it was not refused.

        Args:
            reads: Python reads numbers of tensors in forward.
        """
        if self._reads and not reads:
            now, numbers = self._now
            self._now = now, tuple(one for one in numbers if one[0][0] != "a tensor")
        self._reads = reads
        self._left = read_held(self._held)
        if len(self._models) < MOST:
            self._models.add(self._now)
            if len(self._models) == MOST:
                self._exclude()

    def _exclude(self) -> None:
        """Exclude numbers that are new in most steps: they use up the inspections of all others."""
        values: dict[Named, set[Any]] = {}
        for _, numbers in self._models:
            for at, value in numbers:
                values.setdefault(at, set()).add(value)
        self._varying |= {at for at, found in values.items() if len(found) > MOST // 2}
        self._models = {
            (now, tuple(item for item in numbers if item[0] not in self._varying))
            for now, numbers in self._models
        }

    def has_graph(self, roots: Iterable[Tensor], *, looked: bool) -> bool:
        """Say whether the graph behind some tensors is familiar.

        Args:
            roots: the tensors.
            looked: the model has just been inspected, so it is from now on.
        """
        outline = graph.outline(roots)
        if looked or not self._graphs:
            self._graphs.add(outline)
        return outline in self._graphs


def _outside(modules: Iterable[tuple[str, nn.Module]], functions: Iterable[Any]) -> Outside:
    return Outside((module for _, module in modules), functions)
