"""`plan`: forecast of a training step before any training: its split, bytes and seconds.

Like a database's EXPLAIN: the decision the engine would make for a batch, with the sizes it would
not take and why. Nothing is left behind: gradients, buffers and RNG states are as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor, nn

from anybatch.core.absent import AbsentDevice, parse_device, planned_for
from anybatch.core.accelerator import of
from anybatch.core.batch import LazyBatch, TensorBatch
from anybatch.core.optimizers import bare, device_of
from anybatch.core.plan import Plan
from anybatch.core.units import parse_bytes
from anybatch.engine.engine import BatchNormMode, Engine, RngMode
from anybatch.engine.inputs import refuse_rungs
from anybatch.engine.rank_session import several
from anybatch.errors import BudgetError, NotYetError
from anybatch.lockstep.sync_batchnorm import Adaptive
from anybatch.loss.base import Loss
from anybatch.memory.spill import takes
from anybatch.offloading.planned_states import plan_offloaded, states_of
from anybatch.planner.planner import RUNGS
from anybatch.planner.workspaces import shared
from anybatch.tools.autocast import autocast_of_absent
from anybatch.tools.profile import pace_of, profile, step_seconds
from anybatch.tools.profiled import Profile
from anybatch.tools.scaled import Goal, goal_of, scale_of

STEPS, ENOUGH = 20, 5.0
"""Steps of a loop that are measured at most, and seconds after which no further one is begun."""


def plan(
    model: nn.Module,
    loss_fn: Callable[..., Tensor] | Loss | None,
    batch: Any,
    *,
    memory: float | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    micro_batch: int | None = None,
    batchnorm: BatchNormMode | Adaptive = "exact",
    rng: RngMode = "micro_batch",
    timed: bool = True,
    states: Literal["host", "file", "auto"] | None = None,
    offload: str = "auto",
    spill: str | PathLike[str] | None = None,
    workspace: int | str | None = None,
    loader: Iterable[Any] | None = None,
    split: Callable[[Any], tuple[Any, Any]] | None = None,
    gpus: int | None = None,
    speedup: float | None = None,
    deadline: float | None = None,
    epochs: int = 1,
    network: str | None = None,
    servers: int | Literal["auto"] | None = None,
    device: str | None = None,
    rungs: Collection[str] = RUNGS,
) -> Plan:
    """Return the plan that an `Engine` would make for a batch, without training on it.

    Dry runs (steps on fake tensors, which have no data, and on a few real rows) forecast the
    memory. Steps in a few of the sizes that fit are timed on the device, and all is restored. A
    model sharded by FSDP is gathered for this, so all ranks must call it.

    Args:
        model: as for `Engine`, and so are `loss_fn`, `memory`, `optimizer`, `micro_batch`,
            `batchnorm` and `rng`.
        loss_fn: the loss.
        batch: ``(inputs, targets)`` as for `Engine.backward`, or a `LazyBatch`.
        memory: bytes, or a text such as "6GiB" or "80%"; None (default): as for `Engine`.
        optimizer: its state counts with its size after the first step.
        micro_batch: samples; None (default) chooses.
        batchnorm: as in `Engine`.
        rng: "micro_batch" (default) or "batch".
        timed: time steps in the sizes that fit. Default True; if False the plan has the largest
            that fits, on a host no more samples than its caches hold.
        offload: "auto" (default) offloads saved tensors if a micro-batch of one sample does not
            fit with them, and if timing shows that a step is faster so: with larger micro-batches
            or lanes (micro-batches in lockstep), or with the undivided batch instead of lanes.
            "host" (from a GPU) or "file": always; "off": never. Without timing, the size is then
            the one that offloads least.
        states: store of the optimizer's state between its steps, as in `offload_states`: "host"
            memory from CUDA, a "file" on the CPU. If a step does not fit with that, the model's
            parameters and gradients are offloaded too, and the plan says how many bytes of all of
            them are resident; such a plan needs ``with engine.states:`` around its steps. "auto"
            offloads if nothing fits otherwise. Default None: the state is on the device.
        spill: folder of these files, which have no name and disappear with the process. Default
            None: the system's folder for temporary files.
        workspace: as in `Engine`: the memory that one convolution may allocate to be faster. It
            counts in the budget. The plan says how each convolution is divided, and its execution
            measures nothing. "auto" shares the budget with convolutions where a step is faster so
            (`anybatch.planner.workspaces`).
        loader: mini-batches of the training. A few steps of the loop are measured as in
            `anybatch.profile`: the plan has the seconds of a step and of an epoch, and the effect
            of more GPUs, at the same mini-batch. If the plan offloads the optimizer's state, it
            says that they are not measured. `loader` needs `optimizer`. Default None: the plan
            has the seconds of candidates only.
        split: splits its mini-batches, as in `anybatch.profile`. Default: pairs.
        gpus: a goal: the number of GPUs. Default None: only the table.
        speedup: a goal: how many times as fast as one GPU. Default None.
        deadline: a goal: seconds for all `epochs`; the loader must know its length. Default None.
        epochs: passes over the `loader` in the training. Default 1.
        network: bandwidth for gradients between GPUs, in bits a second: "10Gbit". Default None:
            the sum of gradients is assumed to cost nothing, and the plan says so.
        servers: parameter servers for `gpus` workers that do not wait for each other: the plan says
            which part of a round they compute, and how many servers hide all traffic (Lemma 3.2 of
            the guide); "auto" is that number. It needs `gpus` and `network`. Default None.
        device: an absent CUDA device, by the size of its memory: "cuda:24GiB". The model and the
            batch are on the host; the dry run counts as that device would, under CUDA's autocast
            where it is on. Nothing is timed, and the plan lists its assumptions and the figures
            that are not measured. Default None: the device of the model.
        rungs: as in `Engine`; without "offload" in it, `offload` may be "auto" or "off".

    Returns:
        The plan; pass it to ``Engine(plan=...)`` to execute it.

    Raises:
        BudgetError: a micro-batch of one sample does not fit, even with offloading.
        StoreError: the offloaded tensors do not fit in their store.
        NotYetError: `workspace="auto"` with a `LazyBatch` or over ranks; a goal over ranks.
        AnybatchError: `Engine.backward` would raise it.
        ValueError: `batch` is neither a pair nor a `LazyBatch`; there is a `loader` and no
            `optimizer`; there is a goal and no loader, or several goals; `offload`, `states` or
            `spill` is not valid here, or there is no optimizer with a state to offload; `device` is
            no such text, or needs figures that only a device can measure; or as for `Engine`.

    Example:
        >>> print(anybatch.plan(model, loss_fn, (inputs, targets), memory="6GiB"))
    """
    if isinstance(batch, LazyBatch):
        inputs, targets = batch, None
    elif isinstance(batch, tuple) and len(batch) == 2:
        inputs, targets = batch
    else:
        raise ValueError(
            "batch must be a pair (inputs, targets), with None for no targets, or a LazyBatch, "
            f"and it is {type(batch).__name__}"
        )

    wanted = goal_of(
        gpus, speedup, deadline, epochs=epochs, loader=loader, network=network, servers=servers
    )
    if loader is not None and optimizer is None:
        raise ValueError(
            "a loader is for the seconds of full steps, which need an optimizer, and there is "
            "none: give optimizer="
        )

    target = None if device is None else _absent_device(device, loader)
    refuse_rungs(rungs)
    if "offload" not in rungs and offload in ("host", "file"):
        raise ValueError(f'offload="{offload}" offloads always, and rungs={rungs!r} forbids it')
    _refuse(batch, shares=workspace == AUTO, foresees=wanted != Goal() or network is not None)
    options = {"optimizer": optimizer, "batchnorm": batchnorm, "rng": rng, "rungs": rungs}
    question = Question(
        *(model, bare(optimizer), (inputs, targets)),
        make=partial(Engine, model, loss_fn, **options),  # type: ignore[arg-type]
        memory=memory,
        micro_batch=micro_batch,
        offload=offload if "offload" in rungs or offload != "auto" else "off",
        spill=spill,
        device=target,
    )
    found = question.answer(workspace, states, timed=timed)
    if loader is None:
        return found
    assert optimizer is not None
    steps = question.steps_of(found, optimizer, loader, split=split)
    return question.with_steps(found, steps, loader, None if several() else wanted, network)


def _absent_device(device: str, loader: Iterable[Any] | None) -> AbsentDevice:
    """Return the device that is not there."""
    found = parse_device(device) if isinstance(device, str) else None
    if found is None:
        raise ValueError(
            'device must be a CUDA device with the size of its memory, such as "cuda:24GiB", and '
            f"it is {device!r}: leave it out to plan for the device that the model is on"
        )
    if loader is not None:
        raise ValueError(
            f"a loop is measured on its device, and a device of {found.size} is not there: leave "
            "loader out"
        )
    return found


def _refuse(batch: Any, *, shares: bool, foresees: bool) -> None:
    """Refuse requests that need one process, or a mini-batch that can run more than once."""
    if shares and isinstance(batch, LazyBatch):
        raise NotYetError(
            "a budget is shared with convolutions by running steps of a mini-batch, and a "
            "LazyBatch can be run once only: give a pair of tensors, or a workspace in bytes"
        )
    if shares and several():
        raise NotYetError(
            "a budget is not shared with convolutions over ranks today, whose clocks differ: give "
            "a workspace in bytes"
        )
    if foresees and several():
        raise NotYetError(
            "the gain by more GPUs is predicted from one process, and there are several: plan "
            "without torchrun"
        )


# Question that a plan answers: a mini-batch, its budget, and permitted offloading.
#
# One forecast is enough if everything is resident. If a budget is to be shared with convolutions,
# or tensors must be offloaded first, several plans are made, each by its own engine, until one is
# chosen:
#
#    workspace      engine ──> plan, one or a few   the fastest   (`anybatch.planner.workspaces`)
#    states         all stay │ state leaves │ all of the model leaves    the first that fits

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
    device: AbsentDevice, model: nn.Module, memory: float | str | None, workspace: int | str | None
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
    memory: float | str | None = None
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

    def steps_of(
        self,
        plan: Plan,
        optimizer: torch.optim.Optimizer,
        loader: Iterable[Any],
        *,
        split: Callable[[Any], tuple[Any, Any]] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Profile | None:
        """Return a few measured steps of a `plan`, which are undone; None with offloaded states.

        `loader`, `optimizer`, `split` and `progress` are as in `anybatch.profile`.
        """
        if plan.states is not None:
            return None
        enough = inf if several() else ENOUGH  # whose clocks differ
        run = partial(profile, loader, self.make(plan=plan), optimizer, steps=STEPS, enough=enough)
        return run(split=split, progress=progress)

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
