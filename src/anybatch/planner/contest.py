"""Choice between resident and offloaded saved tensors where both fit, by measured seconds.

Where not even one sample fits, what autograd saves has to leave. Elsewhere it may: then a
micro-batch can be larger than the largest that fits in memory, and a batch whose samples meet in
BatchNorm need not go in lanes. Which is faster hangs on the network, the device and the store, so
both are run, where that can pay (`anybatch.planner.above`).

    streaming    4   8   16 │                16 is the largest that fits
                            │ 32   64  128   the same with saved tensors away, until that loses
    BatchNorm    lanes of 16│ lanes of 64    that leave while they run (`anybatch.planner.narrow`)
                            │ 128            the batch undivided, with saved tensors away

Source: Law 3 of this project's design: of the plans that fit, the fastest one measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, isfinite

from anybatch.core.memory import Candidate, Room
from anybatch.core.plan import Away
from anybatch.errors import BudgetError, NotExactError, StoreError
from anybatch.execution.kinds import Allowed
from anybatch.planner.above import above, try_above
from anybatch.planner.choice import even, step_seconds
from anybatch.planner.leaving import Leaving
from anybatch.planner.narrow import Narrow
from anybatch.planner.staying import Staying

StepTimer = Callable[[int, Room, Away | None], float | None]
"""Samples in a micro-batch, the room of those that wait, and what leaves of the one that runs ->
seconds of a step, infinitely many where it runs out of memory; None where they cannot be told."""


def faster(
    staying: Staying,
    elsewhere: tuple[Leaving, Narrow] | None,
    n: int,
    size: int,
    time_step: StepTimer,
) -> Allowed:
    """Return how a batch is run, of all ways the fastest one.

    Args:
        staying: the choice with all saved tensors in memory, timed.
        elsewhere: the choice with saved tensors away, and that of lanes that leave while they run;
            None where nothing may leave.
        n: the fastest size of the first.
        size: N_B, samples in the mini-batch.
        time_step: times a step.
    """
    stays = staying.allowed(n)
    if not staying.times or staying.largest == size:
        return stays
    seconds: float | None = None
    if stays.lanes:
        stays, seconds = _lanes(staying, n, size, time_step)
        if seconds is None:
            return stays
    if elsewhere is None or not elsewhere[0].possible:
        return stays
    leaving, narrow = elsewhere
    if seconds is None:
        return _or_away(staying, leaving, stays, size, staying.of_step(n), time_step)
    wider = _wider(narrow, stays.micro_batch, time_step)
    if wider is not None:
        rows = [*stays.memory.candidates, *wider[0].memory.candidates]
        floor = min(stays.memory.floor, wider[0].memory.floor)
        if wider[1] < seconds:
            stays, seconds = wider[0], wider[1]
        stays = _told(stays, rows, floor)
    try:
        undivided = leaving.fits(size)
    except NotExactError:  # what it saves must not leave
        undivided = False
    return _or_away(staying, leaving, stays, size, seconds, time_step) if undivided else stays


def _lanes(
    staying: Staying, n: int, size: int, time_step: StepTimer
) -> tuple[Allowed, float | None]:
    """Return the fastest lanes of `n` or more samples, and the seconds of a step.

    What a micro-batch costs alone does not tell: the more of them there are, the more often they
    wait for each other. So twice as many are tried, for as long as that pays. No seconds where
    they cannot be told.
    """
    steps: dict[int, float] = {}
    for m in [n, *(m for m in _evenly(above(n, staying.largest), size) if m > n)]:
        found = time_step(m, staying.allowed(m).memory.room, None) if staying.fits(m) else inf
        if found is None:
            return staying.allowed(n), None
        steps[m] = found
        if found > min(steps.values()):
            break
    best = min(steps, key=lambda m: (steps[m], m))
    rows = {one.micro_batch: one for m in steps for one in staying.candidates(m)}
    told = [
        replace(one, seconds=steps[m] if isfinite(steps.get(m, inf)) else None)
        for m, one in rows.items()
    ]
    return _told(staying.allowed(best), told, staying.allowed(best).memory.floor), steps[best]


def _evenly(sizes: list[int], size: int) -> list[int]:
    """Return these sizes with micro-batches as equal as can be, each once."""
    return list(dict.fromkeys(even(size, m) for m in sizes))


def _wider(narrow: Narrow, n: int, time_step: StepTimer) -> tuple[Allowed, float] | None:
    """Return lanes of more samples than `n`, and the seconds of a step; None where there are none.

    They leave while they run, so more fit; they meet less often, and kernels are larger.
    """
    more = narrow.best() if narrow.possible else 0
    if more <= n:
        return None
    try:
        found = narrow.allowed(more)
    except (NotExactError, StoreError):  # they must not leave, or have no room where they would go
        return None
    seconds = time_step(more, None, found.away)
    if seconds is None:
        return None
    rows = [
        replace(one, seconds=seconds if isfinite(seconds) else None)
        for one in found.memory.candidates
        if one.micro_batch == more
    ]
    return _told(found, rows, found.memory.floor), seconds


def _or_away(
    staying: Staying,
    leaving: Leaving,
    stays: Allowed,
    size: int,
    seconds: float,
    time_step: StepTimer,
) -> Allowed:
    """Return the faster plan: `stays`, or one with saved tensors offloaded.

    Args:
        staying: as above.
        leaving: as above.
        stays: the fastest way so far.
        size: N_B, samples in the mini-batch.
        seconds: of a step that way.
        time_step: as above.
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
    best = min(tried, key=lambda n: (step_seconds(leaving.times, n, size), n), default=0)
    run = step_seconds(leaving.times, best, size) if best else inf
    if run < seconds:
        try:
            found = leaving.allowed(best, real=True)
            whole = time_step(best, None, found.away)  # what was quick once may have been lucky
        except (BudgetError, NotExactError, StoreError):  # real rows show what fakes do not
            del leaving.times[best]
        else:
            run = run if whole is None else whole
            rows = [_as_run(one, best, run) for one in found.memory.candidates]
            return _told(found if run < seconds else stays, [*here, *rows], floor)
    return _told(stays, [*here, *leaving.candidates()], floor)


def _as_run(one: Candidate, n: int, seconds: float) -> Candidate:
    """Return the line of a candidate, with the seconds of its step if it is that one."""
    if not one.away or one.micro_batch != n:
        return one
    return replace(one, seconds=seconds if isfinite(seconds) else None)


def _trial(leaving: Leaving, n: int, enough: float) -> float | None:
    try:
        return leaving.seconds(n, enough)
    except (NotExactError, StoreError):  # they must not leave, or have no room where they would go
        return None


def _told(found: Allowed, rows: list[Candidate], floor: int) -> Allowed:
    """Return the plan with the rows of all candidates and the lower of two floors."""
    rows = sorted(rows, key=lambda one: (one.micro_batch, one.away))
    memory = replace(found.memory, candidates=tuple(rows), floor=min(floor, found.memory.floor))
    return replace(found, memory=memory)
