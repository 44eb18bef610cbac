"""Choice of a micro-batch size with saved tensors resident, and its comparison with offloading.

Where not even one sample fits, saved tensors are offloaded. Elsewhere they may be: then a
micro-batch can be larger than the largest that fits in memory, and a batch whose samples meet in
BatchNorm need not run in lockstep. Which is faster depends on the network, the device and the
store, so both are run, where that can pay (`anybatch.planner.search`).

    streaming    4   8   16 │                16 is the largest that fits
                            │ 32   64  128   the same with saved tensors offloaded, until that loses
    BatchNorm    lanes of 16│ lanes of 64    paged between kernels
                            │                (`anybatch.planner.paged_lockstep`)
                            │ 128            the batch undivided, with saved tensors offloaded
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from math import inf, isfinite

from anybatch.core.plan import OffloadPlan
from anybatch.core.plan_sections import Candidate, Capacity
from anybatch.core.units import show_bytes
from anybatch.errors import BudgetError, NotExactError, StoreError
from anybatch.execution.signature import Case, RunPlan, Signature
from anybatch.planner.budget import budget_error
from anybatch.planner.describe import candidates, describe
from anybatch.planner.forecast import Forecast
from anybatch.planner.offload_memory import OffloadedSizes
from anybatch.planner.paged_lockstep import PagedLockstep
from anybatch.planner.probe import seconds
from anybatch.planner.search import (
    StepSeconds,
    above,
    as_in_steps,
    chosen,
    duel,
    even,
    search,
    step_seconds,
    try_above,
)

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


# Choice of a micro-batch size with all saved tensors resident.
#
# Sizes above the largest that fits are not considered; the fastest below it is found by timing them
# as they would be run.
#
#     forecast <= budget ──> cap, rehearsed once more ──> timed ──> one
#
# `anybatch.planner.offload_memory` is the same choice where saved tensors may be offloaded.


class ResidentSizes:
    """Choice of a size with all saved tensors resident, for one signature.

    Attributes:
        foreseen: forecast of steps.
        times: size -> seconds of a micro-batch, where it was timed.
        steps: size -> seconds of a full step, if that was run.

    Args:
        foreseen: forecast of its steps.
        case: returns the real one.
        signature: of the batch.
        budget: bytes.
        source: where these come from, in words.
        confirmed: rehearse the sizes that matter, where that costs no memory.
        ready: is called with a size before it is timed.
    """

    def __init__(
        self,
        foreseen: Forecast,
        case: Callable[[], Case],
        signature: Signature,
        *,
        budget: int,
        source: str,
        confirmed: bool,
        ready: Callable[[int], None],
    ) -> None:
        self._ready = ready
        self.foreseen, self._case, self._signature = foreseen, case, signature
        self._budget, self._source, self._confirmed = budget, source, confirmed
        self.times: dict[int, float] = {}
        self.steps: dict[int, float] = {}

    @cached_property
    def largest(self) -> int:
        """The most samples that fit; 0 where not even one does."""
        size, foreseen = self._signature.size, self.foreseen
        cap = min(foreseen.largest(self._budget, size), self._signature.largest)
        while self._confirmed and cap > 0 and foreseen.confirm(cap, size) > self._budget:
            cap = min(cap - 1, 7 * cap // 8)
        return cap

    def require(self, fixed: int | None, refuse_division: Callable[[], object]) -> None:
        """Require that a step fits, in micro-batches of `fixed` samples if that is set.

        Raises:
            NotExactError: it would have to be divided, and must not be.
            BudgetError: it does not fit.
        """
        size, cap = self._signature.size, self.largest
        if cap < size:
            self._refuse(refuse_division)
        if cap == 0:
            raise budget_error(self._budget, self._source, self.foreseen, size)
        n = cap if fixed is None else min(fixed, size)
        if n != cap and (n > cap or not self.fits(n)):
            needed = self.foreseen.peak(n, size)
            raise BudgetError(
                f"a step must fit in memory, and micro-batches of {fixed} samples need "
                f"{show_bytes(needed)} of {show_bytes(self._budget)} ({self._source}): give "
                f"micro_batch={cap}{' or less' if n > cap else ''}, or leave it out",
                needed=needed,
                budget=self._budget,
            )

    def fits(self, n: int) -> bool:
        """Say whether a size does: sums of gradients may cost more than dividing a batch saves."""
        return self.foreseen.peak(n, self._signature.size) <= self._budget

    def timed(self, step: StepSeconds) -> int:
        """Return the fastest size, as timed; close sizes are compared by full steps.

        Args:
            step: times one. Not used here for lockstep, whose cost is in the waits.
        """
        size = self._signature.size
        times = search(self.largest, size, self.seconds)
        if not times:
            return even(size, self.largest)
        self.steps = {} if self._signature.lanes else duel(times, size, step)
        self.times = as_in_steps(times, self.steps, size)
        return chosen(self.times, self.steps, size)

    def of_step(self, n: int) -> float:
        """Return the seconds of a step in micro-batches of `n`, one of those that were timed."""
        return self.steps.get(n, step_seconds(self.times, n, self._signature.size))

    def seconds(self, n: int) -> float | None:
        """Time a micro-batch as it would be run; None where it does not fit."""
        if not self.fits(n):
            return None
        self._ready(n)
        signature, foreseen = self._signature, self.foreseen
        accumulator = not signature.lanes and n < signature.size
        accumulator = (
            accumulator
            and foreseen.accumulator_peak(n, signature.size, confirmed=False) <= self._budget
        )
        return seconds(self._case(), foreseen.inspection, n, accumulator=accumulator)

    def planned(self, n: int) -> RunPlan:
        """Return how a batch is run in micro-batches of `n`."""
        found = describe(
            self.foreseen,
            n,
            self._signature.size,
            self.times,
            budget=self._budget,
            source=self._source,
            trains=self._signature.trains,
            confirmed=self._confirmed,
        )
        rows = tuple(map(self._as_run, found.memory.candidates))
        return replace(found, memory=replace(found.memory, candidates=rows))

    def candidates(self, n: int) -> tuple[Candidate, ...]:
        """Return the sizes worth a line in a plan, `n` among them."""
        rows = candidates(self.foreseen, n, self._signature.size, self.times, self._budget)
        return tuple(map(self._as_run, rows))

    def _as_run(self, row: Candidate) -> Candidate:
        return replace(row, seconds=self.steps.get(row.micro_batch, row.seconds))

    def _refuse(self, refuse_division: Callable[[], object]) -> None:
        """Refuse to divide an indivisible batch, and name the bytes that it needs undivided."""
        try:
            refuse_division()
        except NotExactError as error:
            needed = self.foreseen.peak(self._signature.size, self._signature.size)
            raise NotExactError(
                f"{error}. Undivided the batch needs {show_bytes(needed)}, and the budget is "
                f"{show_bytes(self._budget)} ({self._source})"
            ) from None
