"""Planner from a budget in bytes to a micro-batch, decided once for each signature.

The first batch is foreseen (`anybatch.planner.forecast`), the sizes that fit are timed
(`anybatch.planner.probe`), and the fastest is chosen (`anybatch.planner.decision`), unless a plan
that was given says it already. What comes later is never timed again:

    another batch size, such as a last partial one     the same plan
    smaller samples (shorter sequences)                bounded by what is known of larger ones
    larger samples                                     foreseen, at the next power of two

A bound holds because a kernel on fewer elements needs no more memory. So 500 random lengths cost a
handful of rehearsals, and every one of them keeps within the budget.

Source: design of this project, section 4.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from anybatch.core import accelerator
from anybatch.core.memory_errors import release
from anybatch.core.plan import Plan
from anybatch.core.units import parse_bytes
from anybatch.execution.case import Case
from anybatch.execution.kinds import Allowed, Kind
from anybatch.memory.spill import Spill
from anybatch.memory.step_timeline import StepTimeline
from anybatch.planner.asked import Asked
from anybatch.planner.budget import default_budget, ran_out
from anybatch.planner.contest import StepTimer
from anybatch.planner.decision import Decision, Terms, beside
from anybatch.planner.depict import depict
from anybatch.planner.forecast import WORKSPACE, Forecast
from anybatch.planner.foreseen import Foreseen
from anybatch.planner.precedent import Precedent
from anybatch.planner.workspaces import Workspaces


class Planner:
    """Planner with a budget, and the forecasts and decisions within it.

    Args:
        budget: bytes; None takes what is left on the device when the first batch comes.
        fixed: samples in a micro-batch that must be kept to; None (default) chooses.
        timed: run the sizes that fit to find the fastest. Default True.
        settled: what a plan made before has decided; nothing is foreseen for the first batch.

    Attributes:
        spill: where saved tensors may go.
        workspaces: of convolutions.
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
        self.timed = timed
        self._settled = settled
        self._precedent = Precedent(fixed, sends=settled is not None and settled.away is not None)
        self._foreseen = Foreseen()
        self._allowed: dict[Kind, Allowed] = {}

    @contextmanager
    def timing(self, wanted: bool) -> Iterator[None]:  # noqa: FBT001
        """Time sizes in the body, or do not, and then as before."""
        was, self.timed = self.timed, wanted
        try:
            yield
        finally:
            self.timed = was

    @property
    def decided(self) -> int:
        """Forecasts made, and decisions of a plan passed in: each is worth a measurement."""
        return self._precedent.decided

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
        """Return how a batch of this signature is run.

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
            # Has another plan been wrong, this one is worth a look.
            self._precedent.decided += kind.most > 0
            self._allowed[self._foreseen.plain(kind)] = found
        return found

    def timeline(self, kind: Kind) -> StepTimeline | None:
        """Return the timeline of a step of this signature.

        None where none was foreseen, and of a plan that was given in which saved tensors leave.
        """
        kind = self._foreseen.plain(kind)
        allowed, foreseen = self._allowed.get(kind), self._foreseen.bound(kind)
        if allowed is None or foreseen is None or (allowed.away and not allowed.passes):
            return None
        held = dict(allowed.memory.owners).get(WORKSPACE, 0)
        more = max(0, held - foreseen.constant.get(WORKSPACE, 0))
        return depict(beside(foreseen, kind, more), allowed, kind.size)

    def learn(self, kind: Kind, peak: int, states: int) -> None:
        """Record the measured peak of a step; bytes above the prediction are added to forecasts.

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
        given = self._precedent.best is not None and not self._foreseen.rehearsed
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
        self._precedent.best = n, kind.elements
        self._allowed.pop(self._foreseen.plain(kind), None)

    def _known_budget(self) -> int:
        assert self.budget is not None
        return self.budget

    def _decide(self, asked: Asked) -> Allowed:
        settled = self._of_plan(asked)
        if settled is not None:
            return settled
        if self.budget is None:
            self.budget, self.source = default_budget(asked.case(), asked.optimizer)
        terms = Terms(self.budget, self.source, self.spill, self.timed)
        decision = Decision(asked, terms, self._precedent, self._foreseen, self.workspaces)
        outside = sys.exception()
        try:
            return decision.made()
        except torch.OutOfMemoryError as error:
            if accelerator.of(asked.case().device).host:
                raise
            release(error, outside=outside)
        raise ran_out(asked.case().device, self.budget, self.source)

    def _of_plan(self, asked: Asked) -> Allowed | None:
        """Return the decision of a plan passed in for its first batch; None for other batches.

        One without lanes is none for a batch that is divided where its samples meet.
        """
        settled, kind = self._settled, asked.kind
        if settled is None:
            return None
        self.budget, self.source = settled.memory.budget, settled.memory.source
        self._precedent.best = settled.micro_batch, kind.elements
        if settled.lanes != kind.lanes and settled.micro_batch < kind.size:
            return None
        if settled.away is not None:
            asked.refuse_spread()
        self._settled = None
        self._precedent.decided += 1
        return settled

    def _settled_in(self, found: Allowed, kind: Kind) -> Allowed:
        """Return how a batch is run, with the workspace that its convolutions really take."""
        foreseen = self._foreseen.bound(kind) if self._foreseen.knows(kind) else None

        def taking(workspace: int) -> Forecast:
            assert foreseen is not None
            return beside(foreseen, kind, workspace)

        return self.workspaces.settle(found, foreseen, kind.size, taking)


def planner_of(
    memory: Any, micro_batch: int | None, plan: Plan | None, workspace: Any = None
) -> Planner | None:
    """Return the planner for the arguments of an engine; None where nothing is to be planned.

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
