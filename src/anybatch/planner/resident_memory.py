"""Choice of a micro-batch size with all saved tensors resident, for one signature.

    forecast <= budget ──> cap, rehearsed once more ──> a first size ──> the fastest, found by steps

`anybatch.planner.offload_memory` is the same choice where saved tensors may be offloaded, and
`anybatch.planner.paged_lockstep` that of lanes that are paged between kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

from anybatch.core.plan_sections import Candidate
from anybatch.core.units import show_bytes
from anybatch.errors import BudgetError, NotExactError
from anybatch.execution.signature import RunPlan, Signature
from anybatch.planner.budget import budget_error
from anybatch.planner.describe import candidates, describe
from anybatch.planner.forecast import Forecast
from anybatch.planner.tuning import even

CACHED = 32 << 20
"""Bytes of samples from which a smaller micro-batch may be faster on a host: they are in no cache,
and the host's allocator maps blocks of this size anew each time."""

START = 4
"""Samples of the first size on a host, at least, where so many fit."""


def in_no_cache(foreseen: Forecast, size: int) -> bool:
    """Say whether an undivided batch of `size` samples holds more than a host's caches do."""
    return foreseen.of_samples(size) > CACHED


class ResidentSizes:
    """Choice of a size with all saved tensors resident, for one signature.

    Attributes:
        foreseen: forecast of steps.

    Args:
        foreseen: forecast of its steps.
        signature: of the batch.
        budget: bytes.
        source: where these come from, in words.
        confirmed: rehearse the sizes that matter, where that costs no memory.
        host: the steps run on a host.
        seconds: samples -> seconds of a step, where some were run.
    """

    def __init__(
        self,
        foreseen: Forecast,
        signature: Signature,
        *,
        budget: int,
        source: str,
        confirmed: bool,
        host: bool,
        seconds: Mapping[int, float],
    ) -> None:
        self.foreseen, self._signature, self._host = foreseen, signature, host
        self._budget, self._source, self._confirmed = budget, source, confirmed
        self._seconds = seconds

    @cached_property
    def largest(self) -> int:
        """The most samples that fit; 0 where not even one does."""
        size, foreseen = self._signature.size, self.foreseen
        cap = min(foreseen.largest(self._budget, size), self._signature.largest)
        while self._confirmed and cap > 0 and not self._confirms(cap):
            cap = min(cap - 1, 7 * cap // 8)
        return cap

    def _confirms(self, n: int) -> bool:
        """Say whether a size fits as it is rehearsed.

        First with an accumulator, where that may fit: its plan takes one, and asks for that.
        """
        size, foreseen, budget = self._signature.size, self.foreseen, self._budget
        sums = n < size and self._signature.trains and not foreseen.inspection.lanes
        may = sums and foreseen.peak(n, size) + foreseen.gradients <= budget
        if may and foreseen.accumulator_peak(n, size, confirmed=True) <= budget:
            return True
        return foreseen.confirm(n, size) <= budget

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
            most = self._signature.largest
            raise budget_error(self._budget, self._source, self.foreseen, size, most)
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

    @property
    def start(self) -> int:
        """The size of the first step: the largest, on a host no more than its caches hold.

        Micro-batches are as equal as can be. In lockstep each costs waits, so it is the largest.
        """
        size, cap = self._signature.size, self.largest
        if self._host and not self._signature.lanes and cap < size:
            per_sample = self.foreseen.of_samples(size) / size
            cap = min(cap, max(START, int(CACHED / per_sample) if per_sample else cap))
        n = even(size, cap)
        return n if self.fits(n) else self.largest

    @property
    def worth_dividing(self) -> bool:
        """Whether smaller micro-batches may be clearly faster than the undivided batch."""
        return self._host and in_no_cache(self.foreseen, self._signature.size)

    def planned(self, n: int, *, trial: bool = False) -> RunPlan:
        """Return how a batch is run in micro-batches of `n`.

        Args:
            n: samples.
            trial: one of several steps in different sizes, all of them below one that was
                rehearsed. Default False: it is rehearsed itself.
        """
        return describe(
            self.foreseen,
            n,
            self._signature.size,
            self._seconds,
            budget=self._budget,
            source=self._source,
            trains=self._signature.trains,
            confirmed=self._confirmed and (not trial or self._signature.lanes),
        )

    def rows(self) -> tuple[Candidate, ...]:
        """Return the sizes worth a line in a plan: those of which a step was run."""
        size = self._signature.size
        return candidates(self.foreseen, self.largest, size, self._seconds, self._budget)

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
