"""A schedule for a step in which results may be computed again instead of moved."""

from __future__ import annotations

from anybatch.core.plan_sections import Link
from anybatch.offloading.policy import plan, too_small
from anybatch.offloading.schedule import Schedule, Trace, simulate
from benchmarks.simulators.recompute import cheap
from benchmarks.simulators.sublinear import sublinear

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of cheap results, how many are computed again."""

STRETCHES = tuple((count, share) for count in (2, 4, 8, 12) for share in (0.5, 0.7, 0.85, 1.0))
"""Into how many a forward pass is cut, and how many of those are computed again."""


def plan_with_recomputation(trace: Trace, budget: int, link: Link) -> tuple[Trace, Schedule]:
    """Return the step as it should be run, and its schedule, if results may be computed again.

    The candidates are the step as it is, with cheap results computed again, or some of them, and
    with stretches of layers computed again.

    Args:
        trace: the step, with seconds.
        budget: bytes that it never exceeds.
        link: between device and host.

    Raises:
        BudgetError: one function alone needs more.
    """
    steps = [trace, *(cheap(trace, share) for share in SHARES)]
    steps += [sublinear(trace, stretches, share) for stretches, share in STRETCHES]
    found = [(step, plan(step, budget, link)) for step in steps if step.floor <= budget]
    if not found:
        raise too_small(trace, budget)
    return min(found, key=lambda pair: simulate(pair[0], pair[1], link).seconds)
