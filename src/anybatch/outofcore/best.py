"""The default: Belady + fit, or what hides best + fit, whichever the simulator finds faster.

Both know nothing of the link and have nothing to tune. Belady moves the fewest bytes, which counts
where the link is the bottleneck; what hides best wins where computing nearly is.
"""

from __future__ import annotations

from collections.abc import Iterable

from anybatch.outofcore.belady import belady
from anybatch.outofcore.draft import too_small
from anybatch.outofcore.hiding import hiding
from anybatch.outofcore.recompute import cheap
from anybatch.outofcore.schedule import Schedule
from anybatch.outofcore.simulate import Link, simulate
from anybatch.outofcore.sublinear import sublinear
from anybatch.outofcore.trace import Trace

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of cheap results, how many are computed again."""

STRETCHES = tuple((count, share) for count in (2, 4, 8, 12) for share in (0.5, 0.7, 0.85, 1.0))
"""Into how many a forward pass is cut, and how many of those are computed again."""


def plan(trace: Trace, budget: int, link: Link) -> Schedule:
    """Return the default schedule of a step.

    Args:
        trace: the step, with seconds.
        budget: bytes that it never exceeds.
        link: between device and host.

    Raises:
        BudgetError: one function alone needs more.

    Example:
        >>> schedule = plan(trace, 16 << 30, Link(out=25e9, back=25e9))
        >>> simulate(trace, schedule, link).seconds
    """
    return fastest(trace, link, (belady(trace, budget), hiding(trace, budget)))


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


def fastest(trace: Trace, link: Link, schedules: Iterable[Schedule]) -> Schedule:
    """Return the schedule that takes the fewest seconds, the first of those."""
    return min(schedules, key=lambda schedule: simulate(trace, schedule, link).seconds)
