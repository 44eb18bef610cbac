"""The engine of a run and its plan: made before the first step, written down, obeyed ever after.

An engine plans when its first batch comes, and again in every process: a run that is resumed would
time the sizes anew, might take another one, and would then differ in its last bits. So the plan is
the run's own. It is made from the first mini-batch, before anything is trained, and a process that
goes on with the run obeys it.

    made ──> written, with the first checkpoint ──> step, step, step ...
                  ^                                      │
                  └── memory ran out, or more was held ──┘

Where BatchNorm becomes exact in the course of a run, what was planned is another training's: a new
plan is made before the next step. Of several ranks each plans for its own device, and all keep to
the smallest micro-batch; the plan of rank 0 is the run's.

Source: design, section 4, "A run folder's plan is the run's plan".
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from anybatch import Engine, Plan, StepTimeline
from anybatch._plan import States
from anybatch.apps.build import Parts
from anybatch.apps.faults import RunFolderError, SettingsError
from anybatch.apps.norms import Norms
from anybatch.apps.settings import Settings
from anybatch.apps.team import ALONE, Team
from anybatch.apps.views import Batch
from anybatch.memory import left
from anybatch.spill import spill_of
from anybatch.states.planned import away, states_of


class Planned:
    """An engine, and the plan that it follows.

    Attributes:
        engine: the engine.
        plan: None until there is one.
        waits: the plan is still to be made, by `make`, before the first step.
    """

    def __init__(
        self,
        settings: Settings,
        parts: Parts,
        optimizer: torch.optim.Optimizer,
        norms: Norms,
        team: Team = ALONE,
    ) -> None:
        self._settings, self._parts, self._optimizer = settings, parts, optimizer
        self._norms, self._team = norms, team
        self._states = let_states_leave(settings, optimizer)
        self.forget()

    def forget(self) -> None:
        """Begin as if nothing had been planned."""
        self.plan: Plan | None = None
        self.waits = self._settings.planned
        self._made = False
        self._step: StepTimeline | None = None
        self.engine = self._new(self._settings.micro_batch)

    def _new(self, micro_batch: int | None) -> Engine:
        return Engine(
            self._parts.model,
            self._parts.loss,
            optimizer=self._optimizer,
            memory=self._settings.memory,
            micro_batch=micro_batch,
            batchnorm=self._norms.given,
            workspace=self._settings.workspace,
        )

    @property
    def micro_batch(self) -> int:
        """Samples in a micro-batch; 0 while nobody knows."""
        found = self.plan.micro_batch if self.plan is not None else self._settings.micro_batch
        return found or 0

    @property
    def budget(self) -> int | None:
        """Bytes that a step may hold; None where nothing was planned."""
        memory = self.plan.memory if self.plan is not None else None
        return memory.budget if memory is not None else None

    def timeline(self) -> StepTimeline | None:
        """Return the planned step as it passes; None where nothing was foreseen."""
        return self.engine.timeline() or self._step

    def text(self) -> str | None:
        """Return the plan as JSON."""
        return self.plan.to_json() + "\n" if self.plan is not None else None

    def put_back(self, text: str | None, *, obeyed: bool) -> None:
        """Take the plan of an earlier process; where it is not `obeyed`, only until one is made.

        Raises:
            RunFolderError: when it is no plan of this version.
        """
        if text is None:
            return
        try:
            self.plan = self._with_states(Plan.from_json(text))
        except ValueError as error:
            raise RunFolderError(
                f"the checkpoint must hold a plan of this version of anybatch; {error}. Use "
                "--replan to make a new one."
            ) from error
        if obeyed:
            self.waits = False
            self.engine = self._obedient(self.plan)

    def _obedient(self, plan: Plan) -> Engine:
        """Return an engine that does as a plan says, in this process and in all later ones."""
        return Engine(
            self._parts.model,
            self._parts.loss,
            optimizer=self._optimizer,
            batchnorm=self._norms.given,
            plan=replace(plan, states=None),  # they are away already
        )

    def make(self, batch: Batch) -> None:
        """Make the plan from a mini-batch; nothing is trained.

        Raises:
            BudgetError: when no micro-batch fits, or not the one that was given.
        """
        refuse_to_plan(self._settings, self._parts.device)
        self._parts.model.train()
        self._optimizer.zero_grad()
        self._norms.choose(sum(int(samples) for [samples] in self._team.gather(len(batch.inputs))))
        plan = self._team.together(lambda: self._foresee(batch))
        whole = plan.micro_batch >= len(batch.inputs)
        least = min(n for [n] in self._team.gather(math.inf if whole else plan.micro_batch))
        if least < plan.micro_batch:
            self.engine = self._new(int(least))
            plan = self._foresee(batch)
        self._step = self.engine.timeline()
        if plan.convolutions is not None:  # those of later steps are not to be measured
            self.engine = self._obedient(plan)
        self.plan, self.waits, self._made = plan, False, True

    def _foresee(self, batch: Batch) -> Plan:
        """Return the plan of the present engine."""
        told = self._settings
        found = self.engine.foresee(*batch[:2], offload=told.offload, spill=told.spill)
        return self._with_states(found)

    def _with_states(self, plan: Plan) -> Plan:
        """Return the plan as that of a training whose optimizer's state is where it was told."""
        return replace(plan, states=self._states)

    def follow(self, batch: Batch) -> bool:
        """Take in what a step has shown, and say whether the plan is another one now.

        The first step after the plan was made is measured, and may have held more than was
        foreseen; and memory may have run out in any step. The gradients are gone afterwards.
        """
        before, report = self.plan, self.engine.last
        assert report is not None
        if before is None or report.retries:
            self.plan = None if self.engine.plan is None else self._with_states(self.engine.plan)
        elif self._made and len(batch.inputs):
            self._optimizer.zero_grad()
            found = self.engine.foresee(batch.inputs, batch.targets, timed=False)
            self.plan = self._with_states(found)
        self._made = self._made and not len(batch.inputs)
        return self.plan != before


def let_states_leave(settings: Settings, optimizer: torch.optim.Optimizer) -> States | None:
    """Let the optimizer's state leave, if it is to; return where it waits.

    Raises:
        StoreError: there is no room for it.
    """
    if settings.states is None:
        return None
    found = states_of(settings.states, settings.spill, optimizer, settings.memory)
    away(found, optimizer)
    return found


def refuse_to_plan(settings: Settings, device: torch.device) -> None:
    """Refuse what no plan can be made for on this device.

    Raises:
        SettingsError: what leaves does not go there; or there is no budget, and the system does not
            tell what is left.
    """
    try:
        spill_of(settings.offload, settings.spill).refuse_on(device)
    except ValueError as error:
        raise SettingsError(f"{error}.") from error
    if settings.memory is not None:
        return
    try:
        left(device)
    except ValueError as error:
        raise SettingsError(
            f"memory must be given where the system does not tell what is left on {device}; it "
            "was not. Name it, such as --memory 4GiB, or give --micro-batch alone."
        ) from error
