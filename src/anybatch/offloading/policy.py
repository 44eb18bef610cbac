"""Policies of eviction: the faster of two rules + fit, as the simulator finds.

    belady   moves the fewest bytes: where the link is the bottleneck
    ends     hides both copies best: where memory is short for a moment, or kernels are the slower

They do not use the link and have nothing to tune; the simulator says which is the faster. A third
rule and the paper's window gain 1.3% at most beside them (`benchmarks/outofcore/rules`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from anybatch.core.plan_sections import Link
from anybatch.core.units import show_bytes
from anybatch.errors import BudgetError
from anybatch.offloading.schedule import Schedule, Stage, Trace, simulate


def plan(trace: Trace, budget: int, link: Link) -> Schedule:
    """Return the default schedule of a step.

    Args:
        trace: the step, with seconds.
        budget: bytes that it never exceeds.
        link: between device and host.

    Raises:
        BudgetError: a single function needs more.

    Example:
        >>> schedule = plan(trace, 16 << 30, Link(out=25e9, back=25e9))
        >>> simulate(trace, schedule, link).seconds
    """
    return fastest(trace, link, (belady(trace, budget), ends(trace, budget)))


def fastest(trace: Trace, link: Link, schedules: Iterable[Schedule]) -> Schedule:
    """Return the schedule that takes the fewest seconds, the first of those."""
    return min(schedules, key=lambda schedule: simulate(trace, schedule, link).seconds)


# Belady + fit: eviction of the variable with the furthest next use where a function does not fit.
#
# That is optimal where all pages have one size and one comes at a time (Belady 1966). Here sizes
# differ, and the walk evicts too much: a small variable is evicted, and soon after a large one that
# would have sufficed for both. So the largest that need not be evicted stay resident, which also
# schedules the others.
#
# Source: the paper asks for the same with one hyperparameter, `window`.


def belady(trace: Trace, budget: int) -> Schedule:
    """Plan a step within a budget: the furthest next use is evicted, and prefetched early.

    Args:
        trace: the step; its seconds are not used.
        budget: bytes.

    Raises:
        BudgetError: a single function needs more.
    """
    walk = _Walk(trace, budget)
    for i, function in enumerate(trace.functions):
        walk.stage(i, function.uses)
        walk.dead(i)
    walk.stage(len(trace.functions), trace.after)
    gaps = [gap for gap in walk.gaps if gap.next <= len(trace.functions)]
    chosen = fitted(trace, budget, gaps, lambda gap: (-trace.size(gap.v),))
    return as_schedule("Belady + fit", trace, budget, chosen)


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


# Policy that evicts variables with both copies hidden: before memory is short, and after.
#
# A variable may be idle for long, yet a copy can use only two parts of that time: one before memory
# runs short, and one after memory is free again, for the return:
#
#     last use ── the copy hides here ──╮ memory is short ╭── the return hides here ── next use
#                      before           first          last          after
#
# So the first to stay resident has the fewest seconds a byte at the shorter of its two ends; among
# equals, as with memory nearly always short, between its two uses. That matters with a budget a
# little too small, where only a stall of one small variable can be lost.
#
# Source: this project.


def ends(trace: Trace, budget: int) -> Schedule:
    """Plan a step within a budget by evicting the variables with both copies best hidden.

    Args:
        trace: the step, with seconds; only their ratios count.
        budget: bytes.

    Raises:
        BudgetError: a single function needs more.
    """
    clock = [0.0, *accumulate(function.seconds for function in trace.functions)]
    clock.append(clock[-1])  # after the end
    short = np.flatnonzero(np.array([*trace.live, trace.in_the_end]) > budget)

    def seconds_a_byte(gap: Gap) -> tuple[float, ...]:
        size = max(trace.size(gap.v), 1)
        between = (clock[gap.next] - clock[gap.freed]) / size
        begin, end = np.searchsorted(short, (gap.freed, gap.next))
        if begin == end:  # there is room all the time
            return -1.0, between
        before = clock[short[begin]] - clock[gap.freed]
        after = clock[gap.next] - clock[short[end - 1] + 1]
        return min(before, after) / size, between

    chosen = fitted(trace, budget, all_gaps(trace), seconds_a_byte)
    return as_schedule("best hidden at both ends + fit", trace, budget, chosen)


# Gaps between uses of a variable, in which it may be offloaded.
#
#            last use     bytes given up          return begins      next use
#     v  ────────p═══════════freed ─ ─ ─ ─ ─ ─ ─ ─ ─back══════════════q──────
#                └copy.......└awaited               └.............
#
# A schedule is a choice of gaps, with two stages for each.


@dataclass(frozen=True)
class Gap:
    """Gap between two uses of a variable, with the stages of its eviction and prefetch.

    Attributes:
        v: the variable.
        last: the function that used it last before, -1 for none.
        freed: the stage that gives its bytes up.
        back: the stage at which its return begins.
        next: the function that uses it next; the number of functions for the end.
    """

    v: int
    last: int
    freed: int
    back: int
    next: int

    @classmethod
    def between(cls, v: int, last: int, following: int) -> Gap:
        """Return the longest absence between two uses; a copy can begin after function 0."""
        return cls(v, last, max(last, 0) + 1, following, following)


def all_gaps(trace: Trace) -> list[Gap]:
    """Return every gap between uses of the variables that may be offloaded."""
    found: list[Gap] = []
    for v, variable in enumerate(trace.variables):
        if variable.stays or (variable.before and not trace.uses[v] and not variable.after):
            continue
        first = [-1] if variable.before else []
        end = [len(trace.functions)] if variable.after else []
        gaps = (Gap.between(v, *pair) for pair in pairwise([*first, *trace.uses[v], *end]))
        found += [gap for gap in gaps if gap.freed < gap.next]
    return found


def as_schedule(policy: str, trace: Trace, budget: int, gaps: Iterable[Gap]) -> Schedule:
    """Return the schedule that offloads variables in these gaps and in no others."""
    count = len(trace.functions) + 1
    frees: list[list[int]] = [[] for _ in range(count)]
    ins: list[list[int]] = [[] for _ in range(count)]
    outs: list[list[int]] = [[] for _ in range(count)]
    copied: dict[int, int] = {}  # variable -> the use before its last copy
    for gap in sorted(gaps, key=lambda gap: gap.next):
        frees[gap.freed].append(gap.v)
        ins[gap.back].append(gap.v)
        before = copied.get(gap.v)
        written = trace.written[gap.v]  # after the copy, and up to the gap?
        if before is None or bisect_right(written, gap.last) > bisect_right(written, before):
            outs[max(gap.last, 0)].append(gap.v)
            copied[gap.v] = gap.last
    parts = zip(frees, ins, outs, strict=True)
    stages = (Stage(tuple(f), tuple(b), tuple(o)) for f, b, o in parts)
    return Schedule(policy, budget, tuple(stages))


# Fit of gaps to a budget: latest wait for each eviction, earliest begin of each prefetch.
#
# No clock is used, so there is nothing to tune, and a schedule holds the same bytes on any machine.
#
#     stay    of the gaps that were proposed, drop those without which everything fits
#     freed   await a copy at the last stage up to which there is room for it; the last copy first
#     back    begin a return at the first stage from which on there is room; the next use first
#
# Source: in the words of the paper, Swap-in as early, the wait for Swap-out as late.

SpareBytes = npt.NDArray[np.int64]
"""Bytes to spare at each stage."""

Order = Callable[[Gap], tuple[float, ...]]
"""The first to stay resident has the smallest."""


def fitted(trace: Trace, budget: int, gaps: Iterable[Gap], order: Order) -> list[Gap]:
    """Return the gaps that are needed, with the stages at which they begin and end.

    Args:
        trace: the step.
        budget: bytes.
        gaps: proposed; with all of them the step must fit.
        order: which are dropped first, if everything fits without them.

    Raises:
        BudgetError: with all of them it does not fit.
    """
    proposed = list(gaps)
    spare = budget - np.array([*trace.live, trace.in_the_end], np.int64)
    for gap in proposed:
        spare[gap.freed : gap.next] += trace.size(gap.v)
    if spare.min() < 0:
        raise too_small(trace, budget)
    left = _needed(trace, proposed, spare, order)
    return _back_early(trace, _freed_late(trace, left, spare), spare)


def _needed(trace: Trace, gaps: list[Gap], spare: SpareBytes, order: Order) -> list[Gap]:
    """Remove the gaps without which all variables fit, and deduct their bytes from the capacity."""
    left = []
    for gap in sorted(gaps, key=lambda gap: (order(gap), gap.v, gap.next)):
        size, spare_meanwhile = trace.size(gap.v), spare[gap.freed : gap.next]
        if spare_meanwhile.min() >= size:
            spare_meanwhile -= size
        else:
            left.append(gap)
    return left


def _freed_late(trace: Trace, gaps: list[Gap], spare: SpareBytes) -> list[Gap]:
    """Await every eviction as late as the capacity permits, and deduct the bytes used."""
    found = []
    for gap in sorted(gaps, key=lambda gap: (gap.last, gap.next), reverse=True):
        size, freed = trace.size(gap.v), gap.freed
        while freed + 1 < gap.next and spare[freed] >= size:
            spare[freed] -= size
            freed += 1
        found.append(replace(gap, freed=freed))
    return found


def _back_early(trace: Trace, gaps: list[Gap], spare: SpareBytes) -> list[Gap]:
    """Begin every prefetch as early as the capacity permits until its use."""
    found = []
    for gap in sorted(gaps, key=lambda gap: gap.next):
        size, back = trace.size(gap.v), gap.next
        while back > gap.freed + 1 and spare[back - 1] >= size:
            back -= 1
            spare[back] -= size
        found.append(replace(gap, back=back))
    return found


def too_small(trace: Trace, budget: int) -> BudgetError:
    """Return the error for one function that does not fit in the budget by itself."""
    return BudgetError(
        f"a step needs {show_bytes(trace.floor)} on the device even with everything else "
        f"offloaded, and its budget is {show_bytes(budget)}: give as much, or a smaller "
        "micro-batch",
        needed=trace.floor,
        budget=budget,
    )
