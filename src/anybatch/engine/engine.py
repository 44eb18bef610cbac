"""`Engine`: a person's training step, for a batch of any size, in micro-batches.

The engine owns no model, no optimizer and no loop. It takes the two lines that do not survive a
batch that is too big, ``loss = loss_fn(model(x), y); loss.backward()``, and does them in parts,
with the gradient of the whole. Everything around them stays the person's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from os import PathLike
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from anybatch.conv.session import engaged
from anybatch.core.batch import Batch
from anybatch.core.html_cards import card, table
from anybatch.core.memory_errors import NothingHeld
from anybatch.core.modules import Modules, renormalised
from anybatch.core.plan import Plan, decide
from anybatch.core.prepared import Prepared, bare
from anybatch.core.rounding import rounding
from anybatch.core.undo import Before, no_optimizer_step, transaction
from anybatch.distributed.sharded import sharded_of
from anybatch.engine.arranged import Arranged, Arranger
from anybatch.engine.facts import of_foreseen, of_run
from anybatch.engine.inputs import StepInputs
from anybatch.engine.rank_session import RankSession, unwrapped
from anybatch.engine.refusals import (
    as_function,
    refuse_nested,
    refuse_now,
    refuse_place,
    refuse_written,
    versions_of,
)
from anybatch.engine.runner import Runner
from anybatch.execution.gradients import Gradients
from anybatch.execution.records import StepReport
from anybatch.execution.repeatable import Observer, Tries
from anybatch.execution.signature import RunPlan, Signature
from anybatch.execution.step import Scaler, Step
from anybatch.lockstep.adaptive import Adaptive, Fixed
from anybatch.loss.declared import Loss
from anybatch.loss.model_loss import loss_of
from anybatch.loss.watched import CallableLoss
from anybatch.memory.spill import Spill, spill_of
from anybatch.memory.step_timeline import StepTimeline
from anybatch.offload.optimizer_states import OffloadedStates
from anybatch.offload.states.planned import start_offload
from anybatch.planner.measure import measured, read_peak
from anybatch.planner.planner import Planner, planner_of
from anybatch.planner.updates import state_bytes

BatchNormMode = Literal["exact", "local", "adaptive"]
RngMode = Literal["micro_batch", "batch"]


class Engine:
    """Trainer of a model at any batch size, with the gradient of the full batch.

    After `backward`, ``.grad`` of every parameter holds what ``loss_fn(model(inputs),
    targets).backward()`` on the undivided batch would have added, up to rounding.

    Args:
        model: any module. It stays where and as it is.
        loss_fn: ``loss_fn(outputs, targets)`` -> 0-dim tensor, or a `Loss`. torch's own losses and
            sums of them need one pass; any other function is exact too, with a second forward.
            None (default): the model returns its loss, as a 0-dim tensor, as ``.loss``, as
            ``["loss"]`` or first in a tuple. What it divides by is traced: a weighted sum of
            torch's own losses, and of means and sums over samples, needs no declaration, and what
            cannot be traced is refused, unless it is declared by `Loss.inside`.
        optimizer: the optimizer, if there is one. Its parameters count as trained too, and its
            state counts as memory, as it will be after its first step.
        memory: what a step may hold on the device, in bytes or as "6GiB": parameters, buffers,
            gradients, optimizer state and all that the step allocates; on CUDA also what else the
            process has allocated. On the CPU it is bytes of live tensors, your own mini-batch not
            counted. None (default) is what is left on the device, less a margin that the plan
            names; unless `micro_batch` is given, then nothing is planned.
        micro_batch: samples in a micro-batch, at least 1. None (default): the first step foresees
            the memory of every size, times the sizes that fit, and takes the fastest.
        batchnorm: "exact" (default) normalises by the whole batch: micro-batches wait for each
            other in BatchNorm, and what waits leaves the device as far as `memory` has no room for
            it. "local" lets each micro-batch be normalised by its own statistics, which is another
            function than that of the batch. "adaptive", or an `Adaptive`, is local until training
            has converged and exact from there on.
        rng: "micro_batch" (default): each micro-batch draws its own random numbers, in order.
            "batch": each draws what the undivided batch would for its rows, so the gradient is that
            of the batch with dropout, too; while a draw is made, one for all samples is in memory,
            and the plan counts it. What cannot be drawn so is refused. Over ranks every step begins
            with the random state of rank 0, and leaves all of them with that of the whole batch.
        plan: a plan made before, which is obeyed; `memory`, `micro_batch` and `workspace` are its.
        workspace: bytes, or a text such as "64MiB", that one convolution may allocate beside its
            operands and its result, so that it is computed by a faster algorithm, as
            `anybatch.convolutions` does it. With `memory` it is counted, and kernels are measured
            between steps, never inside; where all of it leaves too little for a step, kernels get
            less, and the plan says so. Default None: convolutions are as they are, torch's or
            those of a context.

    Raises:
        ValueError: `memory`, `micro_batch`, `batchnorm`, `rng` or `workspace` is not one of what is
            said above, or `plan` comes with one that it decides.
        NotYetError: `workspace` for a model that is neither on the CPU nor on CUDA.

    Example:
        >>> engine = anybatch.Engine(model, nn.CrossEntropyLoss(), memory="6GiB")
        >>> for inputs, targets in loader:
        ...     optimizer.zero_grad()
        ...     loss = engine.backward(inputs, targets)
        ...     optimizer.step()

    Source: MBS, Algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor] | Loss | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        memory: int | str | None = None,
        micro_batch: int | None = None,
        batchnorm: BatchNormMode | Adaptive = "exact",
        rng: RngMode = "micro_batch",
        plan: Plan | None = None,
        workspace: int | str | None = None,
    ) -> None:
        refuse_now(model, micro_batch, batchnorm, rng)
        self._prepared = Prepared(model, optimizer)
        model, group = unwrapped(model)
        sharded = sharded_of(model)
        if loss_fn is not None and not isinstance(loss_fn, Loss):
            loss_fn = CallableLoss(as_function(loss_fn))
        loss = loss_of(model, loss_fn)
        self._planner = planner_of(memory, micro_batch, plan, workspace)
        if batchnorm == "adaptive":
            batchnorm = Adaptive()
        norms = batchnorm if isinstance(batchnorm, Adaptive) else Fixed(batchnorm)
        self._inputs = StepInputs(model, loss, bare(optimizer), norms, rng=rng, sharded=sharded)
        adaptive = isinstance(norms, Adaptive)
        self._convolutions = engaged(self._inputs.device, workspace, plan)
        if self._planner is not None:
            self._planner.workspaces.engaged = self._convolutions
        self._rank_session = RankSession(
            model, group, adaptive=adaptive, shared_rng=rng == "batch", sharded=sharded
        )
        self._runner = Runner(self._inputs)
        self._arranger = Arranger(self._inputs, self._runner, self._rank_session)
        self.micro_batch = micro_batch if plan is None else plan.micro_batch
        self._plan: Plan | None = plan
        states = None if plan is None else plan.states
        self._states = None if states is None else start_offload(states, optimizer, model)
        self._last: StepReport | None = None
        self._facts: Any = None
        self._measured = 0
        self._spill = Spill()

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        return self._inputs.model

    @property
    def plan(self) -> Plan | None:
        """The plan passed in, or that of the last step; None before the first one."""
        return self._plan

    @property
    def states(self) -> OffloadedStates | None:
        """The optimizer's state, where the plan has it wait elsewhere; it has ``back()``."""
        return self._states

    @property
    def last(self) -> StepReport | None:
        """The report of the last step; None before the first one."""
        return self._last

    @property
    def _decisions(self) -> int:
        """How often something has been planned: a step that raises it does more than train."""
        return 0 if self._planner is None else self._planner.decided

    def backward(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        scaler: Scaler | None = None,
        observe: Observer | None = None,
    ) -> Tensor:
        """Add the gradient of the full batch to ``.grad``, and return its loss.

        Args:
            inputs: tree of tensors of shape [N_B, ...]: a tensor is passed as ``model(x)``, a tuple
                or list as ``model(*x)``, a mapping as ``model(**x)``. Or a `LazyBatch`.
            targets: any tree of tensors [N_B, ...], sliced alike; None calls
                ``loss_fn(outputs)``. A model that returns its loss takes its labels from `inputs`.
            scaler: ``torch.amp.GradScaler``; the gradients are then scaled, the loss is not. None
                (default): that of an optimizer which accelerate has prepared, if it has one.
            observe: called ``observe(outputs, targets)`` for each micro-batch, once, in order, with
                detached tensors. It must leave ``.grad`` as it is.

        Returns:
            The loss of the whole batch, a detached 0-dim tensor.

        Raises:
            BatchError: the leaves do not share a first dimension; each is named.
            NotExactError: the gradient of the whole batch cannot be had this way.
            LossError: the loss does not do what it must, or the model returns none and there is no
                `loss_fn`, or what it returns cannot be traced.
            BudgetError: a micro-batch of one sample does not fit in `memory`; nothing was run.

        Memory that runs out all the same costs a micro-batch or a step, which is done again,
        smaller; where a single sample is too much, the error goes out. Nothing has changed after
        an exception, KeyboardInterrupt included.
        """
        refuse_nested(BACKWARD)
        self._refuse_place()
        self._prepared.refuse_loop()
        scaler = self._prepared.scaler if scaler is None else scaler
        run = partial(self._backward, inputs, targets, scaler, observe, Tries())
        with NothingHeld(), self._convolutions.step(waits=self._planner is not None):
            loss = self._inputs.reach.again(partial(self._rank_session.together, run))
        self._inputs.norms.step(loss)
        return loss

    def _backward(
        self,
        inputs: Any,
        targets: Any,
        scaler: Scaler | None,
        observe: Observer | None,
        tries: Tries,
    ) -> Tensor:
        start = perf_counter()
        batch, modules = self._arranger.batch(inputs, targets)
        leaves = self._inputs.leaves(modules, batch)
        before = Before(modules, leaves)
        own = {
            id(module.weight) for _, module in renormalised(modules)
        } | self._inputs.state.moving()
        still = [leaf for leaf in leaves if id(leaf) not in own]
        gradients = Gradients(leaves, wide=False, hooks=before.hooks)
        refuse = partial(refuse_written, still, versions_of(still))
        write = partial(self._deliver, gradients, refuse)
        with transaction(before, write) as delivery:
            before.suspend_hooks()
            step, signature, run_plan = self._arranged(
                batch, modules, before, gradients, tries, scaler
            )
            step.scaler, step.observe, step.deliver = scaler, observe, delivery
            gradients.set_aside()
            with no_optimizer_step(before), torch.enable_grad():
                loss, peak = self._first_measured(step, signature, modules, before)
        return self._note(step, loss, perf_counter() - start, run_plan, peak)

    def evaluate(
        self, inputs: Any, targets: Any = None, *, observe: Observer | None = None
    ) -> Tensor:
        """Return the loss of the full batch without gradients, one micro-batch at a time.

        The model is used in the mode it is in: call ``model.eval()`` before.

        Args:
            inputs: as in `backward`.
            targets: as in `backward`.
            observe: as in `backward`.

        Returns:
            The loss of the whole batch, a detached 0-dim tensor.

        Raises:
            BatchError: as in `backward`.
            NotExactError: as in `backward`.
        """
        self._refuse_place()
        with NothingHeld(), self._convolutions.step(waits=self._planner is not None):
            run = partial(self._evaluate, inputs, targets, observe, Tries())
            return self._inputs.reach.again(partial(self._rank_session.together, run))

    def _evaluate(
        self,
        inputs: Any,
        targets: Any,
        observe: Observer | None,
        tries: Tries,
    ) -> Tensor:
        start = perf_counter()
        batch, modules = self._arranger.batch(inputs, targets)
        before = Before(modules, [])
        with transaction(before, self._rank_session.end) as delivery, torch.no_grad():
            step, signature, run_plan = self._arranged(batch, modules, before, None, tries)
            step.observe, step.deliver = observe, delivery
            loss, peak = self._first_measured(step, signature, modules, before)
            step.forget_casts()
        return self._note(step, loss, perf_counter() - start, run_plan, peak)

    def _refuse_place(self) -> None:
        """Refuse a step with parameters resident against its plan, or offloaded over ranks."""
        states = self._states
        outside = states is not None and states.paged and not states.entered
        refuse_place(self._inputs.device, outside=outside)

    def _arranged(
        self,
        batch: Batch,
        modules: Modules,
        before: Before,
        gradients: Gradients | None,
        tries: Tries,
        scaler: Scaler | None = None,
    ) -> Arranged:
        arranged = self._arranger.step(
            *(self._planner, batch, modules, before, gradients),
            micro_batch=self.micro_batch or 1,
            tries=tries,
            scaler=scaler,
        )
        self.micro_batch = arranged.step.global_batch.micro_batch
        return arranged

    def _deliver(self, gradients: Gradients, check: Callable[[], None]) -> None:
        check()
        gradients.amend(self._rank_session.end())
        gradients.deliver()

    def _first_measured(
        self, step: Step, signature: Signature | None, modules: Modules, before: Before
    ) -> tuple[Tensor, int | None]:
        """Run the step; the first after a forecast under the meter, where the device has none."""
        planner, inputs = self._planner, self._inputs
        if planner is None or signature is None or planner.decided == self._measured:
            with read_peak(inputs.device) as found:
                return self._runner.run(step, modules, before), found()
        self._measured = planner.decided
        with measured(inputs.device, modules, inputs.optimizer, before, inputs.shards) as peak:
            loss = self._runner.run(step, modules, before)
        grain = rounding(inputs.device)
        later = grain if grain > 1 else 0  # the loss that `last` has while the next step runs
        planner.learn(signature, peak() + later, state_bytes(inputs.optimizer))
        return loss, peak()

    def _note(
        self,
        step: Step,
        loss: Tensor,
        seconds: float,
        run_plan: RunPlan | None,
        peak: int | None,
    ) -> Tensor:
        if loss.untyped_storage().nbytes() > loss.element_size():
            loss = loss.clone()  # torch's mean of squares lies in the memory of all its terms
        facts = of_run(step, self._runner.failed_at(step))
        memory = None if run_plan is None else run_plan.memory
        left = None if run_plan is None else run_plan.offload
        # A last partial batch that needs no splitting does not change the plan of the others
        # (test_last_and_plan_say_what_the_step_was).
        now = facts, memory, self._convolutions.count
        if now != self._facts and (facts.divided or self._plan is None):
            self._facts, decided = now, decide(facts, memory, left)
            states = None if self._plan is None else self._plan.states
            kernels = None if self._planner is None else self._planner.workspaces.kernels
            convolutions = self._convolutions.record(kernels)
            self._plan = replace(decided, states=states, convolutions=convolutions)
        self._last = StepReport(
            loss=loss,
            samples=step.global_batch.size,
            micro_batch=step.limit,
            micro_batches=step.done,
            seconds=seconds,
            peak_bytes=peak,
            predicted_bytes=None if memory is None else memory.predicted,
            moved_bytes=step.moved,
            remade_bytes=step.remade,
            retries=step.retries,
            batchnorm=step.batchnorm,
        )
        return loss

    def foresee(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        timed: bool = True,
        offload: str | None = None,
        spill: str | PathLike[str] | None = None,
    ) -> Plan:
        """Return the plan for a batch without training on it; `anybatch.plan` calls this.

        Args:
            inputs: as in `backward`.
            targets: as in `backward`.
            timed: time the sizes that fit, where they have not been. Default True.
            offload: as in `anybatch.plan`, from here on. Default None: as it was, first "auto".
            spill: as there.

        Raises:
            ValueError: `offload` or `spill` is not what it must be.
        """
        if offload is not None or spill is not None:
            self._spill = spill_of(offload or "auto", spill)
            self._spill.refuse_on(self._inputs.device)
            if self._planner is not None:
                self._planner.spill = self._spill
        refuse_place(self._inputs.device, outside=False)
        run = partial(self._foresee, inputs, targets, timed=timed)
        with self._convolutions.step(waits=True):
            return self._inputs.reach.again(partial(self._rank_session.foreseeing, run))

    def _recall(self, n: int, inputs: Any, targets: Any = None) -> None:
        """Plan a batch as an earlier run did, which chose a micro-batch of `n` with a clock.

        Args:
            n: samples in a micro-batch.
            inputs: of the same shapes as the batch that it was chosen for.
            targets: the same.
        """
        self.foresee(inputs, targets, timed=False)
        self._arranger.recall(n)

    def timeline(self) -> StepTimeline | None:
        """Return the step that was planned last as it passes: live bytes by owner at every event.

        Returns:
            The step; it prints as a chart, and its peak is what the plan predicts. Of a batch that
            is planned by the forecast of a larger one, it is that one's. None where nothing was
            foreseen: before the first batch, and where a plan that was given is obeyed.

        Example:
            >>> engine.foresee(inputs, targets)
            >>> print(engine.timeline())
        """
        return self._arranger.timeline()

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the model, the plan, and the last step."""
        count = sum(p.numel() for p in self.model.parameters())
        named = {"model": f"{type(self.model).__name__}, {count:,} parameters"}
        named |= {} if self.plan else {"plan": "none yet: the first step makes it"}
        shown = (one._repr_html_() for one in (self.plan, self.last) if one is not None)
        return card("Engine", table(named), *shown)

    def _foresee(self, inputs: Any, targets: Any, *, timed: bool) -> Plan:
        planner = self._planner or Planner(None, fixed=self.micro_batch)
        planner.spill, planner.workspaces.engaged = self._spill, self._convolutions
        batch, modules = self._inputs.batch(inputs, targets), self._inputs.modules()
        leaves = self._inputs.leaves(modules, batch)
        before, gradients = Before(modules, leaves), Gradients(leaves, wide=False)
        with transaction(before, before.hooks.restore), torch.enable_grad():
            before.suspend_hooks()
            with planner.timing(timed):
                signature = self._arranger.signature(batch, modules, gradients)
                run_plan = self._arranger.allow(planner, signature, batch, modules)
            step = self._runner.step(batch, modules, before, gradients, run_plan.micro_batch)
        found = decide(of_foreseen(step, run_plan, leaves), run_plan.memory, run_plan.offload)
        return replace(found, convolutions=self._convolutions.record(planner.workspaces.kernels))


BACKWARD = Engine.backward.__code__
"""How a step is known on the stack, whoever may wrap the method later."""
