"""Decision for one mini-batch within a budget: the fastest plan that fits, by timings so far.

Saved tensors stay in memory where a step fits so; else they leave. Of the first batch both are
timed where that can pay. Later ones go the way of the first, at the size that does as much work.

    a size fits in memory         it, or saved tensors away where that was timed to be faster
    none fits, streamed           micro-batches with saved tensors away
    none fits, samples meet       undivided with saved tensors away, or lanes that leave as they run
    they left before              away again, where the size chosen then does not fit without

Each is the choice of a module of its own (`anybatch.planner.staying`, `anybatch.planner.leaving`,
`anybatch.planner.narrow`), and the clock decides between them (`anybatch.planner.contest`).

Source: design of this project, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from anybatch.core.norm.counters import ScriptedNormError
from anybatch.errors import BudgetError, NotExactError
from anybatch.execution.kinds import Allowed, Kind
from anybatch.memory.spill import Spill
from anybatch.planner.asked import Asked
from anybatch.planner.contest import faster
from anybatch.planner.forecast import ASIDE, WORKSPACE, Forecast
from anybatch.planner.foreseen import Foreseen
from anybatch.planner.leaving import Leaving
from anybatch.planner.narrow import Narrow
from anybatch.planner.precedent import Precedent
from anybatch.planner.staying import Staying
from anybatch.planner.workspaces import Workspaces


@dataclass(frozen=True)
class Terms:
    """Constraints on a plan: budget, store, and whether sizes are timed.

    Attributes:
        budget: bytes.
        source: where these come from, in words.
        spill: where saved tensors may go.
        timed: run the sizes that fit to find the fastest.
    """

    budget: int
    source: str
    spill: Spill
    timed: bool


class Decision:
    """The decision about one batch.

    Args:
        asked: the batch.
        terms: what it has to keep to.
        precedent: of earlier batches; this one adds to it.
        foreseen: the forecasts made so far; one that is missing is made.
        workspaces: of convolutions.
    """

    def __init__(
        self,
        asked: Asked,
        terms: Terms,
        precedent: Precedent,
        foreseen: Foreseen,
        workspaces: Workspaces,
    ) -> None:
        self._asked, self._terms, self._precedent = asked, terms, precedent
        self._foreseen, self._workspaces = foreseen, workspaces

    def made(self) -> Allowed:
        """Return how the batch is run.

        Raises:
            BudgetError: not even a micro-batch of one sample fits.
            NotYetError: saved tensors have to leave, and the parameters are spread over ranks.
        """
        asked, kind, way = self._asked, self._asked.kind, self._terms.spill.way
        divides = self._precedent.fixed is not None and self._precedent.fixed < kind.size
        may = way != "off" and kind.trains and not (divides and asked.undivided)
        if may and way in ("host", "file"):
            asked.refuse_spread()
        may = may and not asked.spread
        if may and way != "auto" and (found := self._away()) is not None:
            return found
        if may and self._precedent.keeps_away(kind) and (found := self._still_away()) is not None:
            return found
        try:
            return self._in_memory(may=may)
        except (BudgetError, NotExactError) as error:
            bound = self._foreseen.bound(kind)
            undivided = bound is not None and bound.indivisible
            if not may or undivided or isinstance(error, ScriptedNormError):
                raise
            found = self._away(failed=error)
            if found is None:
                raise
            return found

    def _in_memory(self, *, may: bool) -> Allowed:
        """Return how a batch is run with all its saved tensors on the device.

        Or without some of them where they `may` leave, and that is faster.
        """
        asked, kind = self._asked, self._asked.kind
        unknown = self._foreseen.bound(kind) is None
        staying = self._staying()
        away = unknown and may and self._precedent.keeps_away(kind)
        if away and (found := self._still_away()) is not None:
            return found
        cap = staying.largest
        one_size = asked.whole or staying.foreseen.indivisible
        if self._precedent.fixed is None and cap == kind.size and one_size:
            return staying.allowed(cap)
        first = self._precedent.best is None and kind.trains and not kind.most
        timed = first and self._terms.timed and self._precedent.fixed is None
        n = staying.timed(asked.streamed) if timed else self._precedent.pick(kind, cap)
        n = n if staying.fits(n) else cap
        if timed and not kind.everyone:  # whose clocks would each tell another time
            foreseen = staying.foreseen
            elsewhere = (self._leaving(foreseen), self._narrow(foreseen)) if may else None
            found = faster(staying, elsewhere, n, kind.size, asked.time_step)
        else:
            found = staying.allowed(n)
        if first:
            self._precedent.sends = found.away is not None
            self._precedent.best = found.micro_batch, kind.elements
        return found

    def _staying(self) -> Staying:
        """Return the choice of a size with which a step fits in memory.

        Raises:
            BudgetError: there is none.
            NotExactError: the batch would have to be divided, and must not be.
        """
        asked, kind = self._asked, self._asked.kind

        def choice(foreseen: Forecast, *, fresh: bool) -> Staying:
            found = Staying(
                self._beside(foreseen),
                asked.case,
                kind,
                budget=self._terms.budget,
                source=self._terms.source,
                confirmed=fresh,
                ready=partial(self._workspaces.ready, foreseen),
            )
            found.require(self._precedent.fixed_for(kind), asked.refuse_division)
            return found

        foreseen = self._foreseen.bound(kind)
        try:
            fresh = foreseen is None or kind.most > 0
            found = choice(foreseen or self._foresee(rounded=True), fresh=fresh)
            # Undivided it may fit as it is, and there lanes are only slower.
            exact = kind.lanes and found.largest < kind.size
        except (BudgetError, NotExactError):
            if self._foreseen.knows(kind):
                raise
            exact = True  # what fits no bound may fit as it is
        if exact and not self._foreseen.knows(kind):
            found = choice(self._foresee(rounded=False), fresh=True)
        return found

    def _leaving(self, foreseen: Forecast) -> Leaving:
        """Return the choice of a size with saved tensors offloaded."""
        asked = self._asked
        return Leaving(
            foreseen,
            asked.case,
            asked.kind.size,
            most=asked.kind.largest,
            budget=self._terms.budget,
            source=self._terms.source,
            spill=self._terms.spill,
            whole=asked.whole,
            ready=partial(self._workspaces.ready, foreseen),
        )

    def _narrow(self, foreseen: Forecast) -> Narrow:
        """Return the choice of a size for lanes that are paged between kernels."""
        asked = self._asked
        return Narrow(
            foreseen,
            asked.kind.size,
            asked.case().device,
            most=asked.kind.largest,
            budget=self._terms.budget,
            source=self._terms.source,
            spill=self._terms.spill,
        )

    def _away(self, *, failed: Exception | None = None) -> Allowed | None:
        """Return the plan with saved tensors offloaded; None where it is no better than `failed`.

        It is the error of a step with all of them resident, and its handler raises it again: raised
        here it would hold this frame, which holds it, and the batch with both.
        """
        asked, kind = self._asked, self._asked.kind
        foreseen, fresh = self._foreseen.bound(kind), self._precedent.best is None
        if foreseen is None:
            foreseen = self._foresee(rounded=True)
        leaving = self._leaving(self._beside(foreseen))
        n = self._size_away(leaving)
        divided = max(n, 1) < kind.size or kind.everyone
        if kind.lanes and divided and not asked.undivided:
            return self._in_narrow_lanes(leaving.foreseen, failed)
        if failed is not None and ((leaving.whole and n == 0) or not leaving.helps(n)):
            return None
        least = leaving.floor(leaving.smallest) if n == 0 else 0
        if isinstance(failed, BudgetError) and failed.needed <= least:
            return None
        found = leaving.allowed(n or leaving.smallest, real=fresh)
        self._precedent.sent(n, kind)
        return found

    def _in_narrow_lanes(self, foreseen: Forecast, failed: Exception | None) -> Allowed | None:
        """Return the plan in lanes that are paged between kernels; None where `failed` needs less.

        Raises:
            BudgetError: it cannot be.
        """
        kind, narrow = self._asked.kind, self._narrow(foreseen)
        if not narrow.possible:  # on real rows one lane would have to fit first
            return None if failed is not None else self._in_memory(may=False)
        fixed = self._precedent.fixed_for(kind)
        if fixed is not None:
            n = fixed
        else:  # what has been chosen for another mini-batch is rehearsed alone
            known = 0 if self._precedent.best is None else self._precedent.pick(kind, kind.largest)
            n = known if known and narrow.fits(known) else narrow.best() or 1
        try:
            found = narrow.allowed(n)
        except BudgetError as error:
            if failed is not None and foreseen.peak(n, kind.size) <= error.needed:
                return None
            raise
        self._precedent.sent(n, kind)
        return found

    def _size_away(self, leaving: Leaving) -> int:
        """Return the samples of a micro-batch with saved tensors offloaded; 0 where none fit."""
        kind = self._asked.kind
        fixed = self._precedent.fixed_for(kind)
        if fixed is not None:
            return fixed
        cap = leaving.largest()
        if cap == 0 or leaving.whole:
            return cap
        if self._precedent.best is None:
            return leaving.timed(cap) if self._terms.timed else leaving.least(cap)
        return self._precedent.pick(kind, cap)

    def _still_away(self) -> Allowed | None:
        """Return how a batch is run where saved tensors have left before, and have to again.

        None where it fits as it is in micro-batches of the size chosen then, where that is not
        known, and where it cannot be run so either.
        """
        asked, kind = self._asked, self._asked.kind
        bound = self._foreseen.bound(kind)
        if bound is None:
            return None
        n = kind.size if asked.whole else self._precedent.pick(kind, kind.size)
        if self._beside(bound).largest(self._terms.budget, kind.size) >= n:
            return None
        try:
            return self._away()
        except BudgetError:
            return None

    def _foresee(self, *, rounded: bool) -> Forecast:
        asked = self._asked
        self._precedent.decided += 1
        return self._foreseen.foresee(
            asked.kind, asked.case(), asked.optimizer, self._terms.budget, rounded=rounded
        )

    def _beside(self, foreseen: Forecast) -> Forecast:
        """Return the forecast plus the bytes that it does not contain."""
        return beside(foreseen, self._asked.kind, self._workspaces.most(foreseen))


def beside(foreseen: Forecast, kind: Kind, workspace: int) -> Forecast:
    """Return the forecast plus samples of all ranks, gradients before the step, and workspace."""
    foreseen = replace(foreseen, everyone=kind.everyone)
    foreseen = foreseen.with_more(WORKSPACE, workspace) if workspace else foreseen
    return foreseen.with_more(ASIDE, kind.before) if kind.before else foreseen
