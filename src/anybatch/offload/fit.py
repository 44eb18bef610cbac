"""Fit of gaps to a budget: latest wait for each eviction, earliest begin of each prefetch.

No clock is used, so there is nothing to tune, and a schedule holds the same bytes on any machine.

    stay    of the gaps that were proposed, drop those without which everything fits
    freed   await a copy at the last stage up to which there is room for it; the last copy first
    back    begin a return at the first stage from which on there is room; the next use first

Source: in the words of the paper, Swap-in as early, the wait for Swap-out as late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from anybatch.offload.draft import too_small
from anybatch.offload.gaps import Gap
from anybatch.offload.trace import Trace

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
