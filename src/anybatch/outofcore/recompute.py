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

from anybatch.outofcore.rewrite import Recipe, Rewriter, rewrite
from anybatch.outofcore.trace import Trace

SOON = 8
"""Functions of backward within which a result made again is used itself."""


def cheap(trace: Trace, share: float = 1.0) -> Trace:
    """Return the step in which cheap results are computed again instead of kept.

    Args:
        trace: the step.
        share: of the bytes of all cheap results, how many are computed again, those of the latest
            layers last: they are kept for the shortest time.
    """
    recipes = cheap_recipes(trace)
    wanted = share * trace.bytes_of(recipes)
    dropped: dict[int, Recipe] = {}
    for v in sorted(recipes, key=lambda v: trace.uses[v][0]):
        if trace.bytes_of(dropped) < wanted:
            dropped[v] = recipes[v]

    def remake(rewriter: Rewriter, v: int) -> None:
        _make(trace, dropped, rewriter, v)

    return rewrite(trace, dropped, remake)


def cheap_recipes(trace: Trace) -> dict[int, Recipe]:
    """Return the variables that are cheap to make again, and the functions that do it.

    The largest come first. What a recipe starts from is kept from then on, and that must not be
    more bytes than it saves.
    """
    book = _Book(trace)
    for v in sorted(book.needed, key=lambda v: -trace.size(v)):
        book.consider(v)
    return book.chosen


class _Book:
    """What is chosen so far, and what that makes others keep."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.needed = {
            v: first
            for v, variable in enumerate(trace.variables)
            if not (variable.before or variable.after or variable.stays)
            and not trace.functions[trace.uses[v][0]].backward
            and (first := first_in_backward(trace, v)) is not None
        }
        self.chosen: dict[int, Recipe] = {}
        self.kept: set[int] = set()  # what recipes start from, beside what backward needs anyway

    def consider(self, v: int) -> None:
        """Choose `v` if there is a cheap recipe that starts from little."""
        found = self._recipe(v, self.needed[v], depth=0)
        if found is None or v in self.kept:
            return
        recipe, sources = found
        more = sources - self.kept - self.needed.keys()
        if self.trace.bytes_of(more) <= self.trace.size(v):
            self.chosen[v] = tuple(sorted(recipe))
            self.kept |= sources

    def _recipe(self, v: int, when: int, depth: int) -> tuple[set[int], set[int]] | None:
        """Return functions and what they start from; None where `v` is not cheap."""
        recipe, sources = set(), set()
        for k in self.trace.written[v]:
            function = self.trace.functions[k]
            if function.backward:
                continue
            if function.flops or function.draws or depth > SOON:
                return None
            recipe.add(k)
            for read in function.reads:
                if read == v or read in function.writes:
                    continue
                if any(k < other <= when for other in self.trace.written[read]):
                    return None  # it has been written to since
                found = self._source(read, when, depth)
                if found is None:
                    return None
                recipe |= found[0]
                sources |= found[1]
        return recipe, sources

    def _source(self, v: int, when: int, depth: int) -> tuple[set[int], set[int]] | None:
        """Return how to have a source: it is there, it is made again soon anyway, or on the way."""
        one = self.trace.variables[v]
        if one.before or one.stays:
            return set(), set()
        if v in self.needed:
            soon = v not in self.chosen or self.needed[v] - when <= SOON
            return (set(), set() if v in self.chosen else {v}) if soon else None
        if v in self.kept:
            return set(), {v}
        return self._recipe(v, when, depth + 1) or (set(), {v})


def first_in_backward(trace: Trace, v: int) -> int | None:
    """Return the first function of backward that uses a variable, None where none does."""
    return next((i for i in trace.uses[v] if trace.functions[i].backward), None)


def _make(trace: Trace, dropped: dict[int, Recipe], rewriter: Rewriter, v: int) -> None:
    """Run the recipe of `v` again; what it has on the way dies with it."""
    recipe = dropped[v]
    results = {w for k in recipe for w in trace.functions[k].makes}
    for k in recipe:
        for read in trace.functions[k].reads:
            if read in dropped and read not in results and read not in rewriter.now:
                _make(trace, dropped, rewriter, read)
    made = dict(rewriter.now)
    for k in recipe:
        wanted = {w for w in trace.functions[k].makes if _leads_to(trace, recipe, w, v)}
        wanted |= {w for w in trace.functions[k].writes if w in made and w in results}
        rewriter.again(k, wanted, made)
    rewriter.now[v] = made[v]


def _leads_to(trace: Trace, recipe: Recipe, w: int, v: int) -> bool:
    return w == v or any(w in trace.functions[k].reads for k in recipe)
