"""Arrangement of a step before it runs: its batch over all ranks, its size, its budget.

Every rank forecasts its own memory, all use the smallest micro-batch, and if samples meet on one
rank they meet on all. The bytes of a rank may depend on the samples of all of them, so it plans for
the most that they have had, and states that in the first collective; if there are more now, or
fewer would fit, they exchange once more.

    step 1:  how many? 13 ──> plan for 13 ── begin     steps of 13 or fewer: begin
    step 9:  planned for 13; they are 20 ──> plan for 20 ── begin

The result is a `Step`, which a mechanism then runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from math import inf, isinf
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anybatch.core import accelerator, pytree
from anybatch.core.accelerator import finish
from anybatch.core.batch import Batch, LazyBatch, TensorBatch
from anybatch.core.hooks import LeafHooks
from anybatch.core.modules import Modules
from anybatch.core.oom import out_of_memory
from anybatch.core.optimizers import allocated
from anybatch.core.plan import Facts
from anybatch.core.retry import Retry, until_complete
from anybatch.core.status import STATUS
from anybatch.core.transaction import Before
from anybatch.core.units import show_samples
from anybatch.distributed.handshake import ANY, Here, hooks_of, named_parameters
from anybatch.distributed.local_batch import LocalBatch
from anybatch.engine.executor import Joined, Runner
from anybatch.engine.inputs import Detecting, StepInputs
from anybatch.engine.rank_session import RankSession
from anybatch.errors import BudgetError, NotExactError
from anybatch.execution.attempts import Attempts
from anybatch.execution.buffers import put_back_moved
from anybatch.execution.gradients import HALF, Gradients, gradient_dtype
from anybatch.execution.proof.declared import DECLARED
from anybatch.execution.signature import Case, RunPlan, Signature
from anybatch.execution.step import Scaler, Step
from anybatch.execution.two_pass import COUPLED
from anybatch.lockstep.scheduler import NoThreadError
from anybatch.lockstep.sync_batchnorm import Adaptive
from anybatch.memory.fakes import paged
from anybatch.memory.ledger import StepTimeline
from anybatch.memory.limits import segments_of
from anybatch.planner.planner import Planner
from anybatch.planner.rehearsal import put_back

Planned = tuple[Signature, RunPlan]
"""The signature of a plan, and the plan."""


class Arranged(NamedTuple):
    """A step that has not begun.

    Attributes:
        step: the step.
        signature: of its batch; None where nothing was planned.
        run_plan: how it is run, within the budget; None where nothing was planned.
    """

    step: Step
    signature: Signature | None
    run_plan: RunPlan | None


class Arranger:
    """Makes steps of batches."""

    def __init__(self, inputs: StepInputs, runner: Runner, rank_session: RankSession) -> None:
        self._inputs, self._runner, self._rank_session = inputs, runner, rank_session
        self._last: tuple[Planner, Signature] | None = None

    def batch(self, inputs: Any, targets: Any) -> tuple[Batch, Modules]:
        """Return the mini-batch of this rank, and every module that it runs."""
        batch = self._inputs.batch(inputs, targets, several=self._rank_session.several)
        if not self._rank_session.several:
            self._inputs.norms.choose(batch.size)
        return batch, self._inputs.modules()

    def step(
        self,
        planner: Planner | None,
        batch: Batch,
        modules: Modules,
        before: Before,
        gradients: Gradients | None,
        *,
        micro_batch: int,
        attempts: Attempts,
        scaler: Scaler | None = None,
    ) -> Arranged:
        """Return the step, in micro-batches as large as the budget allows on every rank.

        Without a planner they have `micro_batch` samples. `gradients` is None where only forward is
        run; `attempts` are findings of earlier attempts, and `scaler` is as in `backward`.
        """
        trains, meeting = gradients is not None, self._inputs.meets(modules)
        signature = self._runner.signature(batch, modules, trains=trains)
        # A plan that was passed in knows a coupled loss from the first step on; a forecast may be
        # wrong (test_a_step_is_run_from_nothing_but_the_text_of_a_plan).
        coupled = planner is not None and planner.two_pass
        coupled = coupled or attempts.coupled or self._runner.coupled(signature)
        facts = bool(meeting), trains, coupled
        plan = None
        if planner is not None and batch.size:
            plan = partial(self._planned, planner, batch, modules, gradients, attempts.most)
        if self._rank_session.several:
            here = Here(batch.size, micro_batch, ANY, *facts)
            join = partial(self._join, here, signature, modules, scaler, before.hooks)
            global_batch, planned = self._together(join, plan, micro_batch, trains)
        else:
            planned = None if plan is None else plan(0)
            n = micro_batch if planned is None else planned[1].micro_batch
            here = Here(batch.size, n, ANY, *facts)
            global_batch = self._rank_session.join(here, signature, [])
        plan_signature, run_plan = planned or (None, None)
        n = global_batch.micro_batch
        if run_plan is not None and run_plan.micro_batch != n:
            run_plan = replace(run_plan, micro_batch=n)
        step = self._runner.step(
            *(batch, modules, before, gradients, n),
            run_plan=run_plan,
            attempts=attempts,
            joined=Joined(global_batch, signature, meeting),
        )
        if planner is not None and run_plan is not None:
            if step.lanes or step.offloader is not None:
                step.spill = step.spill or planner.spill.where(step.device)
            if isinstance(batch, LazyBatch):
                step.watch = self._inputs.reach.watch
        return Arranged(step, plan_signature, run_plan)

    def _planned(
        self,
        planner: Planner,
        batch: Batch,
        modules: Modules,
        gradients: Gradients | None,
        most: int,
        global_samples: int,
    ) -> Planned:
        """Return the signature and plan of a batch, for this many samples of all ranks."""
        signature = self.signature(batch, modules, gradients, most=most)
        if global_samples:
            signature = replace(signature, global_samples=global_samples)
        try:
            return signature, self.plan_for(planner, signature, batch, modules, follow=True)
        except BudgetError as error:
            if signature.most:
                error.add_note(
                    f"undivided, {show_samples(signature.size)} were predicted to fit, and memory "
                    "ran out: the bytes of the step depend on the values of its batch, or other "
                    "memory is in use"
                )
            raise

    def _together(
        self,
        join: Callable[..., LocalBatch],
        plan: Callable[[int], Planned] | None,
        micro_batch: int,
        trains: bool,  # noqa: FBT001
    ) -> tuple[LocalBatch, Planned | None]:
        """Return the batch over all ranks, and how this one runs its share."""
        rank_session, adaptive = self._rank_session, isinstance(self._inputs.norms, Adaptive)
        total = 0
        while True:
            planned, covers = None, ANY
            most = rank_session.most(trains=trains)
            if adaptive and not total:
                covers = 0
            elif plan is not None:
                covers = most
                try:
                    planned = plan(most) if most else None
                except (BudgetError, NotExactError):
                    if most == total:
                        raise
                    covers = total  # what does not fit beside so many may fit beside these
                    planned = plan(total) if total else None
            n = micro_batch if planned is None else planned[1].micro_batch
            global_batch = join(n, covers)
            if global_batch.settled:
                return global_batch, planned
            total = global_batch.size
            self._inputs.norms.choose(total)

    def signature(
        self, batch: Batch, modules: Modules, gradients: Gradients | None, *, most: int = 0
    ) -> Signature:
        """Return the signature of a plan for a single-process step.

        Without `gradients` only forward is run. A micro-batch may have `most` samples; 0 (default)
        is the limit of earlier steps.
        """
        trains, held = gradients is not None, paged()
        found = self._inputs.leaves(modules, batch) if gradients is None else gradients.parameters
        there = {id(p.grad): p.grad for p in found if p.grad is not None and not held.holds(p.grad)}
        before = sum(map(allocated, there.values()))
        signature = self._inputs.signature(batch, modules, trains=trains, before=before)
        if self._last is not None and self._last[1] == signature:
            signature = self._last[1]  # found in dicts without a comparison
        most = most or self._runner.most(batch, modules, trains=signature.trains)
        return replace(signature, most=most) if most and most < signature.size else signature

    def plan_for(
        self,
        planner: Planner,
        signature: Signature,
        batch: Batch,
        modules: Modules,
        *,
        follow: bool = False,
    ) -> RunPlan:
        """Return how a batch is run within the budget, or as an earlier start to `follow` did."""
        self._last = planner, signature
        planned = planner.planned(signature) if follow else None
        if planned is not None:
            return planned
        planning = STATUS.of("planning the step", "micro_batch= or plan= skips this")
        with planning, Detecting(self._inputs):
            return planner.plan_for(
                signature,
                lambda: replace(
                    self._inputs.case(batch, modules, trains=signature.trains),
                    global_samples=signature.global_samples,
                ),
                self._inputs.optimizer,
                lambda: self._runner.refuse_division(modules),
                follow=follow,
            )

    def tried(self, planner: Planner, run_plan: RunPlan, batch: Batch, modules: Modules) -> bool:
        """Run a trial step of the last planned batch for its planner, and restore all state.

        Return whether it could be run: not where the batch is loaded on the way.
        """
        assert self._last is not None
        if planner.writes(self._last[1]) and isinstance(batch, TensorBatch):
            pair = (batch.inputs, batch.targets)
            inputs, targets = pytree.map_tensors(Tensor.clone, pair)
            batch = TensorBatch(inputs, targets, batch.size)
        try:
            seconds = seconds_of_step(self._inputs, batch, modules, run_plan)
        except Exception as error:
            if planner.gives_up(self._last[1], error):
                return True
            raise
        if seconds is None:
            return False
        signature, n = self._last[1], run_plan.micro_batch
        for _ in range(1 if run_plan.offload is None else 2):  # the first one counts as recorded
            planner.took(signature, n, seconds, failed=isinf(seconds))
        return True

    def recall(self, n: int) -> None:
        """Use the size that an earlier run has chosen for the last planned batch."""
        assert self._last is not None
        planner, signature = self._last
        planner.recall(n, signature)

    def timeline(self) -> StepTimeline | None:
        """Return the step that was planned last as it passes; None where none was foreseen."""
        if self._last is None:
            return None
        planner, signature = self._last
        return planner.timeline(signature)

    def _join(
        self,
        here: Here,
        signature: Any,
        modules: Modules,
        scaler: Scaler | None,
        hooks: LeafHooks,
        micro_batch: int,
        covers: int,
    ) -> LocalBatch:
        """Return the batch over all ranks."""
        here = here._replace(micro_batch=micro_batch, covers=covers)
        named, scale = named_parameters(modules, self._inputs.optimizer), 1.0
        if scaler is not None:
            scale = float(scaler.scale(torch.ones((), device=self._inputs.device)))
        return self._rank_session.join(here, signature, named, scale, hooks_of(named, hooks))


# Seconds of a step that does not train, for a plan without a training: all state is restored.
#
# Not the first one is timed: only that inspects the batch, starts threads and creates files.

LONG = 0.5
"""Seconds of a step that is timed once, after the first."""

RUNS = 3
"""Steps that are timed, of which the median counts."""

RECORDED = 2
"""Steps with offloading that get ready: one is recorded, and one is planned from the record."""

FOR_EVER = 5.0
"""Seconds of a warm-up step above which its time counts: its start-up is a small part."""


def seconds_of_step(
    inputs: StepInputs, batch: Batch, modules: Modules, run_plan: RunPlan
) -> float | None:
    """Time a step as it is planned; gradients, buffers and RNG state are restored.

    Returns:
        Seconds, infinitely many where it ran out of memory or threads; None for a batch that is
        loaded on the way, which can be run once only.
    """
    case = inputs.case(batch, modules, trains=True)
    if case.lazy:
        return None
    runner = Runner(inputs)  # of its own: what it finds out is not yet the engine's
    try:
        with put_back(replace(case, lanes=False)) as before, torch.enable_grad():

            def once() -> float:
                attempts = Attempts()  # another plan is needed where samples meet elsewhere
                run = partial(_attempt, runner, case, batch, modules, before, run_plan, attempts)
                return until_complete(run, attempts, beyond=("meeting",))

            return _warm(once, 1 if run_plan.offload is None else RECORDED)
    except Exception as error:
        if not isinstance(error, NoThreadError) and not out_of_memory(error):
            raise
    finally:
        runner.close()
    return inf


def _attempt(
    runner: Runner,
    case: Case,
    batch: Batch,
    modules: Modules,
    before: Before,
    run_plan: RunPlan,
    attempts: Attempts,
) -> float:
    """Return the seconds of an attempt of a step that begins without gradients."""
    put_back_moved(before.buffers)
    before.rng.put_back()
    for leaf in case.leaves:
        leaf.grad = None
    gradients, n = Gradients(case.leaves, wide=False), run_plan.micro_batch
    step = runner.step(batch, modules, before, gradients, n, run_plan=run_plan, attempts=attempts)
    step.coupled |= attempts.coupled
    finish(case.device)
    start = perf_counter()
    try:
        runner.run(step, modules, before)
    except Retry as retry:
        step.begin_again()
        if retry.reason == "memory":
            return inf
        raise
    finish(case.device)
    return inf if step.retries else perf_counter() - start


def _warm(once: Callable[[], float], steps: int) -> float:
    """Return the seconds after the first `steps`: the median of a few, or of one if it is long."""
    for _ in range(steps):
        first = once()
        if first > FOR_EVER:  # out of memory, too
            return first
    return once() if first > LONG else median(once() for _ in range(RUNS))


# Facts behind a plan's reasons, of a step that was run or of one that is forecast.


def of_run(step: Step, failed: int, trying: str) -> Facts:
    """Return the facts of a step that was run.

    Args:
        step: the step.
        failed: samples at which memory ran out.
        trying: the search that it was a part of, in words; nothing where it was in none.
    """
    gradients, divided = step.gradients, step.count > 1
    own = divided and step.draws is None and not isinstance(step.batch, LazyBatch)
    return Facts(
        micro_batch=step.limit,
        divided=divided,
        loss=step.found,
        coupled=step.found == COUPLED and not step.lanes,
        late=isinstance(step.batch, LazyBatch),
        half=gradients.half if gradients is not None else (),
        before=gradients is not None and gradients.added,
        local=step.local,
        separate_sums=step.accumulator and divided and gradients is not None,
        failed=failed,
        lanes=step.lanes and divided,
        segments="" if accelerator.of(step.device).host else segments_of(step.device).in_words(),
        looked=max(
            step.traits.looked, step.traits.sizes.step if step.traits.sizes is not None else 0
        ),
        doubts=(
            *step.traits.doubts,
            *step.loss.doubts,
            *([DECLARED] if step.loss.believed else []),
        ),
        draws=own and not step.traits.still and step.drew_any(),
        trying=trying,
    )


def of_foreseen(step: Step, run_plan: RunPlan, leaves: Iterable[Tensor]) -> Facts:
    """Return the facts of a step to be run as planned, on these leaf tensors."""
    leaves = list(leaves)
    dtypes = {gradient_dtype(leaf) for leaf in leaves}
    return Facts(
        micro_batch=run_plan.micro_batch,
        divided=step.count > 1,
        loss=run_plan.loss,
        coupled=run_plan.coupled,
        late=isinstance(step.batch, LazyBatch),
        half=tuple(sorted(str(d).removeprefix("torch.") for d in dtypes if d in HALF)),
        before=any(leaf.grad is not None for leaf in leaves),
        local=step.local,
        separate_sums=run_plan.accumulator,
        failed=0,
        lanes=run_plan.lanes,
        segments=segments_of(step.device).in_words(),
    )
