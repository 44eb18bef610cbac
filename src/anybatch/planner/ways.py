"""Ways to run a batch: as the model is, in chunks of its wide maps, or in tiles of its tokens.

Each has forecasts and a search of its own, and one of them is the present one.

    no sample fits                 the largest chunks in which one does, else the largest tiles,
                                   else, of a batch of one, the same and saved tensors offloaded
    fewer samples than all fit     chunks in which many more do, once steps have shown that larger
                                   micro-batches may be clearly faster; the clearly faster one stays

Without a clock chunks are taken at once where many more samples fit.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from dataclasses import replace

import torch

from anybatch.core.oom import release
from anybatch.errors import BudgetError
from anybatch.execution.signature import MICRO_BATCHES, RunPlan, few
from anybatch.planner.budget import Foreseen, ran_out
from anybatch.planner.decision import Decision
from anybatch.planner.forecast import Forecast
from anybatch.planner.ladder import SCALAR
from anybatch.planner.memory_model import TILES, PlanningRequest
from anybatch.planner.rehearsal import divided, unharmed
from anybatch.planner.search import CLEAR, MOST, MicroBatchSearch, may_win
from anybatch.planner.workspaces import Workspaces

FREE = ("auto", "off")
"""Ways of offloading that require none."""

IN_CHUNKS = 3
"""Steps in chunks that are timed, beside those before."""

MANY = 2
"""Times as many samples that must fit in chunks, for a batch that would fit in parts without."""

SPARED = 8
"""Chunks that a step may spare in addition to what few samples do, whose rows may fill only one."""


NO_PARTS = 0, 0, False
"""No chunks, no tiles, and nothing offloaded beside them."""


def _parts(found: RunPlan) -> tuple[int, int, bool]:
    return found.memory.chunked, found.memory.tile, found.offload is not None


class Ways:
    """Forecasts and search of the present way, and the choice of another one.

    Attributes:
        search: of the fastest micro-batch.
        foreseen: forecasts so far.
        workspaces: of convolutions.
        unchunked: forecasts and search of the model as it is, while chunks are compared with it;
            None where its seconds are out of date, too.
        parts: by whether a step trains, bytes of chunks and tokens of tiles, 0 for none; and
            whether saved tensors are offloaded, too.
    """

    def __init__(self, search: MicroBatchSearch, workspaces: Workspaces) -> None:
        self.search, self.workspaces = search, workspaces
        self.foreseen, self.parts = Foreseen(), dict[bool, tuple[int, int, bool]]()
        self._compared, self._tried = False, dict[tuple[int, int], Foreseen]()
        self.unchunked: tuple[Foreseen, MicroBatchSearch] | None = None

    def present(self, request: PlanningRequest) -> PlanningRequest:
        """Return a request in the present way."""
        chunked, tile, offloads = self.parts.get(request.signature.trains, NO_PARTS)
        return replace(request.in_chunks(chunked).in_tiles(tile), offloads=offloads)

    def take(self, found: RunPlan, *, trains: bool) -> None:
        """Make the way of a plan the present one."""
        self.parts[trains] = _parts(found)

    def decide(self, request: PlanningRequest, rungs: Collection[str]) -> RunPlan:
        """Return how a batch is run; in chunks or tiles where no sample, or fewer, fit so.

        Args:
            request: in the present way.
            rungs: "chunks" and "tiles", where these may be planned.

        Raises:
            BudgetError: not even a micro-batch of one sample fits.
        """
        try:
            return self._first_that_fits(request, rungs)
        finally:
            self._tried.clear()  # they hold fakes

    def _first_that_fits(self, request: PlanningRequest, rungs: Collection[str]) -> RunPlan:
        outside = sys.exception()
        rungs = rungs if request.spill.way in FREE else ()
        compares = self._may_compare(request, rungs)
        try:
            found = self._decided(replace(request, compares=compares))
        except BudgetError as error:
            ways = [request.in_chunks(n) for n in self._chunks(request, rungs)]
            one = self.search.fixed in (None, 1)  # else fewer may fit
            may = one and "tiles" in rungs and request.may_be_tiled
            if not (ways or may):
                raise
            release(error, outside=outside)
            failed = error
        else:
            return self._compared_with_chunks(request, found) if compares else found
        chunked = min((way.chunked for way in ways if way.chunked), default=request.chunked)
        tiled = request.in_chunks(chunked) if may else None
        try:
            return self._in_parts(request, ways, tiled, failed)
        except BudgetError as error:
            # Of more samples later steps did not find the least micro-batch again
            # (test_of_several_samples_parts_are_resident).
            one = request.signature.size == 1 and request.signature.trains
            if request.spill.way == "off" or not one:
                raise
            release(error, outside=outside)
            failed = error
        own = [request] if request.chunked or request.tile else []
        ways = [replace(way, offloads=True) for way in (*own, *ways)]
        tiled = tiled and replace(tiled, offloads=True)
        return self._in_parts(request, ways, tiled, failed)

    def _in_parts(
        self,
        request: PlanningRequest,
        ways: list[PlanningRequest],
        tiled: PlanningRequest | None,
        failed: BudgetError,
    ) -> RunPlan:
        """Return how a batch is run in the first of `ways`, or in tiles, in which a sample fits."""
        outside = sys.exception()
        try:
            found = self._best_of(request, ways, 0, failed)
        except BudgetError as error:
            if tiled is None:
                raise
            release(error, outside=outside)
            failed = error
        else:
            assert found is not None
            return found
        return self._in_tiles(tiled, failed)

    def _in_tiles(self, request: PlanningRequest, failed: BudgetError) -> RunPlan:
        """Return how a batch is run in the largest tiles in which a sample fits."""
        least = request.in_tiles(TILES[0])
        found = self._best_of(request, [least], 0, failed)
        for n in [n for n in TILES[1:] if n < min(least.longest, request.tile or least.longest)]:
            try:
                found = self._best_of(request, [request.in_tiles(n)], 0, failed)
            except BudgetError:
                break
        assert found is not None
        return found

    def _chunks(self, request: PlanningRequest, rungs: Collection[str]) -> list[int]:
        """Return the bytes of the chunks to try instead of those of the plan."""
        may = "chunks" in rungs and request.may_be_chunked
        return request.smaller_chunks(self.foreseen.bound(request.signature)) if may else []

    def _may_compare(self, request: PlanningRequest, rungs: Collection[str]) -> bool:
        """Say whether a batch that fits in parts may be run in chunks instead."""
        if self.unchunked is not None:
            return True
        trains = request.signature.trains and not request.signature.lanes
        done = self._compared or request.chunked or request.tile or self.search.fixed is not None
        return "chunks" in rungs and trains and not done

    def _compared_with_chunks(self, request: PlanningRequest, found: RunPlan) -> RunPlan:
        """Return how a batch that fits in parts is run: in chunks where many more fit so.

        Where steps are timed, they tell before whether larger micro-batches may be clearly faster.
        """
        search, size = self.search, request.signature.size
        settled = search.is_of(request.signature) and search.trial is None
        if self.unchunked is not None:
            return self._faster_of_both(request, found) if settled else found
        fits = self._most_that_fit(request)
        times = request.timed and request.follows and search.signature is not None
        if fits == size or (times and not settled):
            return found
        seconds = search.of("resident")
        if not times or may_win(seconds, search.least_seconds, size, size):
            unchunked, sizes = (self.foreseen, search), list[int]()
            if request.may_be_chunked and self._many_may_fit(request, fits):
                sizes = sorted({*request.fast_chunks}, reverse=True)
            found = self._best_of(request, map(request.in_chunks, sizes), fits, None) or found
            self.unchunked = unchunked if times and self.search is not search else None
        self._compared = True  # not before: after an interrupt the next step compares
        return found

    def _many_may_fit(self, request: PlanningRequest, fits: int) -> bool:
        """Say whether many more samples than `fits` may fit in chunks, by two small dry runs.

        A forecast takes many.
        """
        bound, every = self.foreseen.bound(request.signature), self._completed(request)
        assert bound is not None
        assert every is not None
        if not request.has_wide_maps(bound):
            return False
        size = request.signature.size
        most = min(size, max(1, MANY * fits))
        n = max(1, min(fits, size // MICRO_BATCHES))  # more would be rows beside those of the batch
        try:
            spared = _spared_in_chunks(request, bound, n)
        except Exception:  # the model's own: in chunks it may be none
            return False
        one = SPARED * request.fast_chunks[1]
        return every.peak(most, size) - spared * most / n - one <= request.budget

    def _faster_of_both(self, request: PlanningRequest, found: RunPlan) -> RunPlan:
        """Return how a batch is run that was timed in chunks, and before as the model is."""
        assert self.unchunked is not None
        (foreseen, search), self.unchunked = self.unchunked, None
        if self.search.least_seconds < CLEAR * search.least_seconds:
            return found
        search.decided = self.search.decided
        self.foreseen, self.search = foreseen, search
        self.parts[request.signature.trains] = NO_PARTS
        return self._decided(request.in_chunks(0))

    def _best_of(
        self,
        request: PlanningRequest,
        ways: Iterable[PlanningRequest],
        fits: int,
        failed: BudgetError | None,
    ) -> RunPlan | None:
        """Return how a batch is run in the first of some ways in which many more samples fit.

        None where no more fit, or the model cannot be run so. `ways` are requests in chunks or
        tiles, the largest first; `fits` the samples that fit in `request`. `failed` is its error,
        of which the least one is raised; None where there is a plan.
        """
        size, trains, found = request.signature.size, request.signature.trains, None
        bound = self.foreseen.bound(request.signature)
        missing, fakes = None, bound is None or bound.on_fakes
        if request.on_host and bound is not None and bound.case is not None:
            missing = max(SCALAR, bound.constant.get("activations", 0))
        search, best = self.search, (self.foreseen, self.search, self.parts.get(trains, NO_PARTS))
        try:
            for way in ways:
                # Chunks have forecasts of their own, whether tensors are offloaded beside or not.
                key = way.chunked, way.tile
                self.foreseen = self._tried.setdefault(key, Foreseen(missing, fakes=fakes))
                self.search.dry_runs.clear()
                self.search = search.anew()  # a size that was decided in larger chunks is no bound
                if failed is None:
                    self.search.most = MOST if search.signature is None else IN_CHUNKS
                try:
                    run_plan = self._decided(way)
                except Exception as error:  # the model's own: without chunks it may be none
                    if failed is not None and isinstance(error, BudgetError):
                        failed = min(failed, error, key=lambda one: one.needed)
                    continue
                most = self._most_that_fit(request)
                if (failed and found is None) or most >= min(size, max(1, MANY * fits)):
                    found, fits = run_plan, most
                    best = self.foreseen, self.search, _parts(run_plan)
                if fits == size:
                    break
        finally:
            self.foreseen, self.search, self.parts[trains] = best
            self.search.dry_runs.clear()  # they may be of the last way
        if found is None and failed is not None:
            raise failed from None
        return found

    def _most_that_fit(self, request: PlanningRequest) -> int:
        """Return the samples that fit in memory without offloading, by the present forecasts."""
        every, size = self._completed(request), request.signature.size
        return 0 if every is None else every.largest(request.budget, size)

    def _completed(self, request: PlanningRequest) -> Forecast | None:
        bound = self.foreseen.bound(request.signature)
        return bound and self.workspaces.counted(bound, request.signature)

    def _decided(self, request: PlanningRequest) -> RunPlan:
        decision = Decision(request, self.search, self.foreseen, self.workspaces)
        outside = sys.exception()
        try:
            found = decision.made()
            every, n = self._completed(request), found.micro_batch
            looked = 0 if every is None else every.inspection_bytes(n, request.signature.size)
            memory = replace(
                found.memory, chunked=request.chunked, tile=request.tile, inspection=looked
            )
            return replace(found, memory=memory)
        except torch.OutOfMemoryError as error:
            if request.on_host:
                raise
            release(error, outside=outside)
        raise ran_out(request.case().device, request.budget, request.source)


def _spared_in_chunks(request: PlanningRequest, bound: Forecast, n: int) -> int:
    """Return the bytes that micro-batches of `n` samples do without in the smallest chunks."""
    rows, found = n * MICRO_BATCHES, bound.inspection
    case = unharmed(bound.case or few(request.case(), rows), rows, writes=found.copies)
    chunks = (replace(case, chunked=nbytes) for nbytes in (0, 1))
    full, small = (divided(one, n, found, accumulator=False).peak for one in chunks)
    return full - small
