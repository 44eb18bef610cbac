"""The engine of a run and its plan: made before the first step, written down, obeyed ever after.

An engine plans when its first batch comes, and again in every process: a run that is resumed would
time the sizes anew, might take another one, and would then differ in its last bits. So the plan is
the run's own. It is made from the first mini-batch, before anything is trained, and a process that
goes on with the run obeys it.

    made ──> written, with the first checkpoint ──> step, step, step ...
                  ^                                      │
                  └── memory ran out, or more was held ──┘

If BatchNorm becomes exact during a run, the plan is for another training: a new one is made before
the next step. Of several ranks each plans for its own device, and all use the smallest micro-batch;
the plan of rank 0 is the run's.

Tensors that the plan offloads are offloaded from then on: the optimizer's state at once, and
parameters and gradients while the run is inside `with planned:`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch

from anybatch import Engine, Plan, offload_states
from anybatch.cli.build import BatchNormPolicy, RunParts
from anybatch.cli.faults import RunFolderError, SettingsError, as_setting
from anybatch.cli.settings import Settings
from anybatch.cli.team import SINGLE_PROCESS, Team
from anybatch.cli.views import LoadedBatch
from anybatch.devices import absent, available_memory
from anybatch.planning import Question, spill_of
from anybatch.reports import OffloadedStates, States, StepTimeline


class PlannedEngine:
    """An engine, and the plan that it follows; entered while the run trains.

    `engine`: the engine; where the plan is still to be made it has none. `plan`: None until there
    is one. `waits`: the plan is still to be made, by `make`, before the first step.
    """

    def __init__(
        self,
        settings: Settings,
        parts: RunParts,
        optimizer: torch.optim.Optimizer,
        norms: BatchNormPolicy,
        team: Team = SINGLE_PROCESS,
    ) -> None:
        self._settings, self._parts, self._optimizer = settings, parts, optimizer
        self._norms, self._team = norms, team
        self._offloaded: OffloadedStates | None = None
        self._states: States | None = None
        self._entered = False
        self.forget()

    def forget(self) -> None:
        """Start again without a plan; all offloaded tensors are resident again."""
        self.plan: Plan | None = None
        self.waits = self._settings.planned
        self._made = False
        self._step: StepTimeline | None = None
        self._obey(micro_batch=self._settings.micro_batch)
        if self._settings.states is not None and not self.waits:
            self._offload(self._settings.states, self._settings.spill)

    def __enter__(self) -> Self:
        self._entered = True
        self._enter()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Bring parameters and gradients back; discard the optimizer's offloaded state."""
        self._entered = False
        if self._offloaded is not None:
            self._offloaded.close()

    @property
    def micro_batch(self) -> int:
        """Samples in a micro-batch; 0 before they are planned."""
        found = self.plan.micro_batch if self.plan is not None else self._settings.micro_batch
        return found or 0

    @property
    def budget(self) -> int | None:
        """Bytes that a step may hold; None where nothing was planned."""
        memory = self.plan.memory if self.plan is not None else None
        return memory.budget if memory is not None else None

    @property
    def pages(self) -> bool:
        """Whether parameters are paged: code that reads them must offload them again."""
        return self._offloaded is not None and self._offloaded.paged

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
            self.plan = Plan.from_json(text)
        except ValueError as error:
            raise RunFolderError(
                f"the checkpoint must hold a plan of this version of anybatch; {error}. Use "
                "--replan to make a new one."
            ) from error
        if obeyed:
            self.waits = False
            self._obey(plan=self.plan)

    def make(self, batch: LoadedBatch) -> None:
        """Make the plan from a mini-batch; nothing is trained.

        Raises:
            BudgetError: when no micro-batch fits, or not the one that was given.
        """
        refuse_to_plan(self._settings, self._parts.device)
        self._parts.model.train()
        self._optimizer.zero_grad()
        self._norms.choose(sum(int(samples) for [samples] in self._team.gather(len(batch.inputs))))
        question, plan = self._team.together(partial(self._answer, self._settings, batch))
        undivided = plan.micro_batch >= len(batch.inputs)
        least = min(n for [n] in self._team.gather(math.inf if undivided else plan.micro_batch))
        if least < plan.micro_batch:
            question, plan = self._answer(replace(self._settings, micro_batch=int(least)), batch)
        self._step = question.engine_of(plan).timeline()
        if plan.convolutions is None and plan.states is None:
            self.engine = question.engine_of(plan)
        else:  # kernels of later steps are not to be measured
            self._obey(plan=plan)
        self.plan, self.waits, self._made = plan, False, True

    def _answer(self, settings: Settings, batch: LoadedBatch) -> tuple[Question, Plan]:
        question = question_of(settings, self._parts, self._optimizer, self._norms, batch)
        return question, question.answer(settings.workspace, settings.states)

    def _obey(self, **chosen: Any) -> None:
        """Do as it was chosen, or as a plan says, in this process and in all later ones."""
        if self._offloaded is not None:
            self._offloaded.back()
        make = maker_of(self._parts, self._optimizer, self._norms)
        self.engine = make(**chosen)
        plan, self._offloaded = self.engine.plan, self.engine.states
        self._states = None if plan is None else plan.states
        self._enter()

    def _enter(self) -> None:
        if self._entered and self._offloaded is not None:
            self._offloaded.__enter__()

    def _offload(self, store: str, folder: str | None) -> None:
        """Offload the optimizer's state of a run that nothing is planned for."""
        place = folder if store == "file" and folder else store
        self._offloaded = offload_states(self._optimizer, store=place)
        self._states = States(store, folder, self._offloaded.memory)

    def follow(self, batch: LoadedBatch) -> bool:
        """Update the plan from a finished step, and return whether it has changed.

        The first step after the plan was made is measured, and may have held more than was
        foreseen; and memory may have run out in any step. The gradients are gone afterwards.
        """
        before, report = self.plan, self.engine.last
        assert report is not None
        if before is None or report.retries:
            self.plan = self._with_run_facts(self.engine.plan)
        elif self._made and len(batch.inputs):
            self._optimizer.zero_grad()
            settings = self._settings
            leaves = {"offload": settings.offload, "spill": settings.spill}
            self.plan = self._with_run_facts(self.engine.foresee(*batch[:2], timed=False, **leaves))
        self._made = self._made and not len(batch.inputs)
        return self.plan != before

    def _with_run_facts(self, plan: Plan | None) -> Plan | None:
        """Return an engine's plan with the run's own facts: place of states, and shares tried."""
        if plan is None:
            return None
        plan = plan if self.plan is None else plan.with_trials_of(self.plan)
        return replace(plan, states=self._states)


