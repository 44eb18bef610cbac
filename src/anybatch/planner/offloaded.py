"""Choice of a micro-batch size with saved tensors offloaded, and of the bytes to offload.

Smaller micro-batches send less: the same bytes hold a larger share of them. Larger ones compute
faster. So sizes are timed as they would be run, and without timing the one that sends least is
chosen. The chosen one runs dry once more on real rows, all of it offloaded, because kernels may
have workspace that no fake shows; that also measures the speed of the store.

    floor on fakes <= budget ──> sizes ──> timed ──> one ──> recorded on real rows ──> rooms, stall
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import NoReturn

from anybatch.core.absent import absent, enough
from anybatch.core.batch import count_micro_batches
from anybatch.core.links import Link
from anybatch.core.memory import Candidate, Memory
from anybatch.core.plan import OffloadPlan
from anybatch.core.units import show_bytes, show_samples
from anybatch.errors import BudgetError
from anybatch.execution.case import Case
from anybatch.execution.signature import RunPlan
from anybatch.memory.meter import STEP
from anybatch.memory.spill import Spill, clocked, maker, require_space
from anybatch.memory.stores import BLOCK, BOUNCE, Store
from anybatch.offload.chain import chained
from anybatch.offload.keeping import Keeping
from anybatch.offload.saved import SMALL
from anybatch.offload.schedule_cache import FAST
from anybatch.planner.above import MOVED
from anybatch.planner.choice import fastest, search, step_seconds
from anybatch.planner.forecast import WORKSPACE, Forecast, merged
from anybatch.planner.offloaded_step import Fitted, OffloadedStep, rehearse_offloaded
from anybatch.planner.probe import LONG, seconds

SAVED = "saved tensors"
"""The owner of resident saved tensors, where some of them are offloaded."""


class OffloadedSizes:
    """Choice of a size with saved tensors offloaded, for one signature.

    Attributes:
        foreseen: forecast of its steps.
        full_batch: the batch must not be divided.
        times: size -> seconds of a micro-batch, where it was timed.

    Args:
        foreseen: forecast of its steps.
        case: returns the real one.
        size: N_B, samples in the mini-batch.
        most: samples that a micro-batch may have.
        budget: bytes.
        source: where these come from, in words.
        spill: where saved tensors go.
        full_batch: the batch must not be divided.
        ready: is called with a size before it is timed.
    """

    def __init__(
        self,
        foreseen: Forecast,
        case: Callable[[], Case],
        size: int,
        *,
        most: int,
        budget: int,
        source: str,
        spill: Spill,
        full_batch: bool,
        ready: Callable[[int], None],
    ) -> None:
        self._ready = ready
        self.foreseen, self._case, self._size, self._most = foreseen, case, size, most
        self._budget, self._source, self._spill = budget, source, spill
        self.full_batch = full_batch
        self._steps: dict[int, OffloadedStep] = {}
        self.times: dict[int, float] = {}

    def largest(self) -> int:
        """Return the most samples that fit fully offloaded, of 1, 2, 4 ... and most; or 0."""
        if self.full_batch:
            return self._size if self._most >= self._size and self.fits(self._size) else 0
        found, n = 0, 1
        while n < self._most and self.fits(n):
            found, n = n, 2 * n
        if (n >= self._most or found == 0) and self.fits(self._most):
            return self._most
        return found

    def fits(self, n: int) -> bool:
        """Return whether micro-batches of `n` fit with all saved tensors offloaded."""
        return self.floor(n) <= self._budget

    def timed(self, cap: int) -> int:
        """Return the fastest size up to `cap`, as timed."""
        self.times = search(cap, self._size, self.seconds)
        return fastest(self.times, self._size) if self.times else cap

    @property
    def possible(self) -> bool:
        """Whether anything is large enough to offload, and a dry run can forecast it.

        It is the activations of the undivided batch, which are more than any storage of them.
        """
        owners = self.foreseen.owners(self._size, self._size)
        return self.foreseen.case is not None and owners.get(STEP, 0) >= SMALL

    def moving(self, n: int) -> float:
        """Return a lower bound on the seconds of copies in a step in micro-batches of `n`."""
        much = max(0, self.foreseen.peak(n, self._size) - self._budget)
        link, count = self._link, count_micro_batches(self._size, n)
        return MOVED * much * count * (1 / link.out + 1 / link.back)

    @cached_property
    def _link(self) -> Link:
        """How fast a few bytes have gone where saved tensors would, and returned."""
        owners = self.foreseen.owners(1, self._size)
        available = self._budget - sum(owners.values()) + owners.get(STEP, 0)
        try:
            return clocked(self._where, min(BOUNCE, max(available, BLOCK)), self._case().device)
        except OSError:  # a trial will say it
            return Link(out=FAST, back=FAST)

    def least(self, cap: int) -> int:
        """Return the size up to `cap` with the fewest bytes offloaded; the larger on a tie."""
        rehearsed = [n for n in self._steps if n <= cap and self.fits(n)]
        return min(rehearsed, key=lambda n: (self._sent(n), -n))

    def seconds(self, n: int, enough: float = LONG) -> float | None:
        """Time a micro-batch as it would be run; None where it does not fit.

        Args:
            n: samples.
            enough: seconds after which a first run is taken as it is.

        Raises:
            StoreError: the offloaded tensors do not fit in the store.
        """
        if not self.fits(n):
            return None
        require_space(self._step(n).most, self._where)
        self._ready(n)
        keeping = Keeping(self._maker(), self._case().device)
        keeping.begin(self._step(n).within(self._budget).capacity)
        try:
            return seconds(
                self._case(), self.foreseen.inspection, n, offload=keeping, enough=enough
            )
        finally:
            keeping.close()

    def candidates(self, n: int = 0) -> tuple[Candidate, ...]:
        """Return the sizes that fit with all offloaded, of those recorded so far, and `n`."""
        size, timed = self._size, self.times
        return tuple(
            Candidate(
                k,
                one.within(self._budget).predicted,
                step_seconds(timed, k, size) if k in timed else None,
                offloaded=True,
            )
            for k, one in sorted(self._steps.items())
            if k == n or one.floor <= self._budget
        )

    def planned(self, n: int, *, real: bool) -> RunPlan:
        """Return how a batch is run in micro-batches of `n`.

        Args:
            n: samples.
            real: see on real rows that they fit.

        Raises:
            BudgetError: they do not.
            StoreError: the offloaded tensors do not fit in the store.
        """
        if not self.fits(n):
            self._refuse(n)
        found = self._step(n)
        require_space(found.most, self._where)
        if real and self.foreseen.case is not None and absent() is None:
            found = self._really(n)
            self._steps[n] = found
            if found.floor > self._budget:
                self._refuse(n)
        return self._described(n, found, found.within(self._budget))

    @property
    def smallest(self) -> int:
        """Return the size that holds the least: one sample, or all, without sums of gradients."""
        if self.full_batch or self._most < self._size:
            return self._size if self.full_batch else 1
        return min((1, self._size), key=lambda n: (self.floor(n), n))

    def floor(self, n: int) -> int:
        """Return the fewest bytes in which micro-batches of `n` can be run."""
        return self._step(n).floor

    def helps(self, n: int) -> bool:
        """Return whether `n` samples have bytes to offload; 0 is the size with least memory."""
        return self._step(n or self.smallest).saved > 0

    def _refuse(self, n: int) -> NoReturn:
        """Raise an error with the bytes that micro-batches of `n` need, and a size that fits.

        Raises:
            BudgetError: always.
        """
        needed = self.floor(n)
        fits = 0 if self.full_batch else self._most_below(n)
        owners = sorted(self._step(n).all_owners.items(), key=lambda pair: -pair[1])
        listed = ", ".join(f"{name} {show_bytes(count)}" for name, count in owners)
        cut = "undivided" if n >= self._size else f"with micro-batches of {show_samples(n)}"
        smaller = f"micro_batch={fits} or less, or " if fits else ""
        workspace = "a smaller workspace, " if any(name == WORKSPACE for name, _ in owners) else ""
        raise BudgetError(
            f"a step must fit in memory, and {cut}, with all saved tensors offloaded, it needs "
            f"{show_bytes(needed)} ({listed}), and the budget is {show_bytes(self._budget)} "
            f"({self._source}): give {smaller}{enough(needed)} or more, {workspace}smaller "
            "samples, or an optimizer with less state",
            needed=needed,
            budget=self._budget,
        )

    def _most_below(self, n: int) -> int:
        """Return the most samples below `n` that fit; 0 for none."""
        low, high = 0, n
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        return low

    def _step(self, n: int) -> OffloadedStep:
        if n not in self._steps:
            fakes = self.foreseen.case
            self._steps[n] = (
                self._really(n)
                if fakes is None
                else rehearse_offloaded(self.foreseen, fakes, n, self._size)
            )
        return self._steps[n]

    def _really(self, n: int) -> OffloadedStep:
        return rehearse_offloaded(
            self.foreseen, self._case(), n, self._size, self._maker(), self._budget
        )

    @property
    def _where(self) -> str:
        return self._spill.where(self._case().device)

    def _maker(self) -> Callable[[], Store]:
        return maker(self._where, self._case().device)

    def _sent(self, n: int) -> int:
        return self._step(n).within(self._budget).sent(count_micro_batches(self._size, n))

    def _described(self, n: int, found: OffloadedStep, fitted: Fitted) -> RunPlan:
        foreseen, size, count = self.foreseen, self._size, count_micro_batches(self._size, n)
        owners = found.all_owners
        resident = fitted.predicted - sum(owners.values())
        if resident > 0:
            owners = merged(owners, {SAVED: resident})
        memory = Memory(
            budget=self._budget,
            source=self._source,
            predicted=fitted.predicted,
            owners=tuple(sorted(owners.items(), key=lambda pair: -pair[1])),
            floor=min(one.floor for one in self._steps.values()),
            undivided=foreseen.peak(size, size),
            how=f"{foreseen.how}, with all saved tensors offloaded",
            candidates=self.candidates(n),
        )
        offload = OffloadPlan(
            store=self._spill.store(self._case().device),
            folder=self._spill.folder,
            capacity=fitted.capacity,
            saved=found.saved,
            sent=fitted.sent(count),
            most=found.most,
            stall=fitted.stall(count) if found.clocked else None,
            remade=fitted.remade(count),
        )
        inspection = foreseen.inspection
        passes = partial(
            chained,
            found.stretches(fitted),
            budget=self._budget,
            most=fitted.predicted,
            clocked=found.clocked,
        )
        return RunPlan(
            n, False, memory, inspection.coupled, inspection.loss, offload=offload, passes=passes
        )
