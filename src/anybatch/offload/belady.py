"""Belady + fit: eviction of the variable with the furthest next use where a function does not fit.

That is optimal where all pages have one size and one comes at a time (Belady 1966). Here sizes
differ, and the walk evicts too much: a small variable is evicted, and soon after a large one that
would have sufficed for both. So the largest that need not be evicted stay resident
(`anybatch.offload.fit`), which also schedules the others.

Source: the paper asks for the same with one hyperparameter, `window`.
"""

from __future__ import annotations

from collections.abc import Iterable

from anybatch.offload.draft import too_small
from anybatch.offload.fit import fitted
from anybatch.offload.gaps import Gap, as_schedule, forced_gaps
from anybatch.offload.schedule import Schedule
from anybatch.offload.trace import Trace


def belady(trace: Trace, budget: int) -> Schedule:
    """Plan a step within a budget: the furthest next use is evicted, and prefetched early.

    Args:
        trace: the step; its seconds are not used.
        budget: bytes.

    Raises:
        BudgetError: a single function needs more.
    """
    gaps = furthest_leaves(trace, budget)
    chosen = fitted(trace, budget, gaps, lambda gap: (-trace.size(gap.v),))
    return as_schedule("Belady + fit", trace, budget, chosen)


def furthest_leaves(trace: Trace, budget: int) -> list[Gap]:
    """Return the gaps in which Belady's rule offloads variables.

    Raises:
        BudgetError: a single function needs more.
    """
    walk = _Walk(trace, budget)
    for i, function in enumerate(trace.functions):
        walk.stage(i, function.uses)
        walk.dead(i)
    walk.stage(len(trace.functions), trace.after)
    end = len(trace.functions) + 1
    return forced_gaps(trace) + [gap for gap in walk.gaps if gap.next < end]


class _Walk:
    """Walk over the functions of a trace: resident variables, and the gaps so far."""

    def __init__(self, trace: Trace, budget: int) -> None:
        self.trace, self.budget = trace, budget
        self.last = dict.fromkeys(trace.before, -1)  # what is here -> its last use
        self.held = trace.bytes_of(trace.before)
        self.gaps: list[Gap] = []

    def stage(self, i: int, uses: Iterable[int]) -> None:
        """Have all that stage `i` uses here, in the budget."""
        needed = set(uses)
        self.held += self.trace.bytes_of(needed.difference(self.last))
        if self.held > self.budget:
            self.evict(i, needed)
        self.last |= dict.fromkeys(needed, i)

    def evict(self, i: int, needed: set[int]) -> None:
        """Evict the variables with the furthest next use until the others fit in the budget."""
        variables = self.trace.variables
        free = [v for v in self.last if v not in needed and not variables[v].stays]
        free.sort(key=lambda v: (self.trace.next_use(v, i), variables[v].size))
        while self.held > self.budget:
            if not free or i == 0:
                raise too_small(self.trace, self.budget)
            v = free.pop()
            self.gaps.append(Gap.between(v, self.last.pop(v), self.trace.next_use(v, i)))
            self.held -= variables[v].size

    def dead(self, i: int) -> None:
        """Remove the variables that no function uses after function `i`."""
        for v in self.trace.dies[i]:
            del self.last[v]
            self.held -= self.trace.size(v)
