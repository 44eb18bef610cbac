"""Decision for one mini-batch within a budget: the fastest plan that fits, by timings so far.

Saved tensors are resident where a step fits so, else offloaded. Of the first batch both are
timed where that can pay. Later ones go the way of the first, at the size that does as much work.

    a size fits in memory         it, or saved tensors offloaded where that was timed to be faster
    none fits, streamed           micro-batches with saved tensors offloaded
    none fits, samples meet       undivided with saved tensors offloaded, or lanes that are paged
    offloaded before              offloaded again, where the size chosen then does not fit without

Each is the choice of a module (`offload_choice`, `offload_memory`, `paged_lockstep`), and the clock
decides between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from anybatch.core.norm import ScriptedNormError
from anybatch.errors import BudgetError, NotExactError, NotYetError
from anybatch.execution.signature import Case, RunPlan, Signature
from anybatch.memory.spill import Spill
from anybatch.planner.budget import Foreseen
from anybatch.planner.forecast import ASIDE, WORKSPACE, Forecast
from anybatch.planner.offload_choice import ResidentSizes, StepTimer, faster
from anybatch.planner.offload_memory import OffloadedSizes
from anybatch.planner.paged_lockstep import PagedLockstep
from anybatch.planner.search import even
from anybatch.planner.workspaces import Workspaces


@dataclass(frozen=True)
class Terms:
    """Constraints on a plan: budget, store, and whether sizes are timed.

    Attributes:
        budget: bytes.
        source: where these come from, in words.
        spill: store of offloaded tensors.
        timed: run the sizes that fit to find the fastest.
    """

    budget: int
    source: str
    spill: Spill
    timed: bool


class Decision:
    """The decision about one batch.

    Args:
        request: the batch.
        terms: its constraints.
        precedent: of earlier batches; this one adds to it.
        foreseen: the forecasts made so far; one that is missing is made.
        workspaces: of convolutions.
    """

    def __init__(
        self,
        request: PlanningRequest,
        terms: Terms,
        precedent: Precedent,
        foreseen: Foreseen,
        workspaces: Workspaces,
    ) -> None:
        self._request, self._terms, self._precedent = request, terms, precedent
        self._foreseen, self._workspaces = foreseen, workspaces

    def made(self) -> RunPlan:
        """Return how the batch is run.

        Raises:
            BudgetError: not even a micro-batch of one sample fits.
            NotYetError: saved tensors would be offloaded, and parameters are sharded over ranks.
        """
        request, signature, way = self._request, self._request.signature, self._terms.spill.way
        divides = self._precedent.fixed is not None and self._precedent.fixed < signature.size
        may = way != "off" and signature.trains and not (divides and request.undivided)
        if may and way in ("host", "file"):
            request.refuse_spread()
        may = may and not request.spread
        if may and way != "auto" and (found := self._offloaded()) is not None:
            return found
        if (
            may
            and self._precedent.keeps_offloading(signature)
            and (found := self._still_offloaded()) is not None
        ):
            return found
        try:
            return self._in_memory(may=may)
        except (BudgetError, NotExactError) as error:
            bound = self._foreseen.bound(signature)
            undivided = bound is not None and bound.indivisible
            if not may or undivided or isinstance(error, ScriptedNormError):
                raise
            found = self._offloaded(failed=error)
            if found is None:
                raise
            return found

    def _in_memory(self, *, may: bool) -> RunPlan:
        """Return how a batch is run with all its saved tensors on the device.

        Or without some of them where they `may` be offloaded, and that is faster.
        """
        request, signature = self._request, self._request.signature
        unknown = self._foreseen.bound(signature) is None
        resident = self._resident()
        offloaded = unknown and may and self._precedent.keeps_offloading(signature)
        if offloaded and (found := self._still_offloaded()) is not None:
            return found
        cap = resident.largest
        one_size = request.full_batch or resident.foreseen.indivisible
        if self._precedent.fixed is None and cap == signature.size and one_size:
            return resident.planned(cap)
        first = self._precedent.best is None and signature.trains and not signature.most
        timed = first and self._terms.timed and self._precedent.fixed is None
        n = resident.timed(request.streamed) if timed else self._precedent.pick(signature, cap)
        n = n if resident.fits(n) else cap
        if timed and not signature.global_samples:  # whose clocks would each tell another time
            foreseen = resident.foreseen
            elsewhere = (
                (self._offloading(foreseen), self._paged_lockstep(foreseen)) if may else None
            )
            found = faster(resident, elsewhere, n, signature.size, request.time_step)
        else:
            found = resident.planned(n)
        if first:
            self._precedent.sends = found.offload is not None
            self._precedent.best = found.micro_batch, signature.elements
        return found

    def _resident(self) -> ResidentSizes:
        """Return the choice of a size with which a step fits in memory.

        Raises:
            BudgetError: there is none.
            NotExactError: the batch would have to be divided, and must not be.
        """
        request, signature = self._request, self._request.signature

        def choice(foreseen: Forecast, *, fresh: bool) -> ResidentSizes:
            found = ResidentSizes(
                self._completed(foreseen),
                request.case,
                signature,
                budget=self._terms.budget,
                source=self._terms.source,
                confirmed=fresh,
                ready=partial(self._workspaces.ready, foreseen),
            )
            found.require(self._precedent.fixed_for(signature), request.refuse_division)
            return found

        foreseen = self._foreseen.bound(signature)
        try:
            fresh = foreseen is None or signature.most > 0
            found = choice(foreseen or self._foresee(rounded=True), fresh=fresh)
            # Undivided, the batch may fit as it is, and lanes are only slower
            # (test_batchnorm_is_not_divided_for_a_bound_alone).
            exact = signature.lanes and found.largest < signature.size
        except (BudgetError, NotExactError):
            if self._foreseen.knows(signature):
                raise
            exact = True  # what fits no bound may fit as it is
        if exact and not self._foreseen.knows(signature):
            found = choice(self._foresee(rounded=False), fresh=True)
        return found

    def _offloading(self, foreseen: Forecast) -> OffloadedSizes:
        """Return the choice of a size with saved tensors offloaded."""
        request = self._request
        return OffloadedSizes(
            foreseen,
            request.case,
            request.signature.size,
            most=request.signature.largest,
            budget=self._terms.budget,
            source=self._terms.source,
            spill=self._terms.spill,
            full_batch=request.full_batch,
            ready=partial(self._workspaces.ready, foreseen),
        )

    def _paged_lockstep(self, foreseen: Forecast) -> PagedLockstep:
        """Return the choice of a size for lanes that are paged between kernels."""
        request = self._request
        return PagedLockstep(
            foreseen,
            request.signature.size,
            request.case().device,
            most=request.signature.largest,
            budget=self._terms.budget,
            source=self._terms.source,
            spill=self._terms.spill,
        )

    def _offloaded(self, *, failed: Exception | None = None) -> RunPlan | None:
        """Return the plan with saved tensors offloaded; None where it is no better than `failed`.

        It is the error of a step with all of them resident, and its handler raises it again: raised
        here it would hold this frame, which holds it, and the batch with both.
        """
        request, signature = self._request, self._request.signature
        foreseen, fresh = self._foreseen.bound(signature), self._precedent.best is None
        if foreseen is None:
            foreseen = self._foresee(rounded=True)
        offloading = self._offloading(self._completed(foreseen))
        n = self._offloaded_size(offloading)
        divided = max(n, 1) < signature.size or signature.global_samples
        if signature.lanes and divided and not request.undivided:
            return self._in_paged_lockstep(offloading.foreseen, failed)
        if failed is not None and ((offloading.full_batch and n == 0) or not offloading.helps(n)):
            return None
        least = offloading.floor(offloading.smallest) if n == 0 else 0
        if isinstance(failed, BudgetError) and failed.needed <= least:
            return None
        found = offloading.planned(n or offloading.smallest, real=fresh)
        self._precedent.sent(n, signature)
        return found

    def _in_paged_lockstep(self, foreseen: Forecast, failed: Exception | None) -> RunPlan | None:
        """Return the plan in lanes that are paged between kernels; None where `failed` needs less.

        Raises:
            BudgetError: it cannot be.
        """
        signature, paged = self._request.signature, self._paged_lockstep(foreseen)
        if not paged.possible:  # on real rows one lane would have to fit first
            return None if failed is not None else self._in_memory(may=False)
        fixed = self._precedent.fixed_for(signature)
        if fixed is not None:
            n = fixed
        else:  # what has been chosen for another mini-batch is rehearsed alone
            chosen = (
                0
                if self._precedent.best is None
                else self._precedent.pick(signature, signature.largest)
            )
            n = chosen if chosen and paged.fits(chosen) else paged.best() or 1
        try:
            found = paged.planned(n)
        except BudgetError as error:
            if failed is not None and foreseen.peak(n, signature.size) <= error.needed:
                return None
            raise
        self._precedent.sent(n, signature)
        return found

    def _offloaded_size(self, offloading: OffloadedSizes) -> int:
        """Return the samples of a micro-batch with saved tensors offloaded; 0 where none fit."""
        signature = self._request.signature
        fixed = self._precedent.fixed_for(signature)
        if fixed is not None:
            return fixed
        cap = offloading.largest()
        if cap == 0 or offloading.full_batch:
            return cap
        if self._precedent.best is None:
            return offloading.timed(cap) if self._terms.timed else offloading.least(cap)
        return self._precedent.pick(signature, cap)

    def _still_offloaded(self) -> RunPlan | None:
        """Return how a batch is run where saved tensors were offloaded before, and must be again.

        None where it fits as it is in micro-batches of the size chosen then, where that is not
        clear, and where it cannot be run so either.
        """
        request, signature = self._request, self._request.signature
        bound = self._foreseen.bound(signature)
        if bound is None:
            return None
        n = (
            signature.size
            if request.full_batch
            else self._precedent.pick(signature, signature.size)
        )
        if self._completed(bound).largest(self._terms.budget, signature.size) >= n:
            return None
        try:
            return self._offloaded()
        except BudgetError:
            return None

    def _foresee(self, *, rounded: bool) -> Forecast:
        request = self._request
        self._precedent.decided += 1
        return self._foreseen.foresee(
            request.signature,
            request.case(),
            request.optimizer,
            self._terms.budget,
            rounded=rounded,
        )

    def _completed(self, foreseen: Forecast) -> Forecast:
        """Return the forecast plus the bytes that it does not contain."""
        return completed(foreseen, self._request.signature, self._workspaces.most(foreseen))


def completed(foreseen: Forecast, signature: Signature, workspace: int) -> Forecast:
    """Return the forecast plus samples of all ranks, gradients before the step, and workspace."""
    foreseen = replace(foreseen, global_samples=signature.global_samples)
    foreseen = foreseen.with_more(WORKSPACE, workspace) if workspace else foreseen
    return foreseen.with_more(ASIDE, signature.before) if signature.before else foreseen


# Planning request: one mini-batch, its signature, and the queries about it.
#
# A planner gets questions, not answers: rehearsing a case, trying whether a batch may be divided
# and timing a step in lanes all cost something, so each is done when a decision hangs on it.


@dataclass(frozen=True)
class PlanningRequest:
    """Planning request for one mini-batch.

    Attributes:
        signature: of the batch.
        case: returns the case of a dry run.
        optimizer: its state counts, as it will be.
        refuse_division: raises where the batch must not be divided.
        time_step: times a full step of it.
    """

    signature: Signature
    case: Callable[[], Case]
    optimizer: torch.optim.Optimizer | None
    refuse_division: Callable[[], object]
    time_step: StepTimer

    @cached_property
    def full_batch(self) -> bool:
        """Whether micro-batches that know nothing of each other would be another training."""
        return self.signature.lanes or self.undivided

    def streamed(self, n: int) -> float | None:
        """Return the seconds of a resident step in micro-batches of `n`, one after another."""
        return self.time_step(n, None, None)

    @property
    def spread(self) -> bool:
        """Whether the parameters are, over ranks."""
        return self.signature.global_samples > 0 and self.case().sharded is not None

    def refuse_spread(self) -> None:
        """Refuse to offload saved tensors where parameters are sharded over ranks.

        Raises:
            NotYetError: they are.
        """
        if self.spread:
            raise NotYetError(
                "saved tensors cannot be offloaded today where parameters are sharded over ranks: "
                'plan with offload="off", or without sharding'
            )

    @cached_property
    def undivided(self) -> bool:
        """Whether the batch must not be divided."""
        try:
            self.refuse_division()
        except NotExactError:
            return True
        return False


# Decisions of earlier batches that later ones follow, at any signature.
#
# Only the first batch is timed. Later ones keep the number of elements in a micro-batch: of samples
# half as large, twice as many. If saved tensors were offloaded, they may be again.
#
#     timed: 8 samples of 512 elements ──> 16 of 256, 4 of 1024


@dataclass
class Precedent:
    """How batches are run.

    Attributes:
        fixed: required samples in a micro-batch; None (default) chooses.
        best: samples in the micro-batch chosen first, and elements of each; None (default) before.
        sends: whether saved tensors were offloaded.
        decided: forecasts made, and decisions of a plan that was given.
    """

    fixed: int | None = None
    best: tuple[int, int] | None = None
    sends: bool = False
    decided: int = 0

    def sent(self, n: int, signature: Signature) -> None:
        """Record saved tensors as offloaded in micro-batches of `n`; the first size is stored."""
        self.sends = True
        if self.best is None:
            self.best = n, signature.elements

    def keeps_offloading(self, signature: Signature) -> bool:
        """Return whether saved tensors are offloaded as before: not under another plan."""
        return self.sends and not signature.most

    def fixed_for(self, signature: Signature) -> int | None:
        """Return the required samples of a micro-batch; None where the size is free."""
        return None if self.fixed is None else min(self.fixed, signature.largest)

    def pick(self, signature: Signature, cap: int) -> int:
        """Return a size up to `cap` that does as much work at once as the first one chosen did."""
        if self.fixed is not None:
            return min(self.fixed, cap)
        if self.best is None:
            return even(signature.size, cap)
        n, elements = self.best
        if elements == signature.elements:
            return min(cap, n)
        return max(1, min(cap, round(n * elements / max(signature.elements, 1))))
