"""Comparison of a few close micro-batch sizes by full steps, run alternately.

Sizes are timed one after another, by a micro-batch each. A shared machine changes from one to the
next, and between its micro-batches a step does work that is in none of them: rows are cut,
gradients added up, memory is freed and allocated again. So close sizes are run again as full steps,
first all of them once and then all of them again:

    timed        4: .31   8: .24   9: .25   16: .26   32: .40        of a step, by its micro-batch
    duel         8: .27   9: .22   16: .25    8: .27   9: .21 ...    chosen: 9
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, isfinite
from statistics import fmean

from anybatch.planner.choice import fastest, step_seconds

CLOSE = 1.2
"""Times the best, within which a size takes part."""

MOST = 3
"""Sizes that take part."""

TURNS = 2
"""Times that all of them are run."""

LONG = 2.0
"""Seconds of a step, after which it is not run again only to be compared."""

StepSeconds = Callable[[int], float | None]
"""Samples in a micro-batch -> seconds of a full step; None if unknown."""


def duel(timed: Mapping[int, float], size: int, step: StepSeconds) -> dict[int, float]:
    """Run full steps of the close sizes alternately.

    Args:
        timed: size -> seconds of one micro-batch.
        size: N_B, samples in the mini-batch.
        step: runs a step.

    Returns:
        Size -> seconds of a step, the mean over all rounds, of those that were run and could be;
        none where there is nothing to compare, or a step is long.
    """
    best = min((step_seconds(timed, n, size) for n in timed), default=inf)
    close = sorted(timed, key=lambda n: step_seconds(timed, n, size))[:MOST]
    close = [n for n in close if step_seconds(timed, n, size) <= CLOSE * best]
    if best > LONG or len(close) < 2:
        return {}
    found: dict[int, list[float]] = {n: [] for n in close}
    for _ in range(TURNS):
        for n, seconds in list(found.items()):
            now = step(n)
            if now is None:
                return {}
            seconds.append(now)
            if not isfinite(now):
                del found[n]
    return {n: fmean(seconds) for n, seconds in found.items()}


def as_in_steps(
    timed: Mapping[int, float], steps: Mapping[int, float], size: int
) -> dict[int, float]:
    """Return seconds of one micro-batch as they are in a step.

    Args:
        timed: size -> seconds of one micro-batch, timed by itself.
        steps: size -> seconds of a full step that was run; each of these is in `timed`.
        size: N_B, samples in the mini-batch.

    Returns:
        The seconds of `timed`, all of them longer or shorter by as much as the fastest step was.
    """
    if not steps:
        return dict(timed)
    n = min(steps, key=lambda n: steps[n])
    longer = steps[n] / step_seconds(timed, n, size)
    return {k: longer * seconds for k, seconds in timed.items()}


def chosen(timed: Mapping[int, float], steps: Mapping[int, float], size: int) -> int:
    """Return the fastest size: by full steps where any were run, else by micro-batches."""
    return min(steps, key=lambda n: (steps[n], n)) if steps else fastest(timed, size)
