"""Models and batch sizes that were inspected for a signature: a change is inspected again.

A model may compute something else in a later step: a warm-up ends, a switch is set, a module is
replaced. Most of that shows in the autograd graph of a micro-batch, or in the plain numbers of the
user's own modules, in their hooks and functions, in the names that these use, and in the values of
a batch outside of its rows. Both are compared in every step; if Python reads numbers of tensors, so
are the tensors of one number. Additions of forward itself to a list or an object are no change of
it. A declared loss is inspected with the model, and so is compared with it. Other changes are found
in the steps that inspect samples again anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import prod
from typing import Any

from torch import Tensor, nn

from anybatch.core import modules as graph
from anybatch.execution import outside
from anybatch.execution.outside import Named, Outside, PlainNumbers
from anybatch.execution.proof.congruent import CallTrace, Kernel
from anybatch.execution.proof.verdict import Verdict
from anybatch.execution.signature import Shapes

MOST = 16
"""Graphs, and models, of a signature that are inspected; a coupled loss has a graph, too."""


class Familiar:
    """The graphs and the models that were inspected."""

    def __init__(self) -> None:
        self._now: Any = None
        self._parts: Any = None
        self._outside = Outside(())
        self._modules: Any = None
        self._plain = PlainNumbers({}, {}, [])
        self._contents: dict[Named, Any] = {}
        self._left: dict[Named, Any] = {}
        self._reads = True
        self._graphs: set[int] = set()
        self._kernels: set[Kernel] = set()
        self._unfamiliar = self._kernels_added = 0
        self._models: set[Any] = set()
        self._last: Any = None
        self._varying: set[Named] = set()

    @property
    def reads_grad(self) -> bool:
        """Whether a method of a module reads an attribute `grad`."""
        return self._outside.reads_grad

    @property
    def full(self) -> bool:
        """Whether no more graphs and kernels are inspected."""
        return max(len(self._graphs), self._unfamiliar, self._kernels_added) >= MOST

    def has_model(
        self,
        modules: Sequence[tuple[str, nn.Module]],
        functions: Sequence[Any] = (),
        arguments: Any = None,
    ) -> bool:
        """Say whether a model, with the functions of a declared loss, need not be inspected.

        Args:
            modules: of the model; a list that was passed before has had no change since.
            functions: of a declared loss. Default: there are none.
            arguments: trees of the batch, of which constants count.
        """
        # The same list has the same attributes (test_modules_are_walked_again_after_any_change).
        if modules is not self._modules or outside.hooked_everywhere():
            now, self._plain = outside.parts(modules), outside.plain_numbers(modules)
            if now != self._parts:  # to follow the code takes longer than to read what it names
                self._parts = now
                self._outside = Outside((module for _, module in modules), functions)
            self._modules = modules
        self._now = self._model(modules, arguments)
        # A comparison with that of the last step finds the same objects, where a hash reads all.
        if self._now == self._last or self._now in self._models or len(self._models) >= MOST:
            return True
        if self._models:  # a function may have been replaced, and the new one names others
            self._outside = Outside((module for _, module in modules), functions)
            self._now = self._model(modules, arguments)
        return self._now in self._models

    def _model(self, modules: Sequence[tuple[str, nn.Module]], arguments: Any) -> Any:
        numbers = self._plain.now()
        if self._plain.held or self._contents:
            self._contents = {
                at: self._contents[at] if at in self._left and self._left[at] == value else value
                for at, value in outside.read_held(self._plain.held).items()
            }
            numbers |= self._contents
        numbers |= self._outside.numbers()
        numbers |= outside.batch_constants(arguments, singles=self._reads)
        if self._reads:
            singles = outside.few_numbers(modules) | self._outside.few_numbers()
            numbers |= {("a tensor", ".".join(at)): one for at, one in singles.items()}
        if not self._varying:
            return self._parts, tuple(numbers.items())
        some = tuple(item for item in numbers.items() if item[0] not in self._varying)
        return self._parts, some

    def keep(self, *, reads: bool) -> None:
        """Make the model of this step familiar: the step was made, so it was not refused."""
        if self._reads and not reads:
            now, numbers = self._now
            self._now = now, tuple(one for one in numbers if one[0][0] != "a tensor")
        self._reads = reads
        self._left = outside.read_held(self._plain.held) if self._plain.held else {}
        if self._now != self._last and len(self._models) < MOST:
            self._models.add(self._now)
            self._last = self._now
            if len(self._models) == MOST:
                self._last = None
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
        """Say whether the graph behind some tensors is familiar; an inspection makes it so."""
        outline = graph.outline(roots)
        if looked or not self._graphs:
            self._graphs.add(outline)
        # An inspection may not meet the graph that called for it, and would be made in every step
        # (test_graphs_that_no_inspection_meets_are_looked_for_a_while).
        self._unfamiliar += outline not in self._graphs
        return outline in self._graphs

    def has_kernels(self, kernels: set[Kernel], *, looked: bool) -> bool:
        """Say whether all kernels of a forward are familiar; an inspection makes them so.

        Rows of another length may meet in a kernel that no graph shows
        (test_samples_that_meet_at_some_lengths_are_found).
        """
        if looked and not kernels <= self._kernels:
            self._kernels |= kernels
            self._kernels_added += 1
        return kernels <= self._kernels


# Batch sizes at which the forward of the full batch was compared with that of micro-batches.
#
# A proof for 8 samples does not hold for 16: ghost batches of 8, a branch on ``len(x) > 10``, which
# may hang on the length of a row, too. A model that reads the number of samples is compared again
# at new sizes and at new lengths.
#
#     batch of   8, in parts of 3   compared by the look of step 1
#     batch of  16, in parts of 3   new: compared before the step computes anything

FREE = 8
"""Pairs of sizes that are always compared: each costs some forwards without data."""

LARGER = 24
"""Pairs after which a larger batch is compared only where it is twice as large as any before, and a
smaller one where it is half as large."""

REPEATED = 3
"""Pairs of an inspection and after it that are compared though they were before it."""

Pair = tuple[int, int, Shapes]
"""Samples of the batch, of a micro-batch, and shapes of one row; () where rows are loaded late."""


@dataclass
class ComparedSizes:
    """Pairs of batch and micro-batch that were compared since the last inspection.

    Attributes:
        counts: forward may depend on the number of samples.
        values: numbers that Python reads in a forward, in order.
        backward: that is not torch's own, and is compared, too.
        reads: a declared loss, or forward by a list, has Python read numbers of tensors.
        followed: rows in which samples were followed, of the shapes that were compared first.
        pairs: (samples of the batch, of a micro-batch, shapes of one row) that were compared.
        before: those that were compared before the last inspection.
        step: the step of the signature in which the last of these was.
        declared: compares the calls of a declared loss for numbers of samples; None (default)
            where nothing in it may depend on these.
        lengths: shapes of one row of every input that were compared.
        traces: calls of forwards without data, of the full batch and of the rows followed, for rows
            of the shapes that were compared last.
    """

    counts: bool
    values: Sequence[Any] = ()
    backward: bool = False
    reads: bool = False
    followed: int = 0
    pairs: set[Pair] = field(default_factory=set)
    before: frozenset[Pair] = frozenset()
    step: int = 0
    declared: Callable[[Sequence[int]], Verdict] | None = None
    lengths: set[Shapes] = field(default_factory=set)
    traces: dict[int, CallTrace] = field(default_factory=dict, repr=False)
    _first: Shapes = ()
    _traced: Shapes = ()

    @property
    def matter(self) -> bool:
        """Whether forward, or a declared loss, may depend on how many samples there are."""
        return self.counts or self.declared is not None

    def traces_of(self, shapes: Shapes) -> dict[int, CallTrace]:
        """Return the traces of rows of these shapes, which are compared next."""
        self.lengths.add(shapes)
        self._first = self._first or shapes
        if shapes != self._traced:
            self.traces, self._traced = {}, shapes
        return self.traces

    def followed_of(self, shapes: Shapes) -> int:
        """Return the rows in which samples of these shapes were followed; 0 where none were.

        Rows of another length with another graph, or other kernels, are inspected. With the same
        ones, following fewer of them without data would show nothing more: a branch on the length
        is in every number of rows.
        """
        return self.followed if self._first in ((), shapes) else 0

    def after(self, earlier: ComparedSizes | None) -> ComparedSizes:
        """Return this record with the pairs compared before an inspection of the same model."""
        if earlier is None or earlier.counts != self.counts or earlier.backward != self.backward:
            return self
        before, lengths = earlier.before | earlier.pairs, earlier.lengths | self.lengths
        return replace(self, before=before, lengths=lengths)

    def new(self, samples: int, micro_batch: int, shapes: Shapes = ()) -> bool:
        """Say whether a pair is to be compared."""
        pair = samples, micro_batch, shapes
        if not self.matter or pair in self.pairs:
            return False
        if len(self.pairs) < REPEATED:
            return True
        every = self.pairs | self.before
        if pair in every or len(every) < FREE:
            return pair not in every
        return self._outside(pair, 1 if len(every) < LARGER else 2)

    def beyond(self, samples: int, micro_batch: int, shapes: Shapes = ()) -> bool:
        """Say whether a pair that is not compared is larger or smaller than those that were."""
        pair = samples, micro_batch, shapes
        if not self.matter or pair in self.pairs | self.before:
            return False
        return self._outside(pair, 1)

    def add(self, samples: int, micro_batch: int, step: int, shapes: Shapes = ()) -> None:
        """Note that a pair was compared in this step."""
        self.pairs.add((samples, micro_batch, shapes))
        self.step = step

    def _outside(self, pair: Pair, factor: int) -> bool:
        """Say whether a pair is larger, or smaller, than all that were compared."""
        every = [_measures(one) for one in self.pairs | self.before]
        return any(
            (now > max(were) and now >= factor * max(were))
            or (now < min(were) and factor * now <= min(were))
            for now, *were in zip_longest(_measures(pair), *every, fillvalue=0)
        )


def _measures(pair: Pair) -> list[int]:
    """Return the sizes that code may branch on: samples of batch and micro-batch, and elements.

    Of each input the elements of a row, of the batch and of a micro-batch: many tokens may be many
    short rows (test_many_elements_are_found_where_neither_rows_nor_their_length_is_new).
    """
    samples, micro_batch, shapes = pair
    rows = [prod(shape) for shape in shapes]
    return [samples, micro_batch, *(n * row for row in rows for n in (1, samples, micro_batch))]
