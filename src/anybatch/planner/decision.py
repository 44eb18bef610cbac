"""Decision for one mini-batch within a budget: the fastest plan that fits, by the steps so far.

Saved tensors are resident where a step fits so, else offloaded. The first steps of a training go
different ways where that can pay (`anybatch.planner.tuning`). Batches of other signatures go the
fastest way so far, at the size that does as much work.

    a size fits in memory         it, or saved tensors offloaded where that was timed to be faster
    none fits, streamed           micro-batches with saved tensors offloaded
    none fits, samples meet       undivided with saved tensors offloaded, or lanes that are paged
    offloaded before              offloaded again, where the size chosen then does not fit without

Each is the choice of a module (`resident_memory`, `offload_memory`, `paged_lockstep`), and steps
decide between them.
"""

from __future__ import annotations

from dataclasses import replace

from anybatch.core.norm import ScriptedNormError
from anybatch.errors import BudgetError, NotExactError, NotYetError, StoreError
from anybatch.execution.signature import RunPlan
from anybatch.planner.budget import Foreseen
from anybatch.planner.forecast import Forecast
from anybatch.planner.full_batch import Suffices
from anybatch.planner.memory_model import MemoryModel, PlanningRequest, Terms
from anybatch.planner.offload_memory import OffloadedSizes
from anybatch.planner.paged_lockstep import PagedLockstep
from anybatch.planner.resident_memory import ResidentSizes, in_no_cache
from anybatch.planner.tuning import (
    CLOSE,
    MOST,
    OF_SIZES,
    Place,
    Precedent,
    TrialStep,
    Tuning,
    ends,
    fastest,
    halves,
    larger,
    may_win,
)
from anybatch.planner.workspaces import Workspaces


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
        # A kernel that computes chunks is one event of a step, so what leaves beside it is not
        # foreseen (test_a_step_in_chunks_offloads_nothing).
        may = may and not (request.spread or request.chunked)
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
            bound = self._bound()
            undivided = bound is not None and bound.indivisible
            if not may or undivided or isinstance(error, ScriptedNormError):
                raise
            found = self._instead_of(error)
            if found is None:
                raise
            return found

    def _instead_of(self, failed: Exception) -> RunPlan | None:
        """Return the plan with saved tensors offloaded; None where that is no way out."""
        try:
            return self._offloaded(failed=failed)
        except NotYetError as error:
            if not isinstance(failed, BudgetError):
                raise
            failed.add_note(str(error))
        return None

    def _in_memory(self, *, may: bool) -> RunPlan:
        """Return how a batch is run with all its saved tensors on the device.

        Or without some of them where they `may` be offloaded, and that is faster.
        """
        request, signature = self._request, self._request.signature
        unknown = self._bound() is None
        resident = self._resident()
        offloaded = unknown and may and self._precedent.keeps_offloading(signature)
        if offloaded and (found := self._still_offloaded()) is not None:
            return found
        cap = resident.largest
        one_size = request.full_batch or resident.foreseen.indivisible
        one_size = one_size or signature in self._precedent.undivided
        if self._precedent.fixed is None and cap == signature.size and one_size:
            return resident.planned(cap, checked=True)
        divides = cap < signature.size or resident.worth_dividing or self._terms.thorough
        if self._tunes and divides:
            return self._next(resident, may=may)
        n = self._precedent.pick(signature, cap)
        n = self._precedent.without_single(n if resident.fits(n) else cap, signature)
        found = resident.planned(n, checked=True)
        if self._precedent.best is None and signature.trains and not signature.most:
            self._precedent.follow(
                TrialStep(found.micro_batch, "resident"), signature, settled=True
            )
        return found

    @property
    def _tunes(self) -> bool:
        """Whether steps of this signature show the fastest way to run it."""
        signature, precedent = self._request.signature, self._precedent
        wanted = self._terms.timed and precedent.fixed is None
        return wanted and signature.trains and not signature.most and precedent.tunes(signature)

    def _next(self, resident: ResidentSizes, *, may: bool) -> RunPlan:
        """Return how the next step is run, to find the fastest way: a trial, or the one found."""
        signature, foreseen = self._request.signature, resident.foreseen
        tuning = self._precedent.tuning_of(signature)
        every = foreseen, self._request, self._terms, tuning
        offloading, paged = OffloadedSizes(*every), PagedLockstep(*every)
        models: dict[Place, MemoryModel]
        models = {one.place: one for one in (resident, paged, offloading)}
        elsewhere = may and not signature.global_samples  # each rank has a clock of its own
        # A step may have held more than was foreseen when they were tried.
        for n in tuning.of("resident"):
            if not resident.fits(n):
                tuning.fail(TrialStep(n, "resident"))
        while True:
            trial = self._size_to_try(resident, tuning, OF_SIZES if elsewhere else MOST)
            if trial is None and elsewhere and offloading.pays(tuning.least_seconds):
                trial = self._elsewhere(resident.largest, tuning, offloading, paged)
            start = self._precedent.without_single(resident.start, signature)
            chosen = trial or tuning.best() or TrialStep(start, "resident")
            n, place = chosen
            try:
                first = place == "resident" and not (trial and tuning.steps)
                found = models[place].planned(n, checked=first)
                break
            except (BudgetError, NotExactError, StoreError):
                if place == "resident":
                    raise
                tuning.fail(chosen)  # it must not leave, or there is no place where it would go
        tuning.trial = trial
        # The first step of a trial records what leaves, under the meter.
        self._precedent.decided += place != "resident" and chosen not in tuning.recorded
        rows = [*found.memory.candidates]
        for other, model in models.items():
            rows += model.rows() if other != place and tuning.of(other) else ()
        rows.sort(key=lambda row: (row.micro_batch, row.offloaded))
        self._precedent.follow(chosen, signature, settled=trial is None)
        memory = replace(found.memory, candidates=tuple(rows))
        return replace(found, memory=memory, trying=tuning.in_words())

    def _size_to_try(self, resident: ResidentSizes, tuning: Tuning, most: int) -> TrialStep | None:
        """Return the next size to try with all tensors resident; None where that has ended."""
        cap, size = resident.largest, self._request.signature.size
        tuning.sizes = resident.start, cap, most
        untried = halves(cap, size) if self._terms.thorough else []
        while True:
            untried = [n for n in untried if n not in tuning.of("resident")]
            first = TrialStep(untried[0], "resident") if untried else None
            trial = first or tuning.next("resident", *tuning.sizes)
            if trial is None:
                return None
            n = trial.micro_batch
            paired = self._precedent.without_single(n, self._request.signature) == n
            if paired and resident.fits(n):
                return trial
            tuning.fail(trial)

    def _elsewhere(
        self, cap: int, tuning: Tuning, offloading: OffloadedSizes, paged: PagedLockstep
    ) -> TrialStep | None:
        """Return the next trial with tensors offloaded; None where none can be faster."""
        size, resident = self._request.signature.size, tuning.of("resident")
        seconds, misfits = tuning.least_seconds, False
        trials = [TrialStep(size, "offloaded")]
        if not offloading.full_batch:
            trials = [TrialStep(n, "offloaded") for n in larger(cap, size)]
        elif paged.possible:
            trials.insert(0, TrialStep(paged.largest, "paged"))
        for trial in trials:
            n = trial.micro_batch
            if tuning.steps >= MOST or trial in tuning.seconds:
                continue
            if trial.place == "paged":
                if n > max(resident):
                    return trial
                continue
            lost = [s for s in tuning.of("offloaded").values() if s > seconds]
            lost_for_all = len(lost) > 1 or max(lost, default=0) > CLOSE * seconds
            steps = {} if offloading.full_batch else resident
            loses = lost_for_all or not may_win(steps, seconds, n, size, offloading.moving)
            if loses or (misfits and n < size):  # undivided it has no sums of gradients
                continue
            # The first step of a size warms up, and two are cheaper than a trial
            # (test_a_cold_size_is_run_again_before_anything_is_offloaded).
            cold = [k for k in ends(steps) if tuning.counts("resident")[k] == 1] if steps else []
            try:
                if offloading.fits(n):
                    return TrialStep(cold[0], "resident") if cold else trial
                misfits = True
            except NotExactError:  # what it saves must not leave
                return None
        return None

    def _resident(self) -> ResidentSizes:
        """Return the choice of a size with which a step fits in memory.

        Raises:
            BudgetError: there is none.
            NotExactError: the batch would have to be divided, and must not be.
        """
        request, signature = self._request, self._request.signature

        def choice(foreseen: Forecast, *, fresh: bool) -> ResidentSizes:
            every = self._completed(foreseen), request, self._terms, self._tuning
            found = ResidentSizes(*every, confirmed=fresh)
            found.require(self._precedent.fixed_for(signature))
            return found

        foreseen = self._bound()
        try:
            fresh = signature.most > 0 or self._tunes
            if foreseen is None:
                foreseen = self._foresee(rounded=True, suffices=self._suffices)
                fresh |= self._foreseen.knows(signature)  # else it is a bound, of longer samples
            found = choice(foreseen, fresh=fresh)
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

    @property
    def _tuning(self) -> Tuning | None:
        """The search that steps of this signature are a part of; None where they are in none."""
        tuning = self._precedent.tuning
        return tuning if tuning is not None and tuning.is_of(self._request.signature) else None

    def _offloaded(self, *, failed: Exception | None = None) -> RunPlan | None:
        """Return the plan with saved tensors offloaded; None where it is no better than `failed`.

        It is the error of a step with all of them resident, and its handler raises it again: raised
        here it would hold this frame, which holds it, and the batch with both.
        """
        request, signature = self._request, self._request.signature
        foreseen, fresh = self._bound(), self._precedent.best is None
        if foreseen is None:
            foreseen = self._foresee(rounded=True)
        foreseen = self._completed(foreseen)
        offloading = OffloadedSizes(foreseen, request, self._terms, self._tuning)
        n = self._offloaded_size(offloading)
        divided = max(n, 1) < signature.size or signature.global_samples
        if signature.lanes and divided and not request.undivided:
            return self._in_paged_lockstep(foreseen, failed)
        if failed is not None and ((offloading.full_batch and n == 0) or not offloading.helps(n)):
            return None
        least = offloading.floor(offloading.smallest) if n == 0 else 0
        if isinstance(failed, BudgetError) and failed.needed <= least:
            return None
        found = offloading.planned(n or offloading.smallest, checked=fresh)
        trying = "" if self._tuning is None else self._tuning.in_words()
        now = TrialStep(found.micro_batch, "offloaded")
        self._precedent.follow(now, signature, settled=not trying)
        return replace(found, trying=trying)

    def _in_paged_lockstep(self, foreseen: Forecast, failed: Exception | None) -> RunPlan | None:
        """Return the plan in lanes that are paged between kernels; None where `failed` needs less.

        Raises:
            BudgetError: it cannot be.
        """
        request, signature = self._request, self._request.signature
        paged = PagedLockstep(foreseen, request, self._terms, self._tuning)
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
            n = chosen if chosen and paged.fits(chosen) else paged.largest or 1
        try:
            found = paged.planned(n)
        except BudgetError as error:
            if failed is not None and foreseen.peak(n, signature.size) <= error.needed:
                return None
            raise
        self._precedent.follow(TrialStep(n, "paged"), signature, settled=True)
        return found

    def _offloaded_size(self, offloading: OffloadedSizes) -> int:
        """Return the samples of a micro-batch with saved tensors offloaded; 0 where none fit."""
        signature = self._request.signature
        fixed = self._precedent.fixed_for(signature)
        if fixed is not None:
            return fixed
        cap = offloading.largest
        if cap == 0 or offloading.full_batch:
            return cap
        if not self._tunes:
            best = self._precedent.best
            return offloading.least(cap) if best is None else self._precedent.pick(signature, cap)
        tuning = self._precedent.tuning_of(signature)
        tuning.trial = tuning.next("offloaded", offloading.least(cap), cap, MOST)
        return tuning.trial.micro_batch if tuning.trial else fastest(tuning.of("offloaded")) or cap

    def _still_offloaded(self) -> RunPlan | None:
        """Return how a batch is run where saved tensors were offloaded before, and must be again.

        None where it fits as it is in micro-batches of the size chosen then, where that is not
        clear, and where it cannot be run so either.
        """
        request, signature = self._request, self._request.signature
        bound = self._bound()
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

    def _bound(self) -> Forecast | None:
        """Return a forecast that bounds the batch; None where there is none that suffices."""
        signature = self._request.signature
        found = self._foreseen.bound(signature)
        if found is not None and found.full_batch and not self._suffices(found):
            self._foreseen.forget(full_batches=True)
            found = self._foreseen.bound(signature)
        return found

    def _suffices(self, full_batch: Forecast) -> bool:
        """Say whether the forecast of only the full batch decides: it fits, and is not divided."""
        request, terms, size = self._request, self._terms, self._request.signature.size
        wanted = request.follows and not terms.thorough and terms.spill.way in ("auto", "off")
        free = self._precedent.fixed is None and not request.signature.most
        if not (wanted and free) or self._workspaces.chooser is not None:
            return False
        if self._completed(full_batch).peak(size, size) > terms.budget:
            return False
        return not in_no_cache(full_batch, size) or request.full_batch

    def _foresee(self, *, rounded: bool, suffices: Suffices | None = None) -> Forecast:
        request = self._request
        self._precedent.decided += 1
        return self._foreseen.foresee(
            request.signature,
            request.case(),
            request.optimizer,
            self._terms.budget,
            rounded=rounded,
            suffices=suffices if request.follows else None,
        )

    def _completed(self, foreseen: Forecast) -> Forecast:
        """Return the forecast plus the bytes that it does not contain."""
        return foreseen.completed(self._request.signature, self._workspaces.most(foreseen))
