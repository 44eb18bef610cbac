"""`Engine`: a user's training step, for a batch of any size, in micro-batches.

The engine owns no model, no optimizer and no loop. It replaces the two lines that fail for a batch
that is too big, ``loss = loss_fn(model(x), y); loss.backward()``, and runs them in parts, with the
gradient of the full batch. Everything around them remains the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from math import inf
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from anybatch.conv.convolutions import engaged, plan_file
from anybatch.core.batch import Batch
from anybatch.core.modules import Modules, once, renormalised
from anybatch.core.oom import NothingHeld
from anybatch.core.optimizers import Prepared, bare
from anybatch.core.plan import Plan, card, decide, table
from anybatch.core.retry import until_complete
from anybatch.core.status import say
from anybatch.core.transaction import Before, NoOptimizerStep, transaction
from anybatch.core.units import parse_share, show_bytes
from anybatch.distributed.fsdp import sharded_of
from anybatch.engine.executor import Runner
from anybatch.engine.inputs import (
    StepInputs,
    as_function,
    error_of_call,
    no_attribute,
    planner_of,
    refuse_nested,
    refuse_now,
    refuse_place,
    refuse_written,
    versions_of,
)
from anybatch.engine.measurement import Measurement, StepReport
from anybatch.engine.rank_session import RankSession, unwrapped
from anybatch.engine.resume import Resumable
from anybatch.engine.step_builder import Arranged, Arranger, of_foreseen, of_run
from anybatch.execution.attempts import Attempts, FullOutputs, Observer
from anybatch.execution.gradients import Gradients
from anybatch.execution.signature import RunPlan
from anybatch.execution.step import Scaler, Step
from anybatch.lockstep.sync_batchnorm import Adaptive, Fixed
from anybatch.loss.base import Loss
from anybatch.loss.callable_loss import CallableLoss
from anybatch.loss.model_loss import loss_of
from anybatch.memory.ledger import StepTimeline
from anybatch.memory.spill import Spill, file_folder, spill_of
from anybatch.offloading.optimizer_states import OffloadedStates
from anybatch.offloading.planned_states import start_offload
from anybatch.planner.earlier_plans import EarlierPlans, PlanFile, program, surroundings
from anybatch.planner.planner import RUNGS, Planner

BatchNormMode = Literal["exact", "local", "adaptive"]
RngMode = Literal["micro_batch", "batch"]
TuneMode = Literal["steps", "off"]


class Engine(Resumable):
    """Trainer of a model at any batch size, with the gradient of the full batch.

    `backward` adds the same values to ``.grad`` of every parameter as ``loss_fn(model(inputs),
    targets).backward()`` on the undivided batch, up to rounding.

    Args:
        model: any module. It is neither moved nor changed.
        loss_fn: ``loss_fn(outputs, targets)`` -> 0-dim tensor, or a `Loss`. torch's own losses,
            means and sums of values that are computed for each sample by itself, and weighted sums
            of these need one pass; any other function is exact too, with a second forward. A
            function that requires more arguments gets the items of a tuple of outputs one by one:
            ``loss_fn(reconstruction, mean, log_variance, targets)``.
            None (default): the model returns its loss, as a 0-dim tensor, as ``.loss``, as
            ``["loss"]`` or first in a tuple. The denominator of such a loss is traced: a weighted
            sum of torch's own losses, and of means and sums over samples, needs no declaration. A
            loss that cannot be traced is refused, unless `Loss.inside` declares it.
        optimizer: the optimizer, if there is one. Its parameters count as trained too. Its state
            counts as memory, with its size after the first step.
        memory: the budget: the most that a step may hold on the device, in bytes or as "6GiB":
            parameters, buffers, gradients, optimizer state and all allocations of the step; on
            CUDA also all other allocations of the process. On the CPU it is bytes of live tensors,
            without your own mini-batch. "80%": that share of the memory that is free at the first
            step, plus the tensors that it has already. None (default): the same, less a margin
            that the plan names; but if `micro_batch` is passed, nothing is planned.
        micro_batch: samples in a micro-batch, at least 1. None (default): the first step forecasts
            the memory of every size and runs in one that fits; up to nine more find the fastest.
        batchnorm: "exact" (default) normalises by the full batch: micro-batches wait for each
            other in BatchNorm, and tensors of waiting ones are offloaded as far as `memory` is too
            small for them. "local" normalises each micro-batch by its own statistics; this is
            another function than that of the full batch. "adaptive", or an `Adaptive`, is local
            until training has converged and exact from then on.
        rng: "micro_batch" (default): each micro-batch draws its own random numbers, in order.
            "batch": each draws the numbers of its rows in the undivided batch, so the gradient is
            that of the full batch with dropout, too. During a draw, the draw of all samples is in
            memory, and the plan counts it; draws that cannot be made so are refused. Over ranks
            every step starts from the RNG state of rank 0, and all end in that of the full batch.
        plan: a plan to execute; it sets `memory`, `micro_batch` and `workspace`.
        workspace: bytes, or a text such as "64MiB", that one convolution may allocate in addition
            to its operands and its result, to use a faster algorithm, as `anybatch.convolutions`
            does. With `memory` it is counted, and kernels are measured between steps, never inside;
            if all of it leaves too little for a step, kernels get less, and the plan says so.
            Default None: convolutions are not changed: torch's or those of a context.
        tune: "steps" (default): the first steps are run in different sizes, or with tensors
            offloaded, until the fastest is known; each of them trains, with the gradient of the
            full batch. "off": no clock decides anything, so the same program takes the same plan in
            every start; implied by ``torch.use_deterministic_algorithms(True)``.
        cache: file of plans. With `memory` in one process, the plans of the first steps are
            kept there, and the next start of the same program on this machine follows them: it
            plans nothing, and ends in the same bits. "auto" (default): a file in your folder for
            caches; None: nothing is kept or followed.
        rungs: what may be done beside micro-batches, so that a step holds less: "chunks" computes
            wide linear maps and their losses in chunks of rows, "tiles" modules that act on each
            token by itself in tiles of tokens, "offload" offloads saved tensors. Default: all,
            where they are needed or faster.
        keep_outputs: `outputs` has those of all samples after a step, for metrics. They count as
            memory, and logits are then not computed in chunks. Default False.

    Raises:
        ValueError: `memory`, `micro_batch`, `batchnorm`, `rng`, `workspace`, `tune` or `rungs` is
            none of the values above, or is passed with a `plan` that sets it.
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
        optimizer: torch.optim.Optimizer | None = None,
        *,
        memory: float | str | None = None,
        micro_batch: int | None = None,
        batchnorm: BatchNormMode | Adaptive = "exact",
        rng: RngMode = "micro_batch",
        plan: Plan | None = None,
        workspace: int | str | None = None,
        tune: TuneMode = "steps",
        cache: str | PathLike[str] | None = "auto",
        rungs: Collection[str] = RUNGS,
        keep_outputs: bool = False,
    ) -> None:
        refuse_now(model, micro_batch, batchnorm, rng, tune, rungs)
        self._prepared = Prepared(model, optimizer)
        model, group = unwrapped(model)
        sharded = sharded_of(model)
        if loss_fn is not None and not isinstance(loss_fn, Loss):
            loss_fn = CallableLoss(as_function(loss_fn))
        loss = loss_of(model, loss_fn)
        self._planner = planner_of(
            memory, micro_batch, plan, workspace, tune, rungs, outputs=keep_outputs
        )
        batchnorm = Adaptive() if batchnorm == "adaptive" else batchnorm
        norms = batchnorm if isinstance(batchnorm, Adaptive) else Fixed(batchnorm)
        self._inputs = StepInputs(
            *(model, loss, bare(optimizer), norms), rng=rng, sharded=sharded, outputs=keep_outputs
        )
        self._convolutions = engaged(self._inputs.device, workspace, plan)
        if self._planner is not None:
            self._planner.workspaces.engaged = self._convolutions
        adaptive, shared_rng = isinstance(norms, Adaptive), rng == "batch"
        self._rank_session = RankSession(
            model, group, adaptive=adaptive, shared_rng=shared_rng, sharded=sharded
        )
        path = plan_file() if cache == "auto" else cache and Path(cache)
        stays = memory is not None and parse_share(memory) is None  # a share is of what is free
        planned = stays and plan is None and not self._rank_session.several
        if self._planner is not None and planned and path:
            settings = memory, micro_batch, workspace, batchnorm, rng, tune, sorted(rungs)
            program_of = partial(self._program, settings)
            self._planner.earlier = EarlierPlans(PlanFile(Path(path)), program_of)
        self._runner = Runner(self._inputs)
        self._arranger = Arranger(self._inputs, self._runner, self._rank_session)
        self.micro_batch = micro_batch if plan is None else plan.micro_batch
        self._plan: Plan | None = plan
        states = None if plan is None else plan.states
        self._states = None if states is None else start_offload(states, optimizer, model)
        self._steady: Plan | None = None
        self._last: Callable[[], StepReport] | StepReport | None = None
        self._outputs: Any = None
        self._facts: Any = None
        self._measurement = Measurement(self._inputs, self._runner)
        self._samples = 0.0 if plan is None else inf
        self._left = False
        self._spill = Spill("auto" if "offload" in rungs else "off")

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
        """The optimizer's state, where the plan offloads it; it has ``back()``."""
        return self._states

    @property
    def last(self) -> StepReport | None:
        """The report of the last step; None before the first one."""
        if self._last is not None and not isinstance(self._last, StepReport):
            self._last = self._last()
        return self._last

    @property
    def outputs(self) -> Any:
        """The outputs of all samples of the last step, detached and in the order of the batch.

        They are a tree as the model returns it, on its device; a loss among them is that of the
        full batch. Over ranks they are of the samples of this rank. None before the first step and
        after one that failed.

        Raises:
            AttributeError: the engine was made without ``keep_outputs=True``.
        """
        if not self._inputs.outputs:
            raise AttributeError  # `__getattr__` names the argument
        return self._outputs

    if not TYPE_CHECKING:  # a checker would find every name

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(no_attribute(name), name=name, obj=self)

    def __call__(self, *_inputs: Any, **_named: Any) -> NoReturn:
        """Refuse a call, and name the methods that are meant.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "an Engine is no model, and it was called as one: engine.backward(inputs, targets) "
            "adds the gradient and returns the loss, engine.evaluate(inputs, targets) only returns "
            "it, and engine.model(inputs) returns outputs"
        )

    def _program(self, settings: tuple[Any, ...]) -> str:
        """Return the program that plans belong to, besides the signature of a batch."""
        inputs = self._inputs
        found = (
            *settings,
            inputs.norms.now,
            inputs.outputs,
            self._spill,
            *surroundings(inputs.device.type),
        )
        return program(inputs.modules(), inputs.loss.functions(), inputs.optimizer, found)

    @property
    def _fastest(self) -> int | None:
        """Samples in the fastest micro-batch so far; None where nothing was planned."""
        return None if self._planner is None else self._planner.fastest

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
            scaler: ``torch.amp.GradScaler``; it scales the gradients, but not the loss. None
                (default): the scaler of an optimizer prepared by accelerate, if it has one.
            observe: called ``observe(outputs, targets)`` for each micro-batch, once, in order, with
                detached tensors. It must not change ``.grad``.

        Returns:
            The loss of the full batch, a detached 0-dim tensor.

        Raises:
            BatchError: the leaves do not share a first dimension; the message names each.
            NotExactError: the gradient of the full batch cannot be computed this way.
            LossError: the loss breaks a rule; or the model returns no loss and there is no
                `loss_fn`, or it returns a loss that cannot be traced.
            BudgetError: one sample, or `micro_batch`, does not fit in `memory`; nothing was run.
            StoreError: the store of offloaded tensors is full, or a write or a read has failed.
            RankError: another rank has failed or is gone, or the ranks make different steps.

        If memory runs out all the same, a micro-batch or the step is retried with a smaller size.
        If a single sample does not fit, the error is raised. After an exception, KeyboardInterrupt
        included, nothing has changed.
        """
        refuse_nested(BACKWARD)
        try:
            self._refuse_place()
            self._prepared.refuse_loop()
            scaler = self._prepared.scaler if scaler is None else scaler
            loss = self._until_complete(partial(self._backward, inputs, targets, scaler, observe))
        except Exception as error:
            wrong = error_of_call(error, self._inputs, inputs, targets)
            if wrong is not None:
                raise wrong from None
            raise error
        self._inputs.norms.step(loss)
        return loss

    def _until_complete(self, attempt: Callable[[Attempts], Tensor]) -> Tensor:
        """Run attempts of a step on all ranks until one is complete; return its loss."""
        self._outputs = None  # the next ones take its memory
        attempts, session = Attempts(), self._rank_session
        run = partial(session.together, partial(attempt, attempts))
        with NothingHeld(), self._convolutions.step(waits=self._planner is not None):
            try:
                return until_complete(run, attempts, self._inputs.reach, session)
            except Exception as error:
                attempts.explain(error)
                raise

    def _backward(
        self,
        inputs: Any,
        targets: Any,
        scaler: Scaler | None,
        observe: Observer | None,
        attempts: Attempts,
    ) -> Tensor:
        start = perf_counter()
        batch, modules = self._arranger.batch(inputs, targets)
        leaves = self._inputs.leaves(modules, batch)
        before = Before(modules, leaves)
        written, own, still = once(renormalised, modules), self._inputs.state.moving(), leaves
        if written or own:
            own |= {id(module.weight) for _, module in written}
            still = [leaf for leaf in leaves if id(leaf) not in own]
        gradients = Gradients(leaves, wide=False, hooks=before.hooks)
        refuse = partial(refuse_written, still, versions_of(still))
        write = partial(self._deliver, gradients, refuse)
        with transaction(before, write) as delivery:
            before.suspend_hooks()
            step, signature, run_plan = self._arranged(
                batch, modules, before, gradients, attempts, scaler
            )
            step.scaler, step.observe, step.deliver = scaler, observe, delivery
            gradients.set_aside()
            with NoOptimizerStep(before), torch.enable_grad():
                loss, peak = self._measurement.run(self._planner, step, signature, modules, before)
        if self._planner is not None and signature is not None:
            n, failed = step.limit, step.retries > 0
            self._planner.took(signature, n, step.seconds, failed=failed, run_plan=run_plan)
        return self._note(step, loss, perf_counter() - start, run_plan, peak)

    def evaluate(
        self, inputs: Any, targets: Any = None, *, observe: Observer | None = None
    ) -> Tensor:
        """Return the loss of the full batch without gradients, one micro-batch at a time.

        The mode of the model does not change: call ``model.eval()`` before.

        Args:
            inputs: as in `backward`.
            targets: as in `backward`.
            observe: as in `backward`.

        Returns:
            The loss of the full batch, a detached 0-dim tensor.

        Raises:
            AnybatchError: as in `backward`.
        """
        try:
            self._refuse_place()
            return self._until_complete(partial(self._evaluate, inputs, targets, observe))
        except Exception as error:
            wrong = error_of_call(error, self._inputs, inputs, targets)
            if wrong is not None:
                raise wrong from None
            raise error

    def _evaluate(
        self,
        inputs: Any,
        targets: Any,
        observe: Observer | None,
        attempts: Attempts,
    ) -> Tensor:
        start = perf_counter()
        batch, modules = self._arranger.batch(inputs, targets)
        before = Before(modules, [])
        with transaction(before, self._rank_session.end) as delivery, torch.no_grad():
            step, signature, run_plan = self._arranged(batch, modules, before, None, attempts)
            step.observe, step.deliver = observe, delivery
            loss, peak = self._measurement.run(self._planner, step, signature, modules, before)
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
        attempts: Attempts,
        scaler: Scaler | None = None,
    ) -> Arranged:
        arranged = self._arranger.step(
            *(self._planner, batch, modules, before, gradients),
            micro_batch=self.micro_batch or 1,
            attempts=attempts,
            scaler=scaler,
        )
        self.micro_batch = arranged.step.global_batch.micro_batch
        if self._inputs.outputs:
            arranged.step.full_outputs = FullOutputs(inside=not self._inputs.loss.takes_outputs)
        return arranged

    def _deliver(self, gradients: Gradients, check: Callable[[], None]) -> None:
        check()
        amended = self._rank_session.end()
        if amended:
            gradients.amend(amended)
        gradients.deliver()

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
        trying = "" if run_plan is None else run_plan.trying
        facts = of_run(step, self._runner.failed_at(step), trying)
        memory = None if run_plan is None else run_plan.memory
        left = None if run_plan is None else run_plan.offload
        # A last partial batch that needs no splitting does not change the plan of the others
        # (test_last_and_plan_say_what_the_step_was).
        now, samples = (facts, memory, self._convolutions.count), step.global_batch.size
        if now != self._facts and (facts.divided or samples >= self._samples):
            self._samples = samples
            self._facts, decided = now, decide(facts, memory, left)
            states = None if self._plan is None else self._plan.states
            kernels = None if self._planner is None else self._planner.workspaces.kernels
            convolutions = self._convolutions.record(kernels)
            self._plan = replace(decided, states=states, convolutions=convolutions)
            if self._steady is None or (samples >= self._samples and step.limit == self._fastest):
                self._steady = self._plan
        if step.moved and not self._left:
            self._left = True
            where = step.spill if left is None else left.where
            folder = file_folder(where, self._inputs.device)
            if folder is not None:
                say(
                    f"{show_bytes(step.moved)} leave for a file in {folder} in a step and return, "
                    "because memory holds less: print(engine.plan) tells more"
                )
        self._outputs = None if step.full_outputs is None else step.full_outputs.of_step(loss)
        self._last = partial(  # made when somebody reads it
            StepReport,
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
            timed: find the fastest of the sizes that fit, by steps that are restored. Default True.
            offload: as in `anybatch.plan`, from now on. Default None: as before, at first "auto".
            spill: as in `anybatch.plan`.

        Raises:
            ValueError: `offload` or `spill` is not valid.
            AnybatchError: as in `backward`.
        """
        if offload is not None or spill is not None:
            self._spill = spill_of(offload or "auto", spill)
            self._spill.refuse_on(self._inputs.device)
            if self._planner is not None:
                self._planner.spill = self._spill
        refuse_place(self._inputs.device, outside=False)
        run = partial(self._foresee, inputs, targets, timed=timed)
        attempt = partial(self._rank_session.foreseeing, run)
        with self._convolutions.step(waits=True):
            return until_complete(attempt, Attempts(), self._inputs.reach)

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
        """Return the timeline of the last planned step: live bytes by owner at every event.

        Returns:
            The timeline; it prints as a chart, and its peak is the forecast of the plan. A batch
            planned from the forecast of a larger one has the timeline of that one. None without a
            forecast: before the first batch, and where a plan was passed.

        Example:
            >>> engine.foresee(inputs, targets)
            >>> print(engine.timeline())
        """
        return self._arranger.timeline()

    def __repr__(self) -> str:
        plan = self.plan
        found = "the first step makes its plan"
        if plan is not None:
            found = f"{plan.mechanism}, micro-batches of {plan.micro_batch}"
        return f"<Engine of {type(self.model).__name__}: {found}>"

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
                run_plan = self._arranger.plan_for(planner, signature, batch, modules)
                while (
                    timed
                    and planner.trial(signature)
                    and self._arranger.tried(planner, run_plan, batch, modules)
                ):
                    run_plan = self._arranger.plan_for(planner, signature, batch, modules)
            step = self._runner.step(batch, modules, before, gradients, run_plan.micro_batch)
        found = decide(of_foreseen(step, run_plan, leaves), run_plan.memory, run_plan.offload)
        return replace(found, convolutions=self._convolutions.record(planner.workspaces.kernels))


BACKWARD = Engine.backward.__code__
"""Identifies a step on the stack, even if the method is wrapped later."""
