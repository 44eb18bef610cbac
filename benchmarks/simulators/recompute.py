"""Results that are cheap to compute again need not be kept, nor moved: BatchNorm, ReLU, joins.

A result is cheap if no matrix product and no convolution is needed to have it again from what is
kept: then it costs as long as the device takes to read and write it, while the link is ten to a
hundred times slower than the device's memory.

    conv -> c -> batch_norm -> relu -> r -> conv        kept: c        again: r from c
    cat(a, b) -> j -> batch_norm ...                    kept: a, b     again: j

What r is made of is kept, and is on the device when r is made again. Only what is needed again
itself, soon after, may stand between.

Source: design 5.7; AGBN's "memory monger"; Chen et al. 2016, "Sublinear memory cost", section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from anybatch.offloading.course import SOON
from anybatch.offloading.schedule import Trace
from benchmarks.simulators.rewrite import Rewriter, rewrite


@dataclass(frozen=True)
class Again:
    """How to make a variable again.

    Attributes:
        functions: to run again, in any order; they run in that of the trace.
        makes: the variable, and what has to be made again on the way to it.
        sources: what this starts from, beside what is there all the time.
    """

    functions: frozenset[int] = frozenset()
    makes: frozenset[int] = frozenset()
    sources: frozenset[int] = frozenset()

    def __or__(self, other: Again) -> Again:
        """Do both."""
        return Again(
            self.functions | other.functions,
            self.makes | other.makes,
            self.sources | other.sources,
        )


def cheap(trace: Trace, share: float = 1.0) -> Trace:
    """Return the step in which cheap results are computed again instead of kept.

    Args:
        trace: the step.
        share: of the bytes of all cheap results, how many are computed again: those first for whose
            bytes the least memory is touched, and of these the earliest, kept for the longest time.
    """
    recipes = cheap_recipes(trace)
    wanted = share * trace.bytes_of(recipes)
    dropped: dict[int, Again] = {}

    def cost(v: int) -> float:
        touched = sum(trace.functions[k].touched for k in recipes[v].functions)
        return round(touched / max(trace.size(v), 1), 2)

    for v in sorted(recipes, key=lambda v: (cost(v), trace.uses[v][0])):
        if trace.bytes_of(dropped) < wanted:
            dropped[v] = recipes[v]

    def remake(rewriter: Rewriter, v: int) -> None:
        _make(dropped, rewriter, v)

    return rewrite(trace, dropped, remake)


def cheap_recipes(trace: Trace) -> dict[int, Again]:
    """Return the variables that are cheap to make again, and how.

    The largest come first. What a recipe starts from is kept from then on, and that must be fewer
    bytes than it saves; or as many, where others may start from it too, as the next join does.
    """
    book = _Book(trace)
    for v in sorted(book.needed, key=lambda v: -trace.size(v)):
        book.consider(v)
    return book.chosen


class _Book:
    """What is chosen so far, and what that makes others keep."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.needed = {v: i for v in saved(trace) if (i := first_in_backward(trace, v)) is not None}
        self.chosen: dict[int, Again] = {}
        self.retained: set[int] = set()  # sources of recipes that backward does not need

    def consider(self, v: int) -> None:
        """Choose `v` if there is a cheap recipe that starts from little."""
        found = self._recipe(v, self.needed[v], depth=0)
        if found is None or v in self.retained or v in found.sources:
            return
        more = found.sources - self.retained - self.needed.keys()
        gain = self.trace.size(v) - self.trace.bytes_of(more)
        if gain > 0 or (gain == 0 and any(map(self._read_by_many, more))):
            self.chosen[v] = found
            self.retained |= found.sources

    def _recipe(self, v: int, when: int, depth: int) -> Again | None:
        """Return how to make `v` again at function `when`; None where that is not cheap."""
        found = Again(makes=frozenset({v}))
        for k in self.trace.written[v]:
            function = self.trace.functions[k]
            if function.backward:
                continue
            if function.flops or function.draws or depth > SOON:
                return None
            found |= Again(frozenset({k}))
            for read in function.reads:
                if read == v or read in function.writes:
                    continue
                if any(k < other <= when for other in self.trace.written[read]):
                    return None  # it has been written to since
                source = self._source(read, v, when, depth)
                if source is None:
                    return None
                found |= source
        return found

    def _source(self, v: int, wanted: int, when: int, depth: int) -> Again | None:
        """Return how to have a source: it is there, it is made again soon anyway, or on the way.

        What is small beside that which is made of it, and is read by many (what a dense block
        begins with), is kept: to make it again for each of them would cost more than it holds.
        """
        one = self.trace.variables[v]
        if one.before or one.stays:
            return Again()
        itself = Again(sources=frozenset({v}))
        if v in self.chosen:
            return Again() if self.needed[v] - when <= SOON else None
        if v in self.needed or v in self.retained:
            return itself
        if self._read_by_many(v) and 2 * self.trace.size(v) <= self.trace.size(wanted):
            return itself
        return self._recipe(v, when, depth + 1) or itself

    def _read_by_many(self, v: int) -> bool:
        """Say whether more than one function of the forward pass reads what one has made."""
        return sum(not self.trace.functions[i].backward for i in self.trace.uses[v][1:]) > 1


def saved(trace: Trace) -> list[int]:
    """Return what forward makes, backward uses, and may be dropped between."""
    return [
        v
        for v, variable in enumerate(trace.variables)
        if not (variable.before or variable.after or variable.stays)
        and not trace.functions[trace.uses[v][0]].backward
        and first_in_backward(trace, v) is not None
    ]


def first_in_backward(trace: Trace, v: int) -> int | None:
    """Return the first function of backward that uses a variable, None where none does."""
    return next((i for i in trace.uses[v] if trace.functions[i].backward), None)


def _make(dropped: Mapping[int, Again], rewriter: Rewriter, v: int) -> None:
    """Run the recipe of `v` again; what it has on the way dies with it."""
    recipe, functions = dropped[v], rewriter.trace.functions
    for k in sorted(recipe.functions):
        others = set(functions[k].reads) - recipe.makes - set(functions[k].writes)
        for read in sorted(others.intersection(dropped).difference(rewriter.now)):
            _make(dropped, rewriter, read)
    made = dict(rewriter.now)
    for k in sorted(recipe.functions):
        rewriter.again(k, set(recipe.makes), made)
    rewriter.now[v] = made[v]