def maker_of(
    parts: RunParts, optimizer: torch.optim.Optimizer, norms: BatchNormPolicy
) -> Callable[..., Engine]:
    """Return the factory of a run's engine; it accepts the choices of a plan, or the plan."""
    return partial(Engine, parts.model, parts.loss, optimizer=optimizer, batchnorm=norms.batchnorm)


def question_of(
    settings: Settings,
    parts: RunParts,
    optimizer: torch.optim.Optimizer,
    norms: BatchNormPolicy,
    batch: LoadedBatch,
) -> Question:
    """Return the question that the plan of a run answers, for one of its mini-batches."""
    return Question(
        *(parts.model, optimizer, (batch.inputs, batch.targets)),
        make=maker_of(parts, optimizer, norms),
        memory=settings.memory,
        micro_batch=settings.micro_batch,
        offload=settings.offload,
        spill=settings.spill,
        device=absent(),
    )


def refuse_to_plan(settings: Settings, device: torch.device) -> None:
    """Refuse settings for which no plan can be made on this device.

    Raises:
        SettingsError: the store is not for this device; or there is no budget, and the system does
            not report its free memory; or the budget is more than a device that is not there would
            have.
    """
    target = absent()
    with as_setting():
        spill_of(settings.offload, settings.spill).refuse_on(device)
        if target is not None:
            target.budget(settings.memory)
    if settings.memory is not None or target is not None:
        return
    try:
        available_memory(device)
    except ValueError as error:
        raise SettingsError(
            f"memory must be given where the system does not report the free memory of {device}; "
            "it was not. Name it, such as --memory 4GiB, or give --micro-batch alone."
        ) from error
