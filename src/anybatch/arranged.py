"""How a step will be run, before it is: its batch over all ranks, its size, its room.

Every rank foresees what it can hold, all take the smallest micro-batch, and where samples meet on
one rank they meet on all. What is arranged is a `Step`, which a mechanism then runs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from anybatch.batch import Batch, LazyBatch
from anybatch.given import Given
from anybatch.gradients import Gradients
from anybatch.kinds import Allowed, Kind, bytes_of
from anybatch.modules import Modules
from anybatch.norm.adaptive import Adaptive
from anybatch.planner import Planner
from anybatch.ranks.alike import Named, named_parameters
from anybatch.ranks.crew import Crew
from anybatch.ranks.everyone import Everyone
from anybatch.ranks.ranks import Here
from anybatch.runner import Runner
from anybatch.step import Scaler, Step
from anybatch.undo import Before


class Arranged(NamedTuple):
    """A step that has not begun.

    Attributes:
        step: the step.
        kind: of its batch; None where nothing was planned.
        allowed: how it is run, within the budget; None where nothing was planned.
    """

    step: Step
    kind: Kind | None
    allowed: Allowed | None


class Arranger:
    """Makes steps of batches.

    Args:
        given: model, loss and optimizer.
        runner: makes steps, and knows what earlier ones found out.
        crew: the ranks.
    """

    def __init__(self, given: Given, runner: Runner, crew: Crew) -> None:
        self._given, self._runner, self._crew = given, runner, crew
        self._everyone = 0

    def batch(self, inputs: Any, targets: Any) -> tuple[Batch, Modules]:
        """Return the mini-batch of this rank, and every module that it runs."""
        batch = self._given.batch(inputs, targets, several=self._crew.several)
        adaptive = isinstance(self._given.norms, Adaptive)
        if adaptive or self._given.rng == "batch":
            self._everyone = self._crew.size(batch.size)
        if isinstance(self._given.norms, Adaptive):
            self._given.norms.choose(self._everyone)
        return batch, self._given.modules()

    def step(
        self,
        planner: Planner | None,
        batch: Batch,
        modules: Modules,
        before: Before,
        gradients: Gradients | None,
        *,
        micro_batch: int,
        scaler: Scaler | None = None,
    ) -> Arranged:
        """Return the step, in micro-batches as large as the budget allows on every rank.

        Args:
            planner: knows the budget; None where there is none.
            batch: the mini-batch of this rank.
            modules: every module that it runs.
            before: the state before it.
            gradients: where they come together; None runs forward only.
            micro_batch: samples in a micro-batch, where nothing is planned.
            scaler: as `backward` has it.
        """
        make = partial(self._runner.step, batch, modules, before, gradients)
        join = partial(self._join, batch, modules, scaler, trains=gradients is not None)
        if planner is None or not batch.size:
            everyone = join(micro_batch)
            step = make(everyone.micro_batch, apart=False, everyone=everyone)
            return Arranged(step, None, None)
        kind = self.kind(batch, modules, gradients)
        allowed = self.allow(planner, kind, batch, modules)
        everyone = join(allowed.micro_batch)
        allowed = replace(allowed, micro_batch=everyone.micro_batch)
        room = allowed.memory.room
        step = make(allowed.micro_batch, apart=allowed.apart, room=room, everyone=everyone)
        step.budgeted = True
        if isinstance(batch, LazyBatch):
            step.watch = self._given.reach.watch
        return Arranged(step, kind, allowed)

    def kind(self, batch: Batch, modules: Modules, gradients: Gradients | None) -> Kind:
        """Return what a plan for a step belongs to."""
        leaves = self._given.leaves(modules, batch)
        there = {id(p.grad): p.grad for p in leaves if p.grad is not None}
        before = sum(map(bytes_of, there.values()))
        kind = self._given.kind(batch, modules, trains=gradients is not None, before=before)
        return replace(kind, everyone=max(self._everyone, batch.size))

    def allow(self, planner: Planner, kind: Kind, batch: Batch, modules: Modules) -> Allowed:
        """Return how a batch is run, within the budget."""
        with self._given.hearing():
            return planner.allow(
                kind,
                lambda: self._given.case(batch, modules, trains=kind.trains),
                self._given.optimizer,
                lambda: self._runner.refuse_division(modules),
            )

    def _join(
        self,
        batch: Batch,
        modules: Modules,
        scaler: Scaler | None,
        micro_batch: int,
        *,
        trains: bool,
    ) -> Everyone:
        """Return the batch over all ranks."""
        kind = self._runner.signature(batch, modules, trains=trains)
        here = Here(
            size=batch.size,
            micro_batch=micro_batch,
            lanes=bool(self._given.meets(modules)),
            trains=trains,
            coupled=self._runner.coupled(kind),
        )
        named: Named = []
        scale = 1.0
        if self._crew.several:
            named = named_parameters(modules, self._given.optimizer)
            if scaler is not None:
                scale = float(scaler.scale(torch.ones((), device=self._given.device)))
        return self._crew.join(here, kind, named, scale)
