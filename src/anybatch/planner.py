"""From a budget in bytes to the micro-batch of every batch that comes.

The first batch is foreseen (`anybatch.forecast`), the sizes that fit are timed (`anybatch.probe`),
and the fastest is chosen, with all saved tensors in memory (`anybatch.staying`) or with some away
(`anybatch.leaving`, `anybatch.contest`). What comes later is never timed again:

    another batch size, such as a last partial one     the same plan
    smaller samples (shorter sequences)                bounded by what is known of larger ones
    larger samples                                     foreseen, at the next power of two

A bound holds because a kernel on fewer elements needs no more memory. So 500 random lengths cost a
handful of rehearsals, and every one of them keeps within the budget.

Source: design of this project, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from anybatch._plan import Plan
from anybatch.asked import Asked
from anybatch.budget import default_budget
from anybatch.case import Case
from anybatch.choice import even
from anybatch.contest import StepTimer, faster
from anybatch.depict import depict
from anybatch.errors import BudgetError, NotExactError, NotYetError
from anybatch.forecast import ASIDE, WORKSPACE, Forecast
from anybatch.foreseen import Foreseen
from anybatch.kinds import Allowed, Kind
from anybatch.leaving import Leaving
from anybatch.narrow import Narrow
from anybatch.spill import Spill
from anybatch.staying import Staying
from anybatch.step_timeline import StepTimeline
from anybatch.units import parse_bytes
from anybatch.workspaces import Workspaces


class Planner:
    """Knows a budget, and what has been foreseen under it.

    Args:
        budget: bytes; None takes what is left on the device when the first batch comes.
        fixed: samples in a micro-batch that must be kept to; None (default) chooses.
        timed: run the sizes that fit to find the fastest. Default True.
        settled: what a plan made before has decided; nothing is foreseen for the first batch.

    Attributes:
        spill: where saved tensors may go.
        workspaces: of convolutions.
        decided: forecasts made, and decisions of a plan that was given: each is worth a
            measurement.
    """

    def __init__(
        self,
        budget: int | None,
        *,
        fixed: int | None = None,
        timed: bool = True,
        settled: Allowed | None = None,
    ) -> None:
        self.spill = Spill()
        self.workspaces = Workspaces()
        self.budget, self.source = budget, "as given"
        self.decided = 0
        self.timed = timed
        self._fixed, self._settled = fixed, settled
        self._foreseen = Foreseen()
        self._allowed: dict[Kind, Allowed] = {}
        self._best: tuple[int, int] | None = None
        self._sends = settled is not None and settled.away is not None

    @contextmanager
    def timing(self, wanted: bool) -> Iterator[None]:  # noqa: FBT001
        """Time sizes in the body, or do not, and then as before."""
        was, self.timed = self.timed, wanted
        try:
            yield
        finally:
            self.timed = was

    @property
    def rehearsed(self) -> int:
        """Forecasts made so far."""
        return self._foreseen.rehearsed

    def allow(
        self,
        kind: Kind,
        make_case: Callable[[], Case],
        optimizer: torch.optim.Optimizer | None,
        refuse_division: Callable[[], None],
        time_step: StepTimer,
    ) -> Allowed:
        """Return how a batch of this kind is run.

        Args:
            kind: of the batch.
            make_case: returns what is rehearsed; called where nothing is known yet.
            optimizer: its state counts, as it will be.
            refuse_division: raises where the batch must not be divided.
            time_step: times a whole step of it.

        Raises:
            BudgetError: not even a micro-batch of one sample fits.
        """
        kind = self._foreseen.plain(kind)
        found = self._allowed.get(kind)
        if found is None:
            case = cache(make_case)
            foreseen = partial(self._foreseen.bound, kind)
            time_step = self.workspaces.before(foreseen, time_step)
            asked = Asked(kind, case, optimizer, refuse_division, time_step)
            found = self.workspaces.within(self._known_budget, partial(self._decide, asked))
            found = self._settled_in(found, kind)
            self.decided += kind.most > 0  # has another plan been wrong, this one is worth a look
            self._allowed[self._foreseen.plain(kind)] = found
        return found

    def timeline(self, kind: Kind) -> StepTimeline | None:
        """Return the step of a batch of this kind as it passes.

        None where none was foreseen, and of a plan that was given in which saved tensors leave.
        """
        kind = self._foreseen.plain(kind)
        allowed, foreseen = self._allowed.get(kind), self._foreseen.bound(kind)
        if allowed is None or foreseen is None or (allowed.away and not allowed.passes):
            return None
        held = dict(allowed.memory.owners).get(WORKSPACE, 0)
        more = max(0, held - foreseen.constant.get(WORKSPACE, 0))
        return depict(_beside(foreseen, kind, more), allowed, kind.size)

    def learn(self, kind: Kind, peak: int, states: int) -> None:
        """Take in what a step of this kind has really held; more than predicted is added on.

        Args:
            kind: of the step.
            peak: bytes.
            states: bytes of them that are the optimizer's; the first step has none yet.
        """
        kind = self._foreseen.plain(kind)
        allowed = self._allowed[kind]
        coming = max(0, dict(allowed.memory.owners).get("optimizer", 0) - states)
        missing = peak + coming - allowed.memory.predicted
        if missing <= 0:
            return
        del self._allowed[kind]
        self._foreseen.hold_more(missing)
        given = self._best is not None and not self._foreseen.rehearsed
        if given and peak + coming <= allowed.memory.budget:
            # A plan that was given is obeyed, for as long as it keeps to its own budget.
            self._settled = replace(
                allowed, memory=replace(allowed.memory, predicted=peak + coming)
            )

    def recall(self, n: int, kind: Kind) -> None:
        """Take the size that an earlier run has chosen with a clock, instead of the present one.

        Args:
            n: samples in a micro-batch.
            kind: of the batch that it was chosen for, and that has been planned again.
        """
        self._best = n, kind.elements
        self._allowed.pop(self._foreseen.plain(kind), None)

    def _known_budget(self) -> int:
        assert self.budget is not None
        return self.budget

    def _decide(self, asked: Asked) -> Allowed:
        kind, way = asked.kind, self.spill.way
        settled = self._of_plan(asked)
        if settled is not None:
            return settled
        if self.budget is None:
            self.budget, self.source = default_budget(asked.case(), asked.optimizer)
        divides = self._fixed is not None and self._fixed < kind.size
        may = way != "off" and kind.trains and not (divides and asked.undivided)
        if may and asked.spread:
            may = False
            if way in ("host", "file"):
                raise _not_spread()
        if may and way != "auto":
            return self._away(asked)
        if may and self._keeps_away(kind) and (found := self._still_away(asked)) is not None:
            return found
        try:
            return self._in_memory(asked, may=may)
        except (BudgetError, NotExactError) as error:
            if not may:
                raise
            return self._away(asked, failed=error)

    def _in_memory(self, asked: Asked, *, may: bool) -> Allowed:
        """Return how a batch is run with all its saved tensors on the device.

        Or without some of them where they `may` leave, and that is faster.
        """
        kind = asked.kind
        unknown = self._foreseen.bound(kind) is None
        staying = self._staying(asked)
        away = unknown and may and self._keeps_away(kind)
        if away and (found := self._still_away(asked)) is not None:
            return found
        cap = staying.largest
        if self._fixed is None and cap == kind.size and asked.whole:
            return staying.allowed(cap)
        first = self._best is None and kind.trains and not kind.most
        timed = first and self.timed and self._fixed is None
        n = staying.timed(asked.streamed) if timed else self._pick(kind, cap)
        n = n if staying.fits(n) else cap
        if timed and not kind.everyone:  # whose clocks would each tell another time
            where = staying.foreseen, asked
            elsewhere = (self._leaving(*where), self._narrow(*where)) if may else None
            found = faster(staying, elsewhere, n, kind.size, asked.time_step)
        else:
            found = staying.allowed(n)
        if first:
            self._sends = found.away is not None
            self._best = found.micro_batch, kind.elements
        return found

    def _staying(self, asked: Asked) -> Staying:
        """Return the choice of a size with which a step fits in memory.

        Raises:
            BudgetError: there is none.
            NotExactError: the batch would have to be divided, and must not be.
        """
        kind = asked.kind

        def choice(foreseen: Forecast, *, fresh: bool) -> Staying:
            assert self.budget is not None
            found = Staying(
                self._beside(foreseen, kind),
                asked.case,
                kind,
                budget=self.budget,
                source=self.source,
                confirmed=fresh,
                ready=partial(self.workspaces.ready, foreseen),
            )
            found.require(self._fixed_for(kind), asked.refuse_division)
            return found

        foreseen = self._foreseen.bound(kind)
        try:
            fresh = foreseen is None or kind.most > 0
            found = choice(foreseen or self._foresee(asked, rounded=True), fresh=fresh)
            # Undivided it may fit as it is, and there lanes are only slower.
            exact = kind.lanes and found.largest < kind.size
        except (BudgetError, NotExactError):
            if self._foreseen.knows(kind):
                raise
            exact = True  # what fits no bound may fit as it is
        if exact and not self._foreseen.knows(kind):
            found = choice(self._foresee(asked, rounded=False), fresh=True)
        return found

    def _leaving(self, foreseen: Forecast, asked: Asked) -> Leaving:
        """Return the choice of a size with saved tensors away."""
        assert self.budget is not None
        return Leaving(
            foreseen,
            asked.case,
            asked.kind.size,
            most=asked.kind.largest,
            budget=self.budget,
            source=self.source,
            spill=self.spill,
            whole=asked.whole,
            ready=partial(self.workspaces.ready, foreseen),
        )

    def _narrow(self, foreseen: Forecast, asked: Asked) -> Narrow:
        """Return the choice of lanes that leave while they run."""
        assert self.budget is not None
        return Narrow(
            foreseen,
            asked.kind.size,
            asked.case().device,
            most=asked.kind.largest,
            budget=self.budget,
            source=self.source,
            spill=self.spill,
        )

    def _away(self, asked: Asked, *, failed: Exception | None = None) -> Allowed:
        """Return how a batch is run with saved tensors away, or raise what `failed` without it."""
        kind = asked.kind
        foreseen, fresh = self._foreseen.bound(kind), self._best is None
        if foreseen is None:
            foreseen = self._foresee(asked, rounded=True)
        leaving = self._leaving(self._beside(foreseen, kind), asked)
        n = self._size_away(leaving, kind)
        divided = max(n, 1) < kind.size or kind.everyone
        if kind.lanes and divided and not asked.undivided:
            return self._in_narrow_lanes(asked, leaving.foreseen, failed)
        if failed is not None and ((leaving.whole and n == 0) or not leaving.helps(n)):
            raise failed
        found = leaving.allowed(n or leaving.smallest, real=fresh)
        self._sends = True
        if self._best is None:
            self._best = n, kind.elements
        return found

    def _in_narrow_lanes(
        self,
        asked: Asked,
        foreseen: Forecast,
        failed: Exception | None,
    ) -> Allowed:
        """Return how a batch is run in lanes that leave while they run.

        Raises:
            BudgetError: it cannot be; or what `failed` without, which needs less.
        """
        kind, narrow = asked.kind, self._narrow(foreseen, asked)
        if not narrow.possible:  # on real rows one lane would have to fit first
            if failed is not None:
                raise failed
            return self._in_memory(asked, may=False)
        fixed = self._fixed_for(kind)
        if fixed is not None:
            n = fixed
        else:  # what has been chosen for another mini-batch is rehearsed alone
            known = 0 if self._best is None else self._pick(kind, kind.largest)
            n = known if known and narrow.fits(known) else narrow.best() or 1
        try:
            found = narrow.allowed(n)
        except BudgetError as error:
            if failed is not None and foreseen.peak(n, kind.size) <= error.needed:
                raise failed from None
            raise
        self._sends = True
        if self._best is None:
            self._best = n, kind.elements
        return found

    def _size_away(self, leaving: Leaving, kind: Kind) -> int:
        """Return the samples of a micro-batch whose saved tensors leave; 0 where none fit."""
        fixed = self._fixed_for(kind)
        if fixed is not None:
            return fixed
        cap = leaving.largest()
        if cap == 0 or leaving.whole:
            return cap
        if self._best is None:
            return leaving.timed(cap) if self.timed else leaving.least(cap)
        return self._pick(kind, cap)

    def _still_away(self, asked: Asked) -> Allowed | None:
        """Return how a batch is run where saved tensors have left before, and have to again.

        None where it fits as it is in micro-batches of the size chosen then, where that is not
        known, and where it cannot be run so either.
        """
        assert self.budget is not None
        kind, bound = asked.kind, self._foreseen.bound(asked.kind)
        if bound is None:
            return None
        n = kind.size if asked.whole else self._pick(kind, kind.size)
        if self._beside(bound, kind).largest(self.budget, kind.size) >= n:
            return None
        try:
            return self._away(asked)
        except BudgetError:
            return None

    def _of_plan(self, asked: Asked) -> Allowed | None:
        """Return what a plan that was given says of its first batch; None for other batches.

        One without lanes is none for a batch that is divided where its samples meet.
        """
        settled, kind = self._settled, asked.kind
        if settled is None:
            return None
        self.budget, self.source = settled.memory.budget, settled.memory.source
        self._best = settled.micro_batch, kind.elements
        if settled.lanes != kind.lanes and settled.micro_batch < kind.size:
            return None
        if settled.away is not None and asked.spread:
            raise _not_spread()
        self._settled = None
        self.decided += 1
        return settled

    def _foresee(self, asked: Asked, *, rounded: bool) -> Forecast:
        assert self.budget is not None
        self.decided += 1
        return self._foreseen.foresee(
            asked.kind, asked.case(), asked.optimizer, self.budget, rounded=rounded
        )

    def _beside(self, foreseen: Forecast, kind: Kind) -> Forecast:
        """Return the forecast beside all that is not in it."""
        return _beside(foreseen, kind, self.workspaces.most(foreseen))

    def _settled_in(self, found: Allowed, kind: Kind) -> Allowed:
        """Return how a batch is run, with the workspace that its convolutions really take."""
        foreseen = self._foreseen.bound(kind) if self._foreseen.knows(kind) else None

        def beside(workspace: int) -> Forecast:
            assert foreseen is not None
            return _beside(foreseen, kind, workspace)

        return self.workspaces.settle(found, foreseen, kind.size, beside)

    def _keeps_away(self, kind: Kind) -> bool:
        """Say whether saved tensors leave as before, where they have: not under another plan."""
        return self._sends and not kind.most

    def _fixed_for(self, kind: Kind) -> int | None:
        """Return the samples of a micro-batch that must be kept to; None where none are given."""
        return None if self._fixed is None else min(self._fixed, kind.largest)

    def _pick(self, kind: Kind, cap: int) -> int:
        """Return a size up to `cap` that does as much work at once as the first one chosen did."""
        if self._fixed is not None:
            return min(self._fixed, cap)
        if self._best is None:
            return even(kind.size, cap)
        n, elements = self._best
        if elements == kind.elements:
            return min(cap, n)
        return max(1, min(cap, round(n * elements / max(kind.elements, 1))))


def planner_of(
    memory: Any, micro_batch: int | None, plan: Plan | None, workspace: Any = None
) -> Planner | None:
    """Return the planner of what a person has asked for; None where nothing is to be planned.

    Raises:
        TypeError: `plan` is no plan.
        ValueError: a plan and something that it decides.
    """
    if plan is not None:
        if not isinstance(plan, Plan):
            raise TypeError(
                f"plan must be an anybatch.Plan, and it is {type(plan).__name__}: "
                "Plan.from_json(text) makes one of a file's text"
            )
        if memory is not None or micro_batch is not None or workspace is not None:
            raise ValueError(
                "a plan decides memory, micro_batch and workspace, and one of them was given "
                "beside it: leave them out, or leave plan out"
            )
        if plan.memory is None:
            return None
        apart = plan.accumulate == "accumulator"
        coupled = plan.mechanism == "gathering"
        lanes = plan.mechanism == "lanes"
        settled = Allowed(
            plan.micro_batch, apart, plan.memory, coupled, plan.loss, lanes, plan.offload
        )
        return Planner(plan.memory.budget, settled=settled)
    if memory is None and micro_batch is not None:
        return None
    return Planner(None if memory is None else parse_bytes(memory), fixed=micro_batch)


def _beside(foreseen: Forecast, kind: Kind, workspace: int) -> Forecast:
    """Return the forecast beside other ranks' samples, gradients that are there, and workspace."""
    foreseen = replace(foreseen, everyone=kind.everyone)
    foreseen = foreseen.with_more(WORKSPACE, workspace) if workspace else foreseen
    return foreseen.with_more(ASIDE, kind.before) if kind.before else foreseen


def _not_spread() -> NotYetError:
    return NotYetError(
        "saved tensors do not leave the device today where parameters are spread over ranks: plan "
        'with offload="off", or let every rank keep all parameters'
    )
