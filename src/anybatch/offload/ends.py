"""Policy that evicts variables with both copies hidden: before memory is short, and after.

A variable may be idle for long, yet a copy can use only two parts of that time: one before memory
runs short, and one after memory is free again, for the return:

    last use ── the copy hides here ──╮ memory is short ╭── the return hides here ── next use
                     before           first          last          after

So the first to stay resident has the fewest seconds a byte at the shorter of its two ends; among
equals, as with memory nearly always short, between its two uses (`anybatch.offload.hiding`). That
matters with a budget a little too small, where only a stall of one small variable can be lost.

Source: this project.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from anybatch.offload.fit import fitted
from anybatch.offload.gaps import Gap, all_gaps, as_schedule
from anybatch.offload.schedule import Schedule
from anybatch.offload.trace import Trace


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
