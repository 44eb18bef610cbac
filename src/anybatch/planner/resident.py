"""Choice of a micro-batch size with all saved tensors resident.

Sizes above the largest that fits are not considered; the fastest below it is found by timing them
as they would be run.

    forecast <= budget ──> cap, rehearsed once more ──> timed ──> one

`anybatch.planner.offloaded` is the same choice where saved tensors may be offloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from anybatch.core.memory import Candidate
from anybatch.core.units import show_bytes
from anybatch.errors import BudgetError, NotExactError
from anybatch.execution.case import Case
from anybatch.execution.signature import RunPlan, Signature
from anybatch.planner.budget import budget_error
from anybatch.planner.choice import even, search, step_seconds
from anybatch.planner.describe import candidates, describe
from anybatch.planner.duel import StepSeconds, as_in_steps, chosen, duel
from anybatch.planner.forecast import Forecast
from anybatch.planner.probe import seconds


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

    def require(self, fixed: int | None, refuse_division: Callable[[], None]) -> None:
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

    def _refuse(self, refuse_division: Callable[[], None]) -> None:
        """Refuse to divide an indivisible batch, and name the bytes that it needs undivided."""
        try:
            refuse_division()
        except NotExactError as error:
            needed = self.foreseen.peak(self._signature.size, self._signature.size)
            raise NotExactError(
                f"{error}. Undivided the batch needs {show_bytes(needed)}, and the budget is "
                f"{show_bytes(self._budget)} ({self._source})"
            ) from None
