"""Choice between resident and offloaded saved tensors where both fit, by measured seconds.

Where not even one sample fits, saved tensors are offloaded. Elsewhere they may be: then a
micro-batch can be larger than the largest that fits in memory, and a batch whose samples meet in
BatchNorm need not run in lockstep. Which is faster depends on the network, the device and the
store, so both are run, where that can pay (`anybatch.planner.above`).

    streaming    4   8   16 │                16 is the largest that fits
                            │ 32   64  128   the same with saved tensors offloaded, until that loses
    BatchNorm    lanes of 16│ lanes of 64    paged between kernels
                            │                (`anybatch.planner.paged_lockstep`)
                            │ 128            the batch undivided, with saved tensors offloaded
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, isfinite

from anybatch.core.memory import Candidate, Capacity
from anybatch.core.plan import OffloadPlan
from anybatch.errors import BudgetError, NotExactError, StoreError
from anybatch.execution.signature import RunPlan
from anybatch.planner.above import above, try_above
from anybatch.planner.choice import even, step_seconds
from anybatch.planner.offloaded import OffloadedSizes
from anybatch.planner.paged_lockstep import PagedLockstep
from anybatch.planner.resident import ResidentSizes

StepTimer = Callable[[int, Capacity, OffloadPlan | None], float | None]
"""Samples in a micro-batch, bytes of those that wait, and the offloading of the one that runs ->
seconds of a step, infinity if it runs out of memory; None if unknown."""


def faster(
    resident: ResidentSizes,
    elsewhere: tuple[OffloadedSizes, PagedLockstep] | None,
    n: int,
    size: int,
    time_step: StepTimer,
) -> RunPlan:
    """Return how a batch is run, of all ways the fastest one.

    Args:
        resident: the choice with all saved tensors in memory, timed.
        elsewhere: the choice with saved tensors offloaded, and that of lanes paged between kernels;
            None where nothing may be offloaded.
        n: the fastest size of the first.
        size: N_B, samples in the mini-batch.
        time_step: times a step.
    """
    stays = resident.planned(n)
    if not resident.times or resident.largest == size:
        return stays
    seconds: float | None = None
    if stays.lanes:
        stays, seconds = _lanes(resident, n, size, time_step)
        if seconds is None:
            return stays
    if elsewhere is None or not elsewhere[0].possible:
        return stays
    offloading, paged = elsewhere
    if seconds is None:
        return _or_offloaded(resident, offloading, stays, size, resident.of_step(n), time_step)
    wider = _wider(paged, stays.micro_batch, time_step)
    if wider is not None:
        rows = [*stays.memory.candidates, *wider[0].memory.candidates]
        floor = min(stays.memory.floor, wider[0].memory.floor)
        if wider[1] < seconds:
            stays, seconds = wider[0], wider[1]
        stays = _with_rows(stays, rows, floor)
    try:
        undivided = offloading.fits(size)
    except NotExactError:  # what it saves must not leave
        undivided = False
    return (
        _or_offloaded(resident, offloading, stays, size, seconds, time_step) if undivided else stays
    )


def _lanes(
    resident: ResidentSizes, n: int, size: int, time_step: StepTimer
) -> tuple[RunPlan, float | None]:
    """Return the fastest lanes of `n` or more samples, and the seconds of a step.

    The cost of a single micro-batch does not decide: the more of them there are, the more often
    they wait for each other. So twice as many samples are tried, for as long as that is faster. No
    seconds if they are unknown.
    """
    steps: dict[int, float] = {}
    for m in [n, *(m for m in _evenly(above(n, resident.largest), size) if m > n)]:
        found = (
            time_step(m, resident.planned(m).memory.waiting_capacity, None)
            if resident.fits(m)
            else inf
        )
        if found is None:
            return resident.planned(n), None
        steps[m] = found
        if found > min(steps.values()):
            break
    best = min(steps, key=lambda m: (steps[m], m))
    rows = {one.micro_batch: one for m in steps for one in resident.candidates(m)}
    candidates = [
        replace(one, seconds=steps[m] if isfinite(steps.get(m, inf)) else None)
        for m, one in rows.items()
    ]
    return _with_rows(
        resident.planned(best), candidates, resident.planned(best).memory.floor
    ), steps[best]


def _evenly(sizes: list[int], size: int) -> list[int]:
    """Return these sizes with micro-batches as equal as can be, each once."""
    return list(dict.fromkeys(even(size, m) for m in sizes))


def _wider(paged: PagedLockstep, n: int, time_step: StepTimer) -> tuple[RunPlan, float] | None:
    """Return lanes of more samples than `n`, and the seconds of a step; None where there are none.

    They are paged between kernels, so more fit; they meet less often, and kernels are larger.
    """
    more = paged.best() if paged.possible else 0
    if more <= n:
        return None
    try:
        found = paged.planned(more)
    except (NotExactError, StoreError):  # they must not leave, or have no room where they would go
        return None
    seconds = time_step(more, None, found.offload)
    if seconds is None:
        return None
    rows = [
        replace(one, seconds=seconds if isfinite(seconds) else None)
        for one in found.memory.candidates
        if one.micro_batch == more
    ]
    return _with_rows(found, rows, found.memory.floor), seconds


def _or_offloaded(
    resident: ResidentSizes,
    offloading: OffloadedSizes,
    stays: RunPlan,
    size: int,
    seconds: float,
    time_step: StepTimer,
) -> RunPlan:
    """Return the faster plan: `stays`, or one with saved tensors offloaded.

    Args:
        resident: as above.
        offloading: as above.
        stays: the fastest plan so far.
        size: N_B, samples in the mini-batch.
        seconds: of a step that way.
        time_step: as above.
    """
    tried = try_above(
        resident.times,
        seconds,
        [size] if offloading.full_batch else above(resident.largest, size),
        size,
        moving=offloading.moving,
        trial=lambda n, enough: _trial(offloading, n, enough),
    )
    offloading.times = resident.times | tried
    here, floor = stays.memory.candidates, stays.memory.floor
    best = min(tried, key=lambda n: (step_seconds(offloading.times, n, size), n), default=0)
    run = step_seconds(offloading.times, best, size) if best else inf
    if run < seconds:
        try:
            found = offloading.planned(best, real=True)
            again = time_step(best, None, found.offload)  # what was quick once may have been lucky
        except (BudgetError, NotExactError, StoreError):  # real rows show what fakes do not
            del offloading.times[best]
        else:
            run = run if again is None else again
            rows = [_as_run(one, best, run) for one in found.memory.candidates]
            return _with_rows(found if run < seconds else stays, [*here, *rows], floor)
    return _with_rows(stays, [*here, *offloading.candidates()], floor)


def _as_run(one: Candidate, n: int, seconds: float) -> Candidate:
    """Return the line of a candidate, with the seconds of its step if it is that one."""
    if not one.offloaded or one.micro_batch != n:
        return one
    return replace(one, seconds=seconds if isfinite(seconds) else None)


def _trial(offloading: OffloadedSizes, n: int, enough: float) -> float | None:
    try:
        return offloading.seconds(n, enough)
    except (NotExactError, StoreError):  # they must not leave, or have no room where they would go
        return None


def _with_rows(found: RunPlan, rows: list[Candidate], floor: int) -> RunPlan:
    """Return the plan with the rows of all candidates and the lower of two floors."""
    rows = sorted(rows, key=lambda one: (one.micro_batch, one.offloaded))
    memory = replace(found.memory, candidates=tuple(rows), floor=min(floor, found.memory.floor))
    return replace(found, memory=memory)
