"""Search of the fastest micro-batch that fits, over measured times, as pure functions.

The largest that fits is not the fastest: on a CPU its tensors do not fit in the caches, and its
blocks are mapped and unmapped again. So a few sizes are timed, the cheap ones first: doubling from
a small one for as long as that pays, then the ones between.

    4  8  16  32  64      doubling, until two in a row are slower
          24  32  48      between the best and its neighbours; the close ones again
             34           and no small last one: 100 are 34, 34 and 32 as soon as 48, 48 and 4
    a step of N samples:  floor(N / n) * t(n) + t(N mod n)

Source: MBS, section 4.3.2, determines the size "experimentally".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import inf, isfinite
from statistics import fmean

from anybatch.core.plan import TRIED, Plan
from anybatch.core.units import show_bytes, show_seconds
from anybatch.errors import BudgetError

START = 4
"""Samples of the first size that is timed."""

SLOWER = 1.1
"""Times the best, after which a size counts as slower."""

CLOSE = 1.3
"""Times the best, within which a size is timed again."""

ROUNDS = 2
"""Times that those are timed again, later: other programs on the machine may have ended by then."""

LONG = 0.5
"""Seconds of a micro-batch that need not be timed again."""

Seconds = Callable[[int], float | None]
"""Samples of one micro-batch -> its seconds, or None where it could not be run after all."""


def search(cap: int, size: int, seconds: Seconds) -> dict[int, float]:
    """Time micro-batches until the fastest is found.

    Args:
        cap: the most samples that fit.
        size: N_B, samples in the mini-batch.
        seconds: times one size.

    Returns:
        Size -> seconds of one micro-batch, of all that were timed; none is larger than `cap`.
    """
    found = _Search(min(cap, size), size, seconds)
    found.double(min(START, found.cap))
    found.halve()
    for _ in range(ROUNDS):
        found.between()
        found.again()
        if found.timed and found.best() == max(found.timed):
            found.double(min(2 * found.best(), found.cap))
    return found.timed


class _Search:
    """Search state: the sizes timed so far, and the moves to further sizes."""

    def __init__(self, cap: int, size: int, seconds: Seconds) -> None:
        self.cap, self.size, self.seconds = cap, size, seconds
        self.timed: dict[int, float] = {}

    def best(self) -> int:
        """Return the fastest size so far."""
        return fastest(self.timed, self.size)

    def double(self, n: int) -> None:
        """Time n, 2n, 4n ... up to the cap, until two in a row are slower."""
        slower = 0
        while slower < 2:
            now = self._step(n)
            best = self._step(self.best()) if self.timed else now
            slower = slower + 1 if now > SLOWER * best else 0
            if n == self.cap or now == float("inf"):
                return
            n = min(2 * n, self.cap)

    def halve(self) -> None:
        """Go below the smallest size for as long as that pays."""
        while self.timed and self.best() == min(self.timed) > 1:
            if self._step(self.best() // 2) == float("inf"):
                return  # it does not fit: sums of gradients cost more than undivided

    def between(self) -> None:
        """Time the sizes around the fastest one: three quarters of it, and one and a half times.

        And it: each in as many micro-batches, and these as equal as can be.
        """
        if self.timed:
            best = self.best()
            for n in (3 * best // 4, best, min(3 * best // 2, self.cap)):
                if n >= 1:
                    self._step(even(self.size, n))

    def again(self) -> None:
        """Time close sizes again, and those that ended the doubling: the shorter time counts."""
        if not self.timed:
            return
        best = step_seconds(self.timed, self.best(), self.size)
        above = sorted(n for n in self.timed if n > self.best())[:3]
        for n, before in list(self.timed.items()):
            close = step_seconds(self.timed, n, self.size) <= CLOSE * best
            if before < LONG and (close or n in above):
                now = self.seconds(n)
                self.timed[n] = before if now is None else min(before, now)

    def _step(self, n: int) -> float:
        """Return the seconds of a step in micro-batches of n, infinite where it cannot run."""
        if n not in self.timed:
            found = self.seconds(n)
            if found is None:
                return float("inf")
            self.timed[n] = found
        return step_seconds(self.timed, n, self.size)


def fastest(timed: Mapping[int, float], size: int) -> int:
    """Return the size with the fewest seconds per step of `size` samples; the smaller on a tie."""
    return min(timed, key=lambda n: (step_seconds(timed, n, size), n))


def even(size: int, cap: int) -> int:
    """Return the size of micro-batches that are as few as `cap` allows, and as equal as can be."""
    count = -(-size // cap)
    return -(-size // count)


def step_seconds(timed: Mapping[int, float], n: int, size: int) -> float:
    """Return the seconds of a step of `size` samples in micro-batches of `n`.

    Args:
        timed: size -> seconds of one micro-batch; `n` is among them.
        n: samples in a micro-batch.
        size: N_B, samples in the mini-batch.
    """
    full, rest = divmod(size, n)
    return full * timed[n] + (between(timed, rest) if rest else 0.0)


def between(timed: Mapping[int, float], n: int) -> float:
    """Return the seconds of `n` samples, on the line between the nearest sizes that were timed.

    Below the smallest size a micro-batch costs as much as that one: a part of it is fixed.
    """
    if n in timed:
        return timed[n]
    below = max((k for k in timed if k < n), default=None)
    above = min((k for k in timed if k > n), default=None)
    if below is None or above is None:
        nearest = above if below is None else below
        assert nearest is not None
        return timed[nearest]
    share = (n - below) / (above - below)
    return timed[below] + share * (timed[above] - timed[below])


# Search of micro-batch sizes above the largest that fits, with saved tensors offloaded.
#
# A trial costs several micro-batches, all larger than the largest that fits. So the times of
# smaller sizes first bound the possible gain. A micro-batch costs more for every sample the more
# samples it has, once the device is busy; so the line through the times is a lower bound for larger
# ones. And bytes that do not fit have to be moved out and back.
#
#     seconds     t(8) │  t(16) ─ ─ ─ ─ the line goes on ─ ─ ─ ─>  at least so many
#     bytes            │ cap        what is too much, out and back  at least so many seconds
#
# No trial if either leaves less than a twentieth of a step to be gained. Two in a row that have
# lost are two points of another line, that of offloaded ones, which bounds larger sizes: if moving
# costs much for any size, large micro-batches may still win.

GAIN = 0.05
"""Share of a step that a trial must be able to win: timings do not distinguish less."""

MOVED = 0.5
"""Share of the excess that has to move at least: the rest may be recomputed instead."""


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


# Comparison of a few close micro-batch sizes by full steps, run alternately.
#
# Sizes are timed one after another, by a micro-batch each. A shared machine changes from one to the
# next, and between its micro-batches a step does work that is in none of them: rows are cut,
# gradients added up, memory is freed and allocated again. So close sizes are run again as full
# steps, first all of them once and then all of them again:
#
#     timed        4: .31   8: .24   9: .25   16: .26   32: .40        of a step, by its micro-batch
#     duel         8: .27   9: .22   16: .25    8: .27   9: .21 ...    chosen: 9

DUEL_CLOSE = 1.2
"""Times the best, within which a size takes part."""

MOST = 3
"""Sizes that take part."""

TURNS = 2
"""Times that all of them are run."""

DUEL_LONG = 2.0
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
    close = [n for n in close if step_seconds(timed, n, size) <= DUEL_CLOSE * best]
    if best > DUEL_LONG or len(close) < 2:
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


# How a budget is shared between micro-batches and the workspace of their convolutions.
#
# Bytes of workspace buy faster algorithms and cost samples: a smaller micro-batch may be worth it,
# or not. Neither side shows which, so full plans are made for a few shares of the budget, a step of
# each is run, and the fastest is chosen.
#
#     budget  │ floor │ half of the rest │ micro-batches │ ──> plan ──> seconds
#             │ floor │ an eighth │ micro-batches        │ ──> plan ──> seconds     the fewest
#             │ floor │ micro-batches                    │ ──> plan ──> seconds
#
# Source: Zou et al. (the guide), section 3.1, "permit X_mini reduction", and Equation 6, where the
# workspace of a layer is free again when it has ended, so that their maximum counts and not their
# sum.

SHARES = (2, 8, 32)
"""Divisors of the budget above the floor, for the share of workspace."""

LEAST = 1 << 20
"""Bytes of workspace below which no share is tried."""

SHARED_GAIN = 0.98
"""Of the seconds without workspace, from which on a share is worth it: steps scatter."""


def shared(foresee: Callable[[int | None], Plan], seconds: Callable[[Plan], float]) -> Plan:
    """Return the plan with the fewest seconds per step, of a few shares of the budget.

    Args:
        foresee: workspace in bytes, or None -> the plan with it.
        seconds: runs a step of a plan, and returns its seconds.

    Raises:
        BudgetError: not even without workspace a micro-batch of one sample fits.
    """
    plain = foresee(None)
    if plain.memory is None:
        return plain
    available = plain.memory.budget - plain.memory.floor
    tried: dict[int, Plan] = {}
    for share in SHARES:
        workspace = available // share
        if workspace < LEAST:
            break
        try:
            found = foresee(workspace)
        except BudgetError:  # what is left is too little for one sample
            continue
        if found.convolutions is None or not found.convolutions.other:
            break  # with less there is no more to gain
        tried[workspace] = found
    if not tried:
        return plain
    measured = {workspace: seconds(plan) for workspace, plan in tried.items()}
    without = seconds(plain)
    best = min(measured, key=lambda workspace: (measured[workspace], workspace))
    chosen = tried[best] if measured[best] < SHARED_GAIN * without else plain
    return replace(chosen, reasons=(*chosen.reasons, _reason(without, measured)))


def _reason(without: float, measured: dict[int, float]) -> str:
    rows = [f"{show_seconds(without)} without workspace"]
    rows += [f"{show_seconds(found)} within {show_bytes(one)}" for one, found in measured.items()]
    return f"{TRIED}, and a step takes {', '.join(rows)}"
