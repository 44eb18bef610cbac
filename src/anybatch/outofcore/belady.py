"""Belady + fit: which variables leave, and when they come back, with nothing to tune.

    which    walk the functions; where one does not fit, the variable whose next use is furthest away
             leaves; what is never used again has left already
    when     a copy begins after the last use before it leaves; its end is awaited when the bytes are
             needed, no earlier; a return begins at the first stage from which on there is room for it

           last use     bytes needed            room              next use
    v  ────────p═══════════i─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─j════════════════q──────      a gap
               └copy...    └awaited               └return...

Furthest next use is optimal where all pages have one size and one comes at a time (Belady 1966);
sizes differ here, so what was given up too much is taken back where it fits.

Source: design 5.7; the paper asks for the same with one hyperparameter, `window`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from anybatch.outofcore.draft import too_small
from anybatch.outofcore.schedule import Schedule, Stage
from anybatch.outofcore.trace import Trace


@dataclass(frozen=True)
class Gap:
    """A time in which a variable is away.

    Attributes:
        v: the variable.
        last: the function that used it last before, -1 for none.
        freed: the stage that gives its bytes up.
        back: the stage at which its return begins.
        next: the function that uses it next; the number of functions for the end.
        copies: it was written since its last copy, so it needs one.
    """

    v: int
    last: int
    freed: int
    back: int
    next: int
    copies: bool


def belady(trace: Trace, budget: int) -> Schedule:
    """Plan a step within a budget: the furthest next use leaves, and comes back early.

    Args:
        trace: the step.
        budget: bytes.

    Raises:
        BudgetError: one function alone needs more.
    """
    gaps, held = furthest_leaves(trace, budget)
    gaps, room = taken_back(trace, gaps, [budget - each for each in held])
    gaps = as_early_as_fits(trace, gaps, room)
    return as_schedule("Belady + fit", trace, budget, gaps)


def furthest_leaves(trace: Trace, budget: int) -> tuple[list[Gap], list[int]]:
    """Return the gaps of Belady's rule, every return at its next use, and the bytes of each stage.

    Raises:
        BudgetError: one function alone needs more.
    """
    walk = _Walk(trace, budget)
    for i in range(len(trace.functions)):
        walk.stage(i, trace.functions[i].uses)
        walk.dead(i)
    walk.stage(len(trace.functions), [v for v, one in enumerate(trace.variables) if one.after])
    return walk.gaps, walk.trail


class _Walk:
    """What is here, and the gaps so far."""

    def __init__(self, trace: Trace, budget: int) -> None:
        self.trace, self.budget = trace, budget
        self.last = dict.fromkeys(trace.before, -1)  # what is here -> its last use
        self.away: dict[int, Gap] = {}
        self.dirty = set(trace.before)
        self.held = trace.bytes_of(trace.before)
        self.gaps: list[Gap] = []
        self.trail: list[int] = []

    def stage(self, i: int, uses: Iterable[int]) -> None:
        """Have all that stage `i` uses here, in the budget."""
        needed = set(uses)
        missing = needed.difference(self.last)
        self.held += self.trace.bytes_of(missing)
        if self.held > self.budget:
            self.make_room(i, needed)
        for v in missing:
            gap = self.away.pop(v, None)
            if gap is None:
                self.dirty.add(v)
            else:
                self.gaps.append(gap)
        self.last |= dict.fromkeys(needed, i)
        if i < len(self.trace.functions):
            self.dirty.update(self.trace.functions[i].writes)
        self.trail.append(self.held)

    def make_room(self, i: int, needed: set[int]) -> None:
        """Let what is used furthest from now leave, until the rest fits."""
        stays = self.trace.variables
        free = [v for v in self.last if v not in needed and not stays[v].stays]
        free.sort(key=lambda v: (self.trace.next_use(v, i), self.trace.size(v)))
        while self.held > self.budget:
            if not free or i == 0:
                raise too_small(self.trace, self.budget)
            v = free.pop()
            following, last = self.trace.next_use(v, i), self.last.pop(v)
            self.away[v] = Gap(v, last, i, following, following, v in self.dirty)
            self.dirty.discard(v)
            self.held -= self.trace.size(v)

    def dead(self, i: int) -> None:
        """Forget what nobody uses after function `i`."""
        for v in self.trace.dies[i]:
            del self.last[v]
            self.held -= self.trace.size(v)


def taken_back(trace: Trace, gaps: list[Gap], room: list[int]) -> tuple[list[Gap], list[int]]:
    """Drop the gaps for which there is room after all: something larger has left since.

    Args:
        trace: the step.
        gaps: every return at its next use.
        room: bytes to spare at each stage.

    Returns:
        The others, and what is to spare beside them.
    """
    room, left = list(room), []
    for gap in sorted(gaps, key=lambda gap: -trace.size(gap.v)):
        size, copied = trace.size(gap.v), gap.copies
        # a later gap of the same variable may rely on this one's copy, so only the last may go
        if copied and all(size <= room[k] for k in range(gap.freed, gap.next)):
            if not any(other.v == gap.v and other.freed > gap.freed for other in gaps):
                for k in range(gap.freed, gap.next):
                    room[k] -= size
                continue
        left.append(gap)
    return left, room


def as_early_as_fits(trace: Trace, gaps: list[Gap], room: list[int]) -> list[Gap]:
    """Begin every return as early as there is room from there to its next use; the next use first.

    Args:
        trace: the step.
        gaps: every return at its next use.
        room: bytes to spare at each stage.
    """
    room, found = list(room), []
    for gap in sorted(gaps, key=lambda gap: gap.next):
        size, back = trace.size(gap.v), gap.next
        while back > gap.freed + 1 and room[back - 1] >= size:
            back -= 1
            room[back] -= size
        found.append(replace(gap, back=back))
    return found


def as_schedule(policy: str, trace: Trace, budget: int, gaps: Iterable[Gap]) -> Schedule:
    """Return the schedule in which variables are away in these gaps and nowhere else."""
    count = len(trace.functions) + 1
    frees: list[list[int]] = [[] for _ in range(count)]
    ins: list[list[Gap]] = [[] for _ in range(count)]
    outs: list[list[int]] = [[] for _ in range(count)]
    for gap in gaps:
        frees[gap.freed].append(gap.v)
        ins[gap.back].append(gap)
        if gap.copies:
            outs[max(gap.last, 0)].append(gap.v)
    returns = [[gap.v for gap in sorted(each, key=lambda gap: gap.next)] for each in ins]
    parts = zip(frees, returns, outs, strict=True)
    stages = (Stage(tuple(f), tuple(b), tuple(o)) for f, b, o in parts)
    return Schedule(policy, budget, tuple(stages))

