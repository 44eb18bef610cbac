"""Policies of eviction: the best of three rules + fit, never slower than the paper's window.

    belady   moves the fewest bytes: where the link is the bottleneck
    hiding   what hides its travel best: where computing nearly is
    ends     the same before memory runs short and after: where it is short for a moment

They do not depend on the link and have nothing to tune; the simulator selects the fastest. If even
that one waits for a copy, the paper's policy is tried too, with nine windows. It frees memory long
before it is needed, which costs nothing while the link is idle, and now and then wins a little.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from anybatch.core.plan_sections import Link
from anybatch.core.units import show_bytes
from anybatch.errors import BudgetError
from anybatch.offload.schedule import Schedule, Stage, Trace, simulate

WINDOWS = tuple(range(9))
"""Eighths of the budget."""


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
    ours = by_rule(trace, budget, link)
    if simulate(trace, ours, link).stall == 0:
        return ours
    return fastest(trace, link, (ours, *_windows(trace, budget)))


def by_rule(trace: Trace, budget: int, link: Link) -> Schedule:
    """Return the fastest of the three rules' schedules.

    Raises:
        BudgetError: a single function needs more.
    """
    return fastest(trace, link, (rule(trace, budget) for rule in (belady, hiding, ends)))


def _windows(trace: Trace, budget: int) -> Iterator[Schedule]:
    """Yield the paper's schedules, of the windows that fit."""
    for eighths in WINDOWS:
        try:
            yield window(trace, budget, eighths * budget // 8)
        except BudgetError:
            continue


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


# The paper's policy: a window of bytes slides over the variables in the order they are used.
#
#    variables of   f_{i-1} |  f_i   f_{i+1}  f_{i+2} |  f_{i+3} ...
#                           └─── window, in bytes ────┘
#    (a) what comes into the window returns          (c) what f_i used leaves, after it
#    (b) where that does not fit, the oldest copy    (d) unless it is never used again, or is in the
#        to the host is awaited before f_i               window already
#
# Improvements to it: a variable is not copied again if nothing has written to it since; one that
# enters the window before its copy was awaited is not moved; and variables outside of the window
# when the step begins are evicted after the first function.
#
# Source: Hayakawa and Narihira, section 3, Figure 2.


def window(trace: Trace, budget: int, size: int) -> Schedule:
    """Plan a step by the paper's algorithm.

    Args:
        trace: the step.
        budget: bytes on the device.
        size: bytes of the schedule-window; the variables of one function are always in it.

    Raises:
        BudgetError: the window and the resident variables do not fit.
    """
    draft, sequence = Draft(trace, budget), _Sequence(trace, size)
    for i, function in enumerate(trace.functions):
        inside, new = sequence.slide_to(i)
        draft.bring(v for v in new if v in sequence.made)  # (a), and in it (b)
        draft.run()
        sequence.made.update(function.makes)
        used = function.uses if i else (*function.uses, *trace.before)
        draft.evict(v for v in used if v not in inside)  # (c), (d)
    return draft.schedule(f"window of {show_bytes(size)}")


class _Sequence:
    """The variable-sequence v, and the window v[l:r] on it."""

    def __init__(self, trace: Trace, size: int) -> None:
        self._flat = [v for function in trace.functions for v in function.uses]
        self._trace, self._size = trace, size
        self._left = self._right = self._bytes = 0
        self._count: dict[int, int] = {}
        self.made = {*trace.before, *trace.hosted}

    def slide_to(self, i: int) -> tuple[dict[int, int], list[int]]:
        """Move the window to function `i`.

        Returns:
            The variables in it after those of the function, and those that have just entered it.
        """
        own = self._left + len(self._trace.functions[i].uses)
        new = []
        while self._right < len(self._flat) and (
            self._right < own or self._bytes + self._size_at(self._right) <= self._size
        ):
            v = self._flat[self._right]
            new.append(v)
            self._count[v] = self._count.get(v, 0) + 1
            self._bytes += self._size_at(self._right)
            self._right += 1
        for place in range(self._left, own):
            v = self._flat[place]
            self._bytes -= self._size_at(place)
            self._count[v] -= 1
            if not self._count[v]:
                del self._count[v]
        self._left = own
        return self._count, new

    def _size_at(self, place: int) -> int:
        return self._trace.size(self._flat[place])


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


# Policy that evicts variables with the best hidden copies: most seconds between uses per byte.
#
# A copy and a return cost time only where they take longer than the kernels meanwhile. So of all
# intervals in which variables are not used, those with the fewest seconds a byte are spent on the
# device, as far as bytes permit, and in the others variables are offloaded:
#
#     stays first:  (seconds from last to next use) / bytes    the smallest
#
# The paper's distance between two uses is such a ratio, too, with bytes in place of seconds.
# Belady's rule considers only the next use, and may evict a large variable for a short time.
#
# Source: this project; Hayakawa and Narihira, section 3, for the distance.


def hiding(trace: Trace, budget: int) -> Schedule:
    """Plan a step within a budget by evicting the variables with the best hidden copies.

    Args:
        trace: the step, with seconds; only their ratios count.
        budget: bytes.

    Raises:
        BudgetError: a single function needs more.
    """
    clock = [0.0, *accumulate(function.seconds for function in trace.functions)]
    clock.append(clock[-1])  # after the end

    def seconds_a_byte(gap: Gap) -> tuple[float, ...]:
        return ((clock[gap.next] - clock[gap.freed]) / max(trace.size(gap.v), 1),)

    chosen = fitted(trace, budget, all_gaps(trace), seconds_a_byte)
    return as_schedule("best hidden + fit", trace, budget, chosen)


# Gaps between uses of a variable, in which it may be offloaded.
#
#            last use     bytes given up          return begins      next use
#     v  ────────p═══════════freed ─ ─ ─ ─ ─ ─ ─ ─ ─back══════════════q──────
#                └copy.......└awaited               └.............
#
# A schedule is a choice of gaps, with two stages for each. A variable on the host when the step
# begins and ends has a gap before its first use and one after its last, and these are no choice:
# the first frees nothing, and from the last nothing returns.


@dataclass(frozen=True)
class Gap:
    """Gap between two uses of a variable, with the stages of its eviction and prefetch.

    Attributes:
        v: the variable.
        last: the function that used it last before, -1 for none.
        freed: the stage that gives its bytes up.
        back: the stage at which its return begins.
        next: the function that uses it next; the number of functions for the end, and one more
            where it does not return.
        forced: it is on the host in any case.
    """

    v: int
    last: int
    freed: int
    back: int
    next: int
    forced: bool = False

    @classmethod
    def between(cls, v: int, last: int, following: int) -> Gap:
        """Return the longest absence between two uses; a copy can begin after function 0."""
        return cls(v, last, max(last, 0) + 1, following, following)


def forced_gaps(trace: Trace) -> list[Gap]:
    """Return the gaps before and after all uses of variables that begin and end on the host."""
    found = []
    for v in trace.hosted:
        first, last, end = trace.uses[v][0], trace.uses[v][-1], len(trace.functions) + 1
        found.append(Gap(v, -1, 0, first, first, forced=True))
        found.append(Gap(v, last, last + 1, end, end, forced=True))
    return found


def all_gaps(trace: Trace) -> list[Gap]:
    """Return every gap between uses of the variables that may be offloaded."""
    found = forced_gaps(trace)
    for v, variable in enumerate(trace.variables):
        if variable.stays or (variable.before and not trace.uses[v] and not variable.after):
            continue
        first = [-1] if variable.before and not variable.host else []
        end = [len(trace.functions)] if variable.after and not variable.host else []
        gaps = (Gap.between(v, *pair) for pair in pairwise([*first, *trace.uses[v], *end]))
        found += [gap for gap in gaps if gap.freed < gap.next]
    return found


def as_schedule(policy: str, trace: Trace, budget: int, gaps: Iterable[Gap]) -> Schedule:
    """Return the schedule that offloads variables in these gaps and in no others."""
    count = len(trace.functions) + 1
    frees: list[list[int]] = [[] for _ in range(count)]
    ins: list[list[int]] = [[] for _ in range(count)]
    outs: list[list[int]] = [[] for _ in range(count)]
    copied = dict.fromkeys(trace.hosted, -1)  # variable -> the use before its last copy
    for gap in sorted(gaps, key=lambda gap: gap.next):
        if gap.last >= 0 or not gap.forced:
            frees[gap.freed].append(gap.v)
        if gap.back < count:
            ins[gap.back].append(gap.v)
        before = copied.get(gap.v)
        if before is None or _written_between(trace, gap.v, before, gap.last):
            outs[max(gap.last, 0)].append(gap.v)
            copied[gap.v] = gap.last
    parts = zip(frees, ins, outs, strict=True)
    stages = (Stage(tuple(f), tuple(b), tuple(o)) for f, b, o in parts)
    return Schedule(policy, budget, tuple(stages))


def _written_between(trace: Trace, v: int, before: int, last: int) -> bool:
    """Say whether a function after `before`, up to `last`, writes to `v`."""
    written = trace.written[v]
    return bisect_right(written, last) > bisect_right(written, before)


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
        if not gap.forced and spare_meanwhile.min() >= size:
            spare_meanwhile -= size
        else:
            left.append(gap)
    return left


def _freed_late(trace: Trace, gaps: list[Gap], spare: SpareBytes) -> list[Gap]:
    """Await every eviction as late as the capacity permits, and deduct the bytes used."""
    found = []
    for gap in sorted(gaps, key=lambda gap: (gap.last, gap.next), reverse=True):
        size, freed = trace.size(gap.v), gap.freed
        here = gap.last >= 0 or not gap.forced  # or there is nothing to give up
        while here and freed + 1 < gap.next and spare[freed] >= size:
            spare[freed] -= size
            freed += 1
        found.append(replace(gap, freed=freed))
    return found


def _back_early(trace: Trace, gaps: list[Gap], spare: SpareBytes) -> list[Gap]:
    """Begin every prefetch as early as the capacity permits until its use."""
    found = []
    for gap in sorted(gaps, key=lambda gap: gap.next):
        size, back = trace.size(gap.v), gap.next
        least = gap.freed + (not gap.forced)
        returns = back <= len(trace.functions)
        while returns and back > least and spare[back - 1] >= size:
            back -= 1
            spare[back] -= size
        found.append(replace(gap, back=back))
    return found


# Schedule under construction: resident variables, evictions in progress, and stages so far.
#
# Policies that go through the functions one by one call `bring` and `evict`; a draft counts bytes,
# and where they run short it waits for the oldest copy that has begun, as the paper does (Fig. 2b).
# A variable that is needed again before its copy was awaited has never been evicted.


class Draft:
    """The beginning of a schedule.

    Args:
        trace: the step.
        budget: bytes.

    Attributes:
        stage: the stage that is being written.
        here: variables on the device, in eviction or not.
        leaving: variables that may be freed after their copy, the oldest first.
        held: bytes on the device.
    """

    def __init__(self, trace: Trace, budget: int) -> None:
        self.trace, self.budget = trace, budget
        self.stage = 0
        self.here = set(trace.before)
        self.leaving: dict[int, None] = {}
        self.held = trace.bytes_of(self.here)
        self._copied = set(trace.hosted)
        self._frees: list[int] = []
        self._ins: list[int] = []
        self._stages: list[Stage] = []

    def bring(self, variables: Iterable[int]) -> None:
        """Make variables resident at this stage, and cancel their evictions in progress."""
        wanted = list(dict.fromkeys(variables))
        for v in wanted:
            self.leaving.pop(v, None)
        for v in wanted:
            if v not in self.here:
                self._make_space(self.trace.size(v))
                self._ins.append(v)
                self.here.add(v)

    def run(self) -> None:
        """Run the function of this stage; then the next stage begins."""
        i, trace = self.stage, self.trace
        function = trace.functions[i]
        self.bring(function.reads)
        self._make_space(trace.bytes_of(function.makes))
        self.here.update(function.makes)
        self._copied.difference_update(function.writes)
        dead = set(trace.dies[i])
        self.here -= dead
        self.held -= trace.bytes_of(dead)
        self._close()

    def evict(self, variables: Iterable[int]) -> None:
        """Begin copies after the latest function; skip variables that are never evicted."""
        outs = []
        for v in dict.fromkeys(variables):
            if v in self.here and v not in self.leaving and not self.trace.variables[v].stays:
                self.leaving[v] = None
                if v not in self._copied:
                    outs.append(v)
        self._copied.update(outs)
        last = self._stages[-1]
        self._stages[-1] = Stage(last.frees, last.ins, last.outs + tuple(outs))

    def await_all(self) -> None:
        """Free at this stage all variables that are being evicted."""
        for v in list(self.leaving):
            self._free(v)

    def schedule(self, policy: str) -> Schedule:
        """Evict the host's variables, bring in those needed at the end; return the schedule."""
        self.evict(v for v in self.trace.hosted if v in self.here)
        for v in [v for v in self.trace.hosted if v in self.leaving]:
            self._free(v)
        self.bring(self.trace.after)
        self._close()
        return Schedule(policy, self.budget, tuple(self._stages))

    def _make_space(self, count: int) -> None:
        self.held += count
        while self.held > self.budget:
            if not self.leaving:
                raise over_budget(self.trace, self.budget, self.stage, self.held)
            self._free(next(iter(self.leaving)))

    def _free(self, v: int) -> None:
        del self.leaving[v]
        self.here.remove(v)
        self.held -= self.trace.size(v)
        self._frees.append(v)

    def _close(self) -> None:
        self._stages.append(Stage(tuple(self._frees), tuple(self._ins)))
        self._frees, self._ins = [], []
        self.stage += 1


def too_small(trace: Trace, budget: int) -> BudgetError:
    """Return the error for one function that does not fit in the budget by itself."""
    return BudgetError(
        f"a step needs {show_bytes(trace.floor)} on the device even with everything else "
        f"offloaded, and its budget is {show_bytes(budget)}: give as much, or a smaller "
        "micro-batch",
        needed=trace.floor,
        budget=budget,
    )


def over_budget(trace: Trace, budget: int, i: int, held: int) -> BudgetError:
    """Return the error for a policy that evicts too few bytes where another may suffice."""
    if trace.floor > budget:
        return too_small(trace, budget)
    return BudgetError(
        f"a policy must evict enough for each function, and at stage {i} this one holds "
        f"{show_bytes(held)} of {show_bytes(budget)}: evict more, or prefetch less",
        needed=held,
        budget=budget,
    )
