"""Decision for one mini-batch within a budget: the fastest plan that fits, by the steps so far.

Saved tensors are resident where a step fits so, else offloaded. The first steps of a training go
different ways where that can pay (`anybatch.planner.search`). Batches of other signatures go the
fastest way so far, at the size that does as much work.

    a size fits in memory         it, or saved tensors offloaded where that was timed to be faster
    none fits, streamed           micro-batches with saved tensors offloaded
    none fits, samples meet       undivided with saved tensors offloaded, or lanes that are paged
    offloaded before              offloaded again, where the size chosen then does not fit without

Each is the choice of a module (`resident_memory`, `offload_memory`, `paged_lockstep`), and steps
decide between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf

from anybatch.core.norm import ScriptedNormError
from anybatch.errors import BudgetError, NotExactError, NotYetError, StoreError
from anybatch.execution.signature import RunPlan
from anybatch.planner.budget import Foreseen
from anybatch.planner.forecast import Forecast
from anybatch.planner.full_batch import Suffices
from anybatch.planner.memory_model import MemoryModel, PlanningRequest
from anybatch.planner.offload_memory import OffloadedSizes
from anybatch.planner.paged_lockstep import PagedLockstep
from anybatch.planner.resident_memory import ResidentSizes, in_no_cache
from anybatch.planner.search import (
    CLOSE,
    MOST,
    OF_SIZES,
    MicroBatchSearch,
    Place,
    TrialStep,
    ends,
    fastest,
    halves,
    larger,
    may_win,
)
from anybatch.planner.workspaces import Workspaces


class Decision:
    """Decision about one batch, by the findings of the search and forecasts; it adds to both."""

    def __init__(
        self,
        request: PlanningRequest,
        search: MicroBatchSearch,
        foreseen: Foreseen,
        workspaces: Workspaces,
    ) -> None:
        self._request, self._signature, self._search = request, request.signature, search
        self._foreseen, self._workspaces = foreseen, workspaces

    def made(self) -> RunPlan:
        """Return how the batch is run.

        Raises:
            BudgetError: not even a micro-batch of one sample fits.
            NotYetError: saved tensors would be offloaded, and parameters are sharded over ranks.
        """
        request, signature, search = self._request, self._signature, self._search
        way, divides = request.spill.way, search.fixed is not None and search.fixed < signature.size
        may = way != "off" and signature.trains and not (divides and request.undivided)
        if may and way in ("host", "file"):
            request.refuse_spread()
        # Chunks and tiles that suffice alone take less time than offloading beside them
        # (test_a_step_in_chunks_offloads_nothing).
        resident = (request.chunked or request.tile) and not request.offloads
        may = may and not (request.spread or resident)
        found = self._offloaded() if may and way != "auto" else None
        if found is None and may and search.keeps_offloading(signature):
            found = self._still_offloaded()
        if found is not None:
            return found
        try:
            return self._in_memory(may=may)
        except (BudgetError, NotExactError) as error:
            bound = self._bound()
            undivided = bound is not None and bound.indivisible
            if not may or undivided or isinstance(error, ScriptedNormError):
                raise
            try:
                found = self._offloaded(failed=error)
            except NotYetError as other:
                if not isinstance(error, BudgetError):
                    raise
                error.add_note(str(other))
            if found is None:
                raise
            return found

    def _in_memory(self, *, may: bool) -> RunPlan:
        """Return how a batch is run with all tensors resident, or as it `may` be faster."""
        signature, search = self._signature, self._search
        unknown = self._bound() is None
        resident = self._resident()
        offloaded = unknown and may and search.keeps_offloading(signature)
        if offloaded and (found := self._still_offloaded()) is not None:
            return found
        cap = resident.largest
        one_size = self._request.full_batch or resident.foreseen.indivisible
        one_size = one_size or signature in search.undivided
        if search.fixed is None and cap == signature.size and one_size:
            return resident.planned(cap, checked=True)
        divides = cap < signature.size or self._request.thorough
        divides |= search.most < MOST  # these steps are compared with those of an earlier search
        if not divides and self._request.on_host:
            divides = in_no_cache(resident.foreseen, signature.size)
        if self._tunes and divides:
            return self._next(resident, may=may)
        n = search.pick(signature, cap)
        n = search.without_single(n if resident.fits(n) else cap, signature)
        found = resident.planned(n, checked=True)
        if search.chosen is None and signature.trains and not signature.most:
            search.follow(TrialStep(found.micro_batch, "resident"), signature, settled=True)
        return found

    @property
    def _tunes(self) -> bool:
        """Whether steps of this signature show the fastest way to run it."""
        signature, search = self._signature, self._search
        wanted = self._request.timed and search.fixed is None
        return wanted and signature.trains and not signature.most and search.tunes(signature)

    def _next(self, resident: ResidentSizes, *, may: bool) -> RunPlan:
        """Return how the next step is run, to find the fastest way: a trial, or the one found."""
        signature, search = self._signature, self._search
        search.signature = search.signature or signature  # it begins with the first step
        every = resident.foreseen, self._request, search
        offloading, paged = OffloadedSizes(*every), PagedLockstep(*every)
        models: dict[Place, MemoryModel]
        models = {one.place: one for one in (resident, paged, offloading)}
        elsewhere = may and not signature.global_samples  # each rank has a clock of its own
        # A step may have held more than was foreseen when they were tried.
        for n in search.of("resident"):
            if not resident.fits(n):
                search.fail(TrialStep(n, "resident"))
        while True:
            trial = self._size_to_try(resident, OF_SIZES if elsewhere else search.most)
            if trial is None and elsewhere and offloading.pays(search.least_seconds):
                trial = self._elsewhere(resident.largest, offloading, paged)
            compares = self._request.compares and resident.largest < signature.size
            if trial is None and compares and self._request.may_be_chunked:
                trial = self._cold(search.of("resident"))
            start = search.without_single(resident.start, signature)
            chosen = trial or search.best() or TrialStep(start, "resident")
            n, place = chosen
            try:
                first = place == "resident" and not (trial and search.steps)
                found = models[place].planned(n, checked=first)
                break
            except (BudgetError, NotExactError, StoreError):
                if place == "resident":
                    raise
                search.fail(chosen)  # it must not leave, or there is no place where it would go
        search.trial = trial
        # The first step of a trial records what leaves, under the meter.
        search.decided += place != "resident" and chosen not in search.recorded
        rows = [*found.memory.candidates]
        for other, model in models.items():
            rows += model.rows() if other != place and search.of(other) else ()
        rows.sort(key=lambda row: (row.micro_batch, row.offloaded))
        search.follow(chosen, signature, settled=trial is None)
        memory = replace(found.memory, candidates=tuple(rows))
        return replace(found, memory=memory, trying=search.in_words())

    def _size_to_try(self, resident: ResidentSizes, most: int) -> TrialStep | None:
        """Return the next size to try with all tensors resident; None where that has ended."""
        search, cap, size = self._search, resident.largest, self._signature.size
        search.sizes = resident.start, cap, most
        untried = halves(cap, size) if self._request.thorough else []
        while True:
            untried = [n for n in untried if n not in search.of("resident")]
            first = TrialStep(untried[0], "resident") if untried else None
            trial = first or search.next("resident", *search.sizes)
            if trial is None:
                return None
            n = trial.micro_batch
            # Smaller lanes move more (test_lanes_that_move_are_the_largest).
            if first is None and n < resident.start and resident.pages:
                return None
            paired = search.without_single(n, self._signature) == n
            if paired and resident.fits(n):
                return trial
            search.fail(trial)

    def _elsewhere(
        self, cap: int, offloading: OffloadedSizes, paged: PagedLockstep
    ) -> TrialStep | None:
        """Return the next trial with tensors offloaded; None where none can be faster.

        Paged lanes are tried only where an undivided step does not win: their dry runs take longer,
        and they move more.
        """
        search, size, resident = self._search, self._signature.size, self._search.of("resident")
        seconds, misfits, full_batch = search.least_seconds, False, self._request.full_batch
        for n in [size] if full_batch else larger(cap, size):
            trial = TrialStep(n, "offloaded")
            if search.steps >= MOST or trial in search.seconds:
                continue
            lost = [s for s in search.of("offloaded").values() if s > seconds]
            lost_for_all = len(lost) > 1 or max(lost, default=0) > CLOSE * seconds
            steps = {} if full_batch else resident
            loses = lost_for_all or not may_win(steps, seconds, n, size, offloading.moving)
            if loses or (misfits and n < size):  # undivided it has no sums of gradients
                continue
            try:
                if offloading.fits(n):
                    return self._cold(steps) or trial
                misfits = True
            except NotExactError:  # what it saves must not leave
                break
        won = min(search.of("offloaded").values(), default=inf) <= seconds < inf
        if not full_batch or won or not paged.possible or search.steps >= MOST:
            return None
        trial = TrialStep(paged.largest, "paged")
        untried = trial.micro_batch > max(resident) and trial not in search.seconds
        return trial if untried else None

    def _cold(self, steps: Mapping[int, float]) -> TrialStep | None:
        """Return a size that was run once, of the two by which larger ones may be faster; or None.

        The first step of a size warms up, and two are cheaper than a trial
        (test_a_cold_size_is_run_again_before_anything_is_offloaded).
        """
        size, search = self._signature.size, self._search
        run = any(seconds < inf for seconds in steps.values())
        if not run or not may_win(steps, search.least_seconds, size, size):
            return None
        cold = (k for k in ends(steps) if search.counts("resident")[k] == 1)
        return next((TrialStep(k, "resident") for k in cold), None)

    def _resident(self) -> ResidentSizes:
        """Return the choice of a size with which a step fits in memory.

        Raises:
            BudgetError: there is none.
            NotExactError: the batch would have to be divided, and must not be.
        """
        signature = self._signature

        def choice(foreseen: Forecast, *, fresh: bool) -> ResidentSizes:
            found = ResidentSizes(self._completed(foreseen), self._request, self._search)
            found.confirmed = fresh
            found.require(self._search.fixed_for(signature))
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

    def _offloaded(self, *, failed: Exception | None = None) -> RunPlan | None:
        """Return the plan with saved tensors offloaded; None where it is no better than `failed`.

        It is the error of a step with all of them resident, and its handler raises it again: raised
        here it would hold this frame, which holds it, and the batch with both.
        """
        request, signature, search = self._request, self._signature, self._search
        foreseen, fresh = self._bound(), search.chosen is None
        if request.offloads and not self._foreseen.knows(signature):
            # A longer sample's is no bound: halves of saved tensors that left may be too small to
            # (test_shorter_samples_whose_tensors_are_too_small_to_leave_are_refused).
            foreseen = self._foresee(rounded=False)
        foreseen = self._completed(foreseen or self._foresee(rounded=True))
        offloading = OffloadedSizes(foreseen, request, search)
        n = self._offloaded_size(offloading)
        divided = max(n, 1) < signature.size or signature.global_samples
        if signature.lanes and divided and not request.undivided:
            return self._in_paged_lockstep(foreseen, failed)
        if failed is not None and ((request.full_batch and n == 0) or not offloading.saved(n)):
            return None
        least = offloading.floor(offloading.smallest) if n == 0 else 0
        if isinstance(failed, BudgetError) and failed.needed <= least:
            return None
        found = offloading.planned(n or offloading.smallest, checked=fresh)
        trying = search.in_words() if search.is_of(signature) else ""
        now = TrialStep(found.micro_batch, "offloaded")
        search.follow(now, signature, settled=not trying)
        return replace(found, trying=trying)

    def _in_paged_lockstep(self, foreseen: Forecast, failed: Exception | None) -> RunPlan | None:
        """Return the plan in lanes that are paged between kernels; None where `failed` needs less.

        Raises:
            BudgetError: it cannot be.
        """
        signature, search = self._signature, self._search
        paged = PagedLockstep(foreseen, self._request, search)
        if not paged.possible:  # on real rows one lane would have to fit first
            return None if failed is not None else self._in_memory(may=False)
        n = search.fixed_for(signature)
        if n is None:  # what has been chosen for another mini-batch is rehearsed alone
            chosen = 0 if search.chosen is None else search.pick(signature, signature.largest)
            n = chosen if chosen and paged.fits(chosen) else paged.largest or 1
        try:
            found = paged.planned(n)
        except BudgetError as error:
            if failed is not None and foreseen.peak(n, signature.size) <= error.needed:
                return None
            raise
        search.follow(TrialStep(n, "paged"), signature, settled=True)
        return found

    def _offloaded_size(self, offloading: OffloadedSizes) -> int:
        """Return the samples of a micro-batch with saved tensors offloaded; 0 where none fit."""
        signature, search = self._signature, self._search
        fixed = search.fixed_for(signature)
        if fixed is not None:
            return fixed
        cap = offloading.largest
        if cap == 0 or self._request.full_batch:
            return cap
        if not self._tunes:
            free = search.chosen is None
            return offloading.least(cap) if free else search.pick(signature, cap)
        search.signature = search.signature or signature
        search.trial = search.next("offloaded", offloading.least(cap), cap, MOST)
        return search.trial.micro_batch if search.trial else fastest(search.of("offloaded")) or cap

    def _still_offloaded(self) -> RunPlan | None:
        """Return how a batch is run where saved tensors were offloaded before, and must be again.

        None where it fits as it is in micro-batches of the size chosen then, where that is not
        clear, and where it cannot be run so either.
        """
        bound, size = self._bound(), self._signature.size
        if bound is None:
            return None
        n = size if self._request.full_batch else self._search.pick(self._signature, size)
        if self._completed(bound).largest(self._request.budget, size) >= n:
            return None
        try:
            return self._offloaded()
        except BudgetError:
            return None

    def _bound(self) -> Forecast | None:
        """Return a forecast that bounds the batch; None where there is none that suffices."""
        found = self._foreseen.bound(self._signature)
        if found is not None and found.full_batch and not self._suffices(found):
            self._foreseen.forget(full_batches=True)
            found = self._foreseen.bound(self._signature)
        return found

    def _suffices(self, full_batch: Forecast) -> bool:
        """Say whether the forecast of only the full batch decides: it fits, and is not divided."""
        request, size = self._request, self._signature.size
        wanted = request.follows and not request.thorough and request.spill.way in ("auto", "off")
        free = self._search.fixed is None and not self._signature.most
        if not (wanted and free) or self._workspaces.chooser is not None:
            return False
        if self._completed(full_batch).peak(size, size) > request.budget:
            return False
        return not in_no_cache(full_batch, size) or request.full_batch

    def _foresee(self, *, rounded: bool, suffices: Suffices | None = None) -> Forecast:
        self._search.decided += 1
        suffices = suffices if self._request.follows else None
        return self._foreseen.foresee(self._request, rounded=rounded, suffices=suffices)

    def _completed(self, foreseen: Forecast) -> Forecast:
        return self._workspaces.counted(foreseen, self._signature)
