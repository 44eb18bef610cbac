"""Policy that evicts variables with the best hidden copies: most seconds between uses per byte.

A copy and a return cost time only where they take longer than the kernels meanwhile. So of all
intervals in which variables are not used, those with the fewest seconds a byte are spent on the
device, as far as bytes permit, and in the others variables are offloaded:

    stays first:  (seconds from last to next use) / bytes    the smallest

The paper's distance between two uses is such a ratio, too, with bytes in place of seconds.
Belady's rule considers only the next use, and may evict a large variable for a short time.

Source: this project; Hayakawa and Narihira, section 3, for the distance.
"""

from __future__ import annotations

from itertools import accumulate

from anybatch.offloading.policy import Gap, all_gaps, as_schedule, fitted
from anybatch.offloading.schedule import Schedule, Trace


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
