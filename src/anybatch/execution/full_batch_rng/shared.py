"""Layouts of the draws of a model, and the state of draws that a step's micro-batches share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from anybatch.core.rng import RNGState
from anybatch.errors import NotExactError
from anybatch.execution.full_batch_rng.law import Law, Pattern, RowRange
from anybatch.execution.full_batch_rng.refuse import WAY_OUT
from anybatch.execution.full_batch_rng.site import Site


class UnknownDrawError(Exception):
    """A draw has no layout yet: learn it, and begin the step again."""


class Laws:
    """Layouts of the draws of one signature, by call site.

    Attributes:
        steady: draws of forward from Python and numpy do not depend on the number of rows.
        requested: call sites without a layout when layouts were learnt last.
    """

    def __init__(self) -> None:
        self.steady = False
        self.requested: set[Any] = set()
        self._laws: dict[tuple[int, ...], dict[int, Law]] = {}
        self._held: list[Site] = []

    def find(self, place: Site, number: int) -> Law | None:
        """Return the layout of a draw by call site and number; None where it has none."""
        laws = self._laws.get(place.chain, {})
        if number in laws:
            return laws[number]
        same = set(laws.values())
        return next(iter(same)) if len(same) == 1 else None

    def add(self, place: Site, number: int, law: Law) -> None:
        """Record a layout."""
        self._held.append(place)
        self._laws.setdefault(place.chain, {})[number] = law


@dataclass
class Drawn:
    """One draw of a step, as the first micro-batch has made it."""

    func: Any
    law: Law
    full: Pattern
    state: Any


@dataclass
class SharedDraws:
    """State of draws that the micro-batches of a step share.

    Attributes:
        laws: the recorded layouts of draws.
        size: N_B, samples in the mini-batch, over all ranks.
        modules: ids of the modules of the model.
        before: samples of the ranks before this one.
        several: there are other ranks.
        start: the RNG state with which every micro-batch begins.
        end: the state after the forward of one.
        draws: of the forward of the first micro-batch, in order.
        paused: draws are now the full batch's own.
    """

    laws: Laws
    size: int
    modules: Collection[int]
    before: int = 0
    several: bool = False
    start: RNGState | None = None
    end: RNGState | None = None
    draws: list[Drawn] = field(default_factory=list)
    by_state: dict[Any, Drawn] = field(default_factory=dict)
    paused: bool = False

    def begin(self) -> None:
        """Drop the recorded draws: the first micro-batch begins, perhaps again."""
        self.start = self.end = None
        self.draws.clear()
        self.by_state.clear()

    def rows(self, begin: int, size: int, *, turned: bool = False) -> RowRange:
        """Return where rows of this rank are among those of all.

        An inspection may have more rows than there are, from a rank that has one sample or none.
        """
        of = max(self.size, size)
        return RowRange(min(self.before + begin, of - size), size, of, turned)


def ask(laws: Laws, what: Any, words: str) -> None:
    """Note that something has to be learnt; refuse it where that has not helped."""
    if what in laws.requested:
        raise NotExactError(
            f"a draw must be found again when forward is called again, and {words} is not: how "
            f"often forward draws, or what shape, depends on more than the samples. {WAY_OUT}"
        )
    laws.requested.add(what)
