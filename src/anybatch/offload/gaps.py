"""Gaps between uses of a variable, in which it may be offloaded.

           last use     bytes given up          return begins      next use
    v  ────────p═══════════freed ─ ─ ─ ─ ─ ─ ─ ─ ─back══════════════q──────
               └copy.......└awaited               └.............

A schedule is a choice of gaps, with two stages for each. A variable on the host when the step
begins and ends has a gap before its first use and one after its last, and these are no choice: the
first frees nothing, and from the last nothing returns.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from anybatch.offload.schedule import Schedule, Stage
from anybatch.offload.trace import Trace


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
