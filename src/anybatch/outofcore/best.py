"""The default: Belady + fit, or what hides best + fit, whichever the simulator finds faster.

Both know nothing of the link and have nothing to tune. Belady moves the fewest bytes, which counts
where the link is the bottleneck; what hides best wins where computing nearly is.
"""

from __future__ import annotations

from collections.abc import Iterable

from anybatch.outofcore.belady import belady
from anybatch.outofcore.hiding import hiding
from anybatch.outofcore.schedule import Schedule
from anybatch.outofcore.simulate import Link, simulate
from anybatch.outofcore.trace import Trace


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


def fastest(trace: Trace, link: Link, schedules: Iterable[Schedule]) -> Schedule:
    """Return the schedule that takes the fewest seconds, the first of those."""
    return min(schedules, key=lambda schedule: simulate(trace, schedule, link).seconds)
