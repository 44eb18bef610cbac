"""The default: the fastest of three rules + fit, and never slower than the paper's window.

    belady   moves the fewest bytes: where the link is the bottleneck
    hiding   what hides its travel best: where computing nearly is
    ends     the same before memory runs short and after: where it is short for a moment

They do not depend on the link and have nothing to tune; the simulator selects the fastest. If even
that one waits for a copy, the paper's policy is tried too, with nine windows. It frees memory long
before it is needed, which costs nothing while the link is idle, and now and then wins a little.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from anybatch.core.links import Link
from anybatch.errors import BudgetError
from anybatch.offload.belady import belady
from anybatch.offload.ends import ends
from anybatch.offload.hiding import hiding
from anybatch.offload.schedule import Schedule
from anybatch.offload.simulate import simulate
from anybatch.offload.trace import Trace
from anybatch.offload.window import window

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
