"""Whether saved tensors leave though a step would fit without: the clock decides.

Where not even one sample fits, what autograd saves has to leave. Elsewhere it may: then a
micro-batch can be larger than the largest that fits in memory, and a batch whose samples meet in
BatchNorm need not go in lanes. Which is faster hangs on the network, the device and the store, so
both are run, where that can pay (`anybatch.above`).

    streaming    4   8   16 │                16 is the largest that fits
                            │ 32   64  128   the same with saved tensors away, until that loses
    BatchNorm    lanes of 16│ lanes of 64    that leave while they run (`anybatch.narrow`)
                            │ 128            the batch undivided, with saved tensors away

Source: Law 3 of this project's design: of the plans that fit, the fastest one measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isfinite

from anybatch._memory import Candidate
from anybatch._plan import Away
from anybatch.above import above, try_above
from anybatch.choice import fastest, step_seconds
from anybatch.errors import BudgetError, StoreError
from anybatch.kinds import Allowed
from anybatch.leaving import Leaving
from anybatch.narrow import Narrow
from anybatch.staying import Staying

InLanes = Callable[[int, int | None, Away | None], float | None]
"""Samples in a micro-batch, the room of those that wait, and what leaves of the one that runs ->
seconds of a step; None where that cannot be told."""


def faster(
    staying: Staying, leaving: Leaving, narrow: Narrow, n: int, size: int, in_lanes: InLanes
) -> Allowed:
    """Return how a batch is run, of two or three ways the fastest one.

    Args:
        staying: the choice with all saved tensors in memory, timed.
        leaving: the choice with saved tensors away.
        narrow: the choice of lanes that leave while they run.
        n: the fastest size of the first.
        size: N_B, samples in the mini-batch.
        in_lanes: times a step in lanes.
    """
    stays = staying.allowed(n)
    if not staying.times or staying.largest == size or not leaving.possible:
        return stays
    alone = step_seconds(staying.times, n, size)
    if not stays.lanes:
        return _or_away(staying, leaving, stays, size, alone)
    seconds = in_lanes(n, stays.memory.room, None)
    if seconds is None:
        return stays
    here = [_slower(one, seconds / alone) for one in staying.candidates(n)]
    stays = _told(stays, here, stays.memory.floor)
    wider = _wider(narrow, n, in_lanes)
    if wider is not None:
        rows = [*here, *wider[0].memory.candidates]
        floor = min(stays.memory.floor, wider[0].memory.floor)
        if wider[1] < seconds:
            stays, seconds = wider[0], wider[1]
        stays = _told(stays, rows, floor)
    if not leaving.fits(size):
        return stays
    return _or_away(staying, leaving, stays, size, seconds)


def _wider(narrow: Narrow, n: int, in_lanes: InLanes) -> tuple[Allowed, float] | None:
    """Return lanes of more samples than `n`, and the seconds of a step; None where there are none.

    They leave while they run, so more fit; they meet less often, and kernels are larger.
    """
    more = narrow.best() if narrow.possible else 0
    if more <= n:
        return None
    try:
        found = narrow.allowed(more)
    except StoreError:  # no room where they would go
        return None
    seconds = in_lanes(more, None, found.away)
    if seconds is None:
        return None
    rows = [
        replace(one, seconds=seconds if isfinite(seconds) else None)
        for one in found.memory.candidates
        if one.micro_batch == more
    ]
    return _told(found, rows, found.memory.floor), seconds


def _or_away(
    staying: Staying, leaving: Leaving, stays: Allowed, size: int, seconds: float
) -> Allowed:
    """Return how a batch is run: as it `stays`, or with saved tensors away.

    Args:
        staying: as above.
        leaving: as above.
        stays: the fastest way so far.
        size: N_B, samples in the mini-batch.
        seconds: of a step that way.
    """
    tried = try_above(
        staying.times,
        seconds,
        [size] if leaving.whole else above(staying.largest, size),
        size,
        moving=leaving.moving,
        trial=lambda n, enough: _trial(leaving, n, enough),
    )
    leaving.times = staying.times | tried
    here, floor = stays.memory.candidates, stays.memory.floor
    best = fastest(leaving.times, size) if not stays.lanes else size
    if best in tried and step_seconds(leaving.times, best, size) < seconds:
        try:
            found = leaving.allowed(best, real=True)
        except (BudgetError, StoreError):  # real rows show what fakes do not
            del leaving.times[best]
        else:
            return _told(found, [*here, *found.memory.candidates], floor)
    return _told(stays, [*here, *leaving.candidates()], floor)


def _trial(leaving: Leaving, n: int, enough: float) -> float | None:
    try:
        return leaving.seconds(n, enough)
    except StoreError:  # no room where they would go
        return None


def _slower(one: Candidate, times: float) -> Candidate:
    """Return a candidate that takes so many times as long; the micro-batches did not meet."""
    seconds = None if one.seconds is None else times * one.seconds
    return replace(one, seconds=seconds if seconds is not None and isfinite(seconds) else None)


def _told(found: Allowed, rows: list[Candidate], floor: int) -> Allowed:
    """Return what was found, with the lines of all candidates and the lower of two floors."""
    rows = sorted(rows, key=lambda one: (one.micro_batch, one.away))
    memory = replace(found.memory, candidates=tuple(rows), floor=min(floor, found.memory.floor))
    return replace(found, memory=memory)
