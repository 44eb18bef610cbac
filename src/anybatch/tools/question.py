"""Question that a plan answers: a mini-batch, its budget, and permitted offloading.

One forecast is enough if everything is resident. If a budget is to be shared with convolutions, or
tensors must be offloaded first, several plans are made, each by its own engine, until one is
chosen:

    workspace      engine ──> plan, one or a few     the fastest        (`anybatch.planner.sharing`)
    states         all stay │ state leaves │ all of the model leaves    the first that fits
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import nn

from anybatch.core.absent import AbsentDevice, planned_for
from anybatch.core.accelerator import of
from anybatch.core.batch import LazyBatch, TensorBatch
from anybatch.core.optimizers import device_of
from anybatch.core.plan import Plan
from anybatch.core.units import parse_bytes
from anybatch.engine.engine import Engine
from anybatch.errors import BudgetError
from anybatch.memory.spill import takes
from anybatch.offload.states.planned import plan_offloaded, states_of
from anybatch.planner.autocast import autocast_of_absent
from anybatch.planner.sharing import shared
from anybatch.tools.goals import scale_of
from anybatch.tools.profile import pace_of, step_seconds
from anybatch.tools.profiled import Profile
from anybatch.tools.scaled import Goal

AUTO = "auto"
"""Plans with workspace, or with offloaded states."""

NOT_MEASURED = "full steps were not measured, since the optimizer's state is offloaded"


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Run layers in the body by torch's own kernels: oneDNN exists on the host only."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def refuse_absent(
    device: AbsentDevice, model: nn.Module, memory: int | str | None, workspace: int | str | None
) -> None:
    """Refuse requests that a dry run for an absent device cannot serve.

    Raises:
        ValueError: the model is not on the host, `memory` is more than the free memory of the
            device, or a `workspace` is to be measured.
    """
    device.budget(memory)
    elsewhere = [p.device for p in model.parameters() if p.is_meta or not of(p.device).host]
    if elsewhere:
        raise ValueError(
            "a model must be on the host to be planned for a device that is not there, and a "
            f'parameter is on {elsewhere[0]}: give model.to("cpu"), or leave device out'
        )
    if workspace is not None:
        raise ValueError(
            "the workspace of convolutions is measured on the device, and a device of "
            f"{device.size} is not there: leave workspace out"
        )


@dataclass(frozen=True)
class Question:
    """Question for a plan: a mini-batch, a factory of engines, and the user's settings.

    Attributes:
        model: whose parameters may be offloaded.
        optimizer: whose state may.
        batch: inputs and targets.
        make: makes an engine from the arguments that a plan decides, or from the plan.
        memory: of a step, as for `Engine`.
        micro_batch: samples, or None.
        offload: as for `anybatch.plan`.
        spill: as for `anybatch.plan`.
        device: that it is planned for and that is not there; None (default) is where the model is.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    batch: tuple[Any, Any]
    make: Callable[..., Engine]
    memory: int | str | None = None
    micro_batch: int | None = None
    offload: str = AUTO
    spill: str | PathLike[str] | None = None
    device: AbsentDevice | None = None
    _made: list[tuple[Plan, Engine]] = field(default_factory=list, init=False, repr=False)

    @property
    def size(self) -> int:
        """N_B, samples of the mini-batch."""
        inputs, targets = self.batch
        return (
            inputs.size if isinstance(inputs, LazyBatch) else TensorBatch.of(inputs, targets).size
        )

    def answer(
        self, workspace: int | str | None = None, states: str | None = None, *, timed: bool = True
    ) -> Plan:
        """Return the plan.

        Args:
            workspace: of one convolution; "auto" shares the budget; None (default) has none.
            states: "host" or "file": store of the optimizer's state, and of parameters and
                gradients if nothing fits otherwise; "auto" offloads it if nothing fits otherwise;
                None (default) offloads none.
            timed: time the sizes that fit. Default True.

        Raises:
            ValueError: `workspace` means nothing, or needs a device that is not there; or as
                `refuse_absent`.
            BudgetError: not even one sample fits.
        """
        if self.device is not None:
            return self._without(self.device, workspace, states)
        if workspace not in (None, AUTO):
            parse_bytes(workspace, "workspace", word=AUTO)
        within = self._shared if workspace == AUTO else partial(self._foresee, workspace)
        return self._with_states(partial(within, timed=timed), states)

    def _without(
        self, device: AbsentDevice, workspace: int | str | None, states: str | None
    ) -> Plan:
        """Return the plan for a device that is not there: a dry run on the host, not timed."""
        refuse_absent(device, self.model, self.memory, workspace)
        with planned_for(device), _without_onednn(), autocast_of_absent() as autocast:
            found = self._with_states(partial(self._foresee, None, timed=False), states)
        unknown = (*device.not_measured, *autocast.not_measured())
        return replace(found, device=replace(device, not_measured=unknown))

    def with_steps(
        self,
        plan: Plan,
        steps: Profile | None,
        loader: Iterable[Any] = (),
        goal: Goal | None = None,
        network: str | None = None,
    ) -> Plan:
        """Return a plan with the seconds of steps of a loop, and with the effect of more GPUs.

        Args:
            plan: an answer.
            steps: of its loop, as `anybatch.profile` returns them. None where the optimizer's state
                is offloaded: the plan says that they were not measured.
            loader: of the loop.
            goal: for more GPUs, as `goal_of` returns it. Default None: no effect is foreseen.
            network: bandwidth for gradients, as in `anybatch.plan`. Default None: free.

        Raises:
            ValueError: a mini-batch has fewer samples than the goal has GPUs.
        """
        if steps is None:
            return replace(plan, reasons=(*plan.reasons, NOT_MEASURED))
        scale = None
        if goal is not None:
            assert self.optimizer is not None
            scale = scale_of(plan, steps, self.optimizer, goal, network, self.size)
        return replace(plan, pace=pace_of(steps, loader), scale=scale)

    def engine_of(self, plan: Plan) -> Engine:
        """Return the engine that has foreseen a `plan` that was an answer."""
        return next(
            engine
            for found, engine in reversed(self._made)
            if (found.memory, found.convolutions) == (plan.memory, plan.convolutions)
        )

    def _foresee(self, workspace: int | str | None, *, timed: bool = True) -> Plan:
        """Return the plan with so much workspace."""
        timed = timed and self.device is None
        engine = self.make(memory=self.memory, micro_batch=self.micro_batch, workspace=workspace)
        found = engine.foresee(*self.batch, timed=timed, offload=self.offload, spill=self.spill)
        self._made.append((found, engine))
        return found

    def _shared(self, *, timed: bool = True) -> Plan:
        """Return the plan with the fastest step over all workspaces."""

        def seconds(found: Plan) -> float:
            return step_seconds(self.make(plan=found), self.optimizer, *self.batch)

        return shared(partial(self._foresee, timed=timed), seconds)

    def _with_states(self, foresee: Callable[..., Plan], states: str | None) -> Plan:
        """Return the plan with the optimizer's state offloaded, if requested or needed to fit."""
        store = states
        if store is None or store == AUTO:
            try:
                return foresee()
            except BudgetError:
                if store is None or self.optimizer is None:
                    raise
            store = takes(device_of(self.optimizer))[0]
        where = states_of(store, self.spill, self.optimizer, self.memory)
        assert self.optimizer is not None
        return plan_offloaded(foresee, where, self.optimizer, self.model, self.size)
