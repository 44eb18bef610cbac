"""Search of micro-batch sizes above the largest that fits, with saved tensors offloaded.

A trial costs several micro-batches, all larger than the largest that fits. So the times of smaller
sizes first bound the possible gain. A micro-batch costs more for every sample the more samples it
has, once the device is busy; so the line through the times is a lower bound for larger ones. And
bytes that do not fit have to be moved out and back.

    seconds     t(8) │  t(16) ─ ─ ─ ─ the line goes on ─ ─ ─ ─>  at least so many
    bytes            │ cap        what is too much, out and back  at least so many seconds

No trial if either leaves less than a twentieth of a step to be gained. Two in a row that have lost
are two points of another line, that of offloaded ones, which bounds larger sizes: if moving costs
much for any size, large micro-batches may still win.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from anybatch.planner.choice import between, step_seconds

GAIN = 0.05
"""Share of a step that a trial must be able to win: timings do not distinguish less."""

MOVED = 0.5
"""Share of the excess that has to move at least: the rest may be recomputed instead."""

SLOWER = 1.1
"""Times the best so far, after which a trial is not repeated: it has lost."""

LOST = 2
"""Trials in a row that have lost, after which the line through trials must leave enough to win."""

Trial = Callable[[int, float], float | None]
"""Samples, and the seconds after which it has lost -> seconds of a micro-batch with its saved
tensors offloaded; None where it cannot be run."""


def above(cap: int, size: int) -> list[int]:
    """Return the sizes above `cap` that are considered: twice as many, again and again, and all."""
    found = [cap]
    while found[-1] < size:
        found.append(min(2 * found[-1], size))
    return found[1:]


def try_above(
    timed: Mapping[int, float],
    best: float,
    sizes: Iterable[int],
    size: int,
    *,
    moving: Callable[[int], float],
    trial: Trial,
) -> dict[int, float]:
    """Time sizes with saved tensors offloaded, where a gain is still possible.

    Args:
        timed: size -> seconds of one micro-batch, with all in memory; not empty.
        best: seconds of a step of the best of these.
        sizes: samples in the micro-batches that are considered, none of them timed; ascending.
        size: N_B, samples in the mini-batch.
        moving: samples -> the seconds in which a step in such micro-batches moves its excess.
        trial: times one.

    Returns:
        Size -> seconds of one micro-batch, of those that were tried.
    """
    found: dict[int, float] = {}
    lost = 0
    for n in sizes:
        worth = (1 - GAIN) * best
        if least_seconds(timed, n, size) > worth or moving(n) > worth:
            continue
        if lost >= LOST and _least_offloaded(found, n, size) > worth:
            continue
        seconds = trial(n, SLOWER * best * n / size)
        if seconds is None:
            break
        found[n] = seconds
        now = step_seconds({**timed, **found}, n, size)
        lost = lost + 1 if now >= best else 0
        best = min(best, now)
    return found


def least_seconds(timed: Mapping[int, float], n: int, size: int) -> float:
    """Return the fewest seconds of a step in micro-batches of `n`, larger than all that were timed.

    They are on the line through the largest size that was timed and the largest of half as many
    samples or fewer; where there is no such size, a micro-batch takes no less than the largest did.
    A smaller one, the last of the step, is on the line between its neighbours, as it is everywhere.
    """
    most = max(timed)
    half = max((k for k in timed if 2 * k <= most), default=None)
    rise = 0.0 if half is None else max(0.0, (timed[most] - timed[half]) / (most - half))

    def one(count: int) -> float:
        if count <= most:
            return between(timed, count)
        return timed[most] + rise * (count - most)

    full, rest = divmod(size, n)
    return full * one(n) + (one(rest) if rest else 0.0)


def _least_offloaded(found: Mapping[int, float], n: int, size: int) -> float:
    """Return the fewest seconds of a step in micro-batches of `n`, larger than all that were tried.

    They are on the line through the last two, and so is the last one of the step, outside of these.
    """
    (one, seconds), (other, more) = sorted(found.items())[-2:]
    rise = max(0.0, (more - seconds) / (other - one))
    full, rest = divmod(size, n)

    def least(count: int) -> float:
        between_them = one <= count <= other
        return seconds if between_them else max(0.0, seconds + rise * (count - one))

    return full * least(n) + (least(rest) if rest else 0.0)
