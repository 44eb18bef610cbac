"""Runner of one attempt of a step, by its mechanism: undivided, streaming, two-pass or lockstep.

Which mechanism a batch needs is found out by its first step (`anybatch.execution.inspection`, and
the loss that is traced) and recorded for its signature; so is a size at which memory ran out. An
attempt that finds out that it must be another one ends with a `Retry`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anybatch.core.accelerator import finish
from anybatch.core.batch import Batch, TensorBatch, refuse_missing
from anybatch.core.modules import Modules, eager, once, renormalised, training_modes
from anybatch.core.norm import (
    NonReducingNorms,
    counters,
    names_of_norms,
    refuse_lanes,
    refuse_scripted_norms,
    running_statistics,
    training_batchnorms,
)
from anybatch.core.plan import OffloadPlan
from anybatch.core.plan_sections import LockstepLimits
from anybatch.core.python_state import NO_ATTRIBUTES, Attributes
from anybatch.core.retry import Retry
from anybatch.core.rng import RNGState
from anybatch.core.transaction import Before
from anybatch.distributed.local_batch import LocalBatch
from anybatch.engine.inputs import LOSS, Detecting, StepInputs
from anybatch.errors import NotExactError
from anybatch.execution.attempts import Attempts
from anybatch.execution.buffers import ForwardBuffers
from anybatch.execution.collated import Collates
from anybatch.execution.few_rows import ROW_ERRORS, quietly
from anybatch.execution.full_batch_rng.draw_layout import attributes_of, learn
from anybatch.execution.full_batch_rng.kernels import refuse_scripted
from anybatch.execution.full_batch_rng.mode import FullBatchRNG, Laws, SharedDraws
from anybatch.execution.full_size import (
    compare_new_sizes,
    doubt_beyond,
    pair_of,
    refuse_few_rows,
)
from anybatch.execution.gradients import Gradients
from anybatch.execution.inspection import AGAIN, inspect_model
from anybatch.execution.prefetch import DeviceLink, link_to
from anybatch.execution.proof.inspected import Familiar
from anybatch.execution.signature import RunPlan
from anybatch.execution.step import Step
from anybatch.execution.streaming import discoverer, memory_is_too_small, stream, undivided
from anybatch.execution.strides import StandardStrides
from anybatch.execution.tiles import Tiles
from anybatch.execution.traits import LaneTraits, Traits
from anybatch.execution.two_pass import gather
from anybatch.lockstep.batchnorm import BatchNormDetector, Singles, Tracked, values_of_a_part
from anybatch.lockstep.coupled import refuse_looks
from anybatch.lockstep.lockstep import lockstep
from anybatch.lockstep.scheduler import LaneInspection
from anybatch.lockstep.shared_state import refuse_shared_state
from anybatch.loss.base import Algorithm1
from anybatch.loss.chunked_rows import chunks_of
from anybatch.memory.fakes import paged
from anybatch.memory.spill import maker, require_place, require_space
from anybatch.offloading.saved_tensors import Keeping


class Joined(NamedTuple):
    """A batch over all ranks, and findings about the share of this one.

    Attributes:
        global_batch: the batch over all ranks.
        signature: of the batch here.
        meeting: names of the layers where samples meet.
    """

    global_batch: LocalBatch
    signature: Any
    meeting: list[str]


class Runner:
    """Runner of steps, with the findings of earlier ones."""

    def __init__(self, inputs: StepInputs) -> None:
        self._inputs = inputs
        self._link: tuple[torch.device, DeviceLink] | None = None
        self._traits: dict[Any, Traits] = {}
        self._laws: dict[Any, Laws] = {}
        self._shrunk: dict[Any, tuple[int, int]] = {}
        self._most: dict[Any, int] = {}
        self._walked: set[Any] = set()
        self._familiar: dict[Any, Familiar] = {}
        self._keeping: tuple[Any, Keeping] | None = None
        self._singles = Singles()
        self._tiles: dict[int, Tiles] = {}
        self._collates = Collates()

    def step(
        self,
        batch: Batch,
        modules: Modules,
        before: Before,
        gradients: Gradients | None,
        micro_batch: int,
        *,
        run_plan: RunPlan | None = None,
        attempts: Attempts | None = None,
        joined: Joined | None = None,
    ) -> Step:
        """Return a step that has not begun.

        Without `gradients` only forward is run. Micro-batches have `micro_batch` samples, or fewer
        where memory ran out at that. `run_plan` is the plan that the step obeys; `joined` is the
        batch over all ranks. By default nothing was planned or tried before, in one process.

        Raises:
            NotExactError: the batch would have to be divided, and must not be.
        """
        if joined is None:
            signature = self.signature(batch, modules, trains=gradients is not None)
            joined = Joined(LocalBatch(batch.size), signature, self._inputs.meets(modules))
        global_batch, signature, _ = joined
        inputs, attempts = self._inputs, attempts or Attempts()
        start = RNGState.now() if inputs.rng == "batch" and global_batch.several else before.rng
        fits = self._shrunk.get(signature, (0, micro_batch))[1]
        first = signature not in self._traits and signature not in self._walked
        step = Step(
            model=inputs.model,
            loss=inputs.loss,
            batch=batch,
            micro_batch=min(micro_batch, fits, attempts.limit or micro_batch),
            link=self._link_to_model(),
            buffers=ForwardBuffers([], set()),
            gradients=gradients,
            signature=signature,
            batchnorm=inputs.norms.now,
            rng=start,
            start=start,
            accumulator=run_plan is not None and run_plan.accumulator,
            lane_bytes=0 if run_plan is None else run_plan.memory.waiting_capacity,
            global_batch=global_batch,
            private=frozenset(map(id, [*inputs.rows_leaves(batch), *inputs.shards])),
            sharded=inputs.sharded,
            attempts=attempts,
            calls=inputs.calls(first=first),
        )
        self._prepare(step, modules, before, joined, run_plan)
        return step

    def _prepare(
        self,
        step: Step,
        modules: Modules,
        before: Before,
        joined: Joined,
        run_plan: RunPlan | None,
    ) -> None:
        """Prepare the optional parts of a step: its plan, full-batch draws, micro-batches."""
        if step.calls is not None:
            before.patched.insert(0, step.calls.restart)
        if run_plan is not None:
            memory = run_plan.memory
            step.budgeted, step.chunked = True, chunks_of(memory.chunked)
            # Parameters that leave hold at once what the rehearsed forwards need, and no more.
            rehearsed = step.retries == 0 and not paged().every
            step.tight = not (rehearsed and 0 < memory.inspection <= memory.budget)
            size = memory.tile
            step.tiles = self._tiles.setdefault(size, Tiles(size)) if size else None
        if self._inputs.rng == "batch":
            step.draws = self._draws(step)
        if step.divided:
            self._divide(step, modules, before, joined.meeting)
        if run_plan is not None and run_plan.offload is not None and step.gradients is not None:
            self._offload(step, run_plan.offload)

    def _offload(self, step: Step, offload: OffloadPlan) -> None:
        """Let lanes be paged, or saved tensors be offloaded, as planned."""
        if step.lanes:
            self._require(offload)
            limits = offload.capacity[1], offload.segment_extra, offload.segment_kernel
            step.inside, step.spill = LockstepLimits(*limits), offload.where
        else:
            step.offloader = self._offloader(offload)

    def _require(self, offload: OffloadPlan) -> None:
        """Require a store with the capacity for offloaded tensors."""
        require_place(offload.store, self._inputs.device)
        require_space(offload.most, offload.where)

    def _offloader(self, offload: OffloadPlan) -> Keeping:
        """Return the offloader of saved tensors, the same one for all steps."""
        self._require(offload)
        device = self._inputs.device
        place = device, offload.where
        if self._keeping is None or self._keeping[0] != place:
            self._keeping = place, Keeping(maker(offload.where, device), device)
        keeping = self._keeping[1]
        keeping.begin(offload.capacity)
        return keeping

    def close(self) -> None:
        """Release the file or the host memory of offloaded saved tensors."""
        if self._keeping is not None:
            self._keeping[1].close()
            self._keeping = None

    def signature(self, batch: Batch, modules: Modules, *, trains: bool) -> Any:
        """Return the signature of a step: dimensions, dtypes, modes and direction."""
        form = batch.form if isinstance(batch, TensorBatch) else ("lazy",)
        return form, once(training_modes, modules), not trains, self._inputs.norms.now

    def coupled(self, signature: Any) -> bool:
        """Return whether earlier steps have found a coupled loss."""
        traits = self._traits.get(signature)
        return traits is not None and traits.coupled

    def refuse_division(self, modules: Modules, meeting: list[str] | None = None) -> list[str]:
        """Return the names of the layers where samples meet; raise if a batch cannot be divided.

        Raises:
            NotExactError: naming the BatchNorm layers that cannot wait for each other, and why, or
                an embedding to which forward writes.
        """
        if self._inputs.norms.now != "local":
            once(refuse_scripted_norms, modules)
        written = once(renormalised, modules)
        if written:
            raise NotExactError(
                "parameters must not change before the full batch is done, and forward writes to "
                f"{written[0][0] or 'the model'}.weight (max_norm={written[0][1].max_norm}): leave "
                "max_norm out and call torch.renorm on the weight after each step, or give "
                "micro_batch >= the batch size"
            )
        names = self._inputs.meets(modules) if meeting is None else meeting
        if names:
            refuse_lanes(modules, names, literal=isinstance(self._inputs.loss, Algorithm1))
        return names

    def failed_at(self, step: Step) -> int:
        """Remember the size that a step ended with; return that at which memory ran out, or 0."""
        failed, _ = self._shrunk.get(step.signature, (0, 0))
        if step.retries:
            failed = step.attempts.failed
            self._shrunk[step.signature] = failed, step.limit
        if step.attempts.most:
            self._most[step.signature] = step.attempts.most
        return failed

    @property
    def limit(self) -> int:
        """The most samples of a micro-batch after memory has run out; 0 where it has not."""
        return min((limit for _, limit in self._shrunk.values()), default=0)

    def most(self, batch: Batch, modules: Modules, *, trains: bool) -> int:
        """Return the most samples to plan for, where memory ran out undivided; 0 is no limit."""
        if not self._most:
            return 0
        return self._most.get(self.signature(batch, modules, trains=trains), 0)

    def run(self, step: Step, modules: Modules, before: Before) -> Tensor:
        """Run one attempt of a step and deliver it.

        Returns:
            The loss of the full batch, a detached 0-dim tensor.

        Raises:
            Retry: it must be run again, another one.
        """
        outside, failure = sys.exception(), None
        try:  # no closures: the frames of an error would hold what they close over
            with StandardStrides():
                loss = self._computed(step, modules, before)
            if step.global_batch.several:
                step.agree()
                step.global_batch.moves(step.buffers)
            step.fire_hooks()
            step.deliver()  # until then the other ranks may have it run again
            if isinstance(step.offloader, Keeping):
                step.moved += step.offloader.moved
                step.remade += step.offloader.remade
        except Retry:
            raise
        except Exception as error:
            if not memory_is_too_small(step, error, outside):
                raise
            failure = error
        else:
            return loss
        finally:
            step.discover = None
        # Outside of the handler: in it, the frames that hold the failed attempt's tensors could not
        # be emptied (test_nothing_of_a_failed_attempt_is_in_memory_when_it_is_tried_again).
        step.shrink(failure)
        if step.budgeted and not step.divided:  # the bytes of a divided one were not forecast
            step.attempts.most = step.limit
        raise Retry("memory")

    def _computed(self, step: Step, modules: Modules, before: Before) -> Tensor:
        """Return the loss of a step; its gradients are ready."""
        if not step.divided:
            if step.signature not in self._walked:  # once: a graph is walked for it
                step.discover = discoverer(step, before, self._inputs.closure)
            loss = clocked(undivided, step)
            self._walked.add(step.signature)
            return loss
        try:
            if step.lanes:
                with eager(), values_of_a_part():  # what is compiled would be with lanes
                    return self._in_lanes(step, modules, before)
            return self._one_by_one(step, before)
        except AttributeError as error:
            refuse_missing(error, step.hung)
            raise
        except ROW_ERRORS as error:
            refuse_few_rows(step, error)
            raise
        except Retry as retry:
            self._learn(step, retry)
            raise

    def _learn(self, step: Step, retry: Retry) -> None:
        """Correct the findings of earlier steps by the reason that has ended this one."""
        traits, inspected = self._traits.get(step.signature), step.attempts.traits
        if retry.reason == "coupled":
            step.attributes.put_back()
            if inspected is not None and step.buffers.compared:
                inspected.moving = step.buffers.moving
        elif retry.reason == "inspection":  # the model as it was when the step began is inspected
            self._traits.pop(step.signature, None)
            step.attributes.put_back()
        elif retry.reason == "sites" and traits is not None and traits.lanes is not None:
            lanes = replace(traits.lanes, current=False)
            self._traits[step.signature] = replace(traits, lanes=lanes)
        elif retry.reason == "draws":
            step.begin_again()
            rows = step.global_batch.size
            with NonReducingNorms(step.counters, rows=rows) if step.lanes else nullcontext():
                learn(step)

    def _draws(self, step: Step) -> FullBatchRNG:
        """Return the dispatch mode of full-batch draws for the micro-batches of a step."""
        if step.divided:
            refuse_scripted(self._inputs.model)
        laws = self._laws.setdefault(step.signature, Laws())
        # An interrupted step has requested layouts and learnt none
        # (test_a_ctrl_c_while_draws_are_learnt_leaves_an_engine_that_can_go_on).
        if "draws" not in step.attempts.times:
            laws.requested.clear()
        modules = {id(module) for module in self._inputs.model.modules()}
        global_batch = step.global_batch
        return FullBatchRNG(
            SharedDraws(laws, global_batch.size, modules, global_batch.begin, global_batch.several)
        )

    def _in_lanes(self, step: Step, modules: Modules, before: Before) -> Tensor:
        """Let micro-batches wait for each other, where samples meet in BatchNorm."""
        tracked = Tracked(step.counters, names_of_norms(modules))
        if not step.batch.size:
            return lockstep(step, tracked)
        traits, inspected = self._findings(step)
        lanes = None if traits is None else traits.lanes
        if lanes is None or not lanes.current or (step.traits.steps in AGAIN and not inspected):
            lanes, step.ways = self._inspect_lanes(step, modules, lanes), None
        else:
            step.ways = lanes.ways
            self._at_new_sizes(step)
        if step.ways is None or inspected:
            step.discover = discoverer(step, before, self._inputs.closure)
            step.attempts.traits = replace(step.traits, moving=None, lanes=lanes)
        self._collates.ask(step)
        step.slots, step.singles = list(lanes.slots), lanes.singles
        loss = clocked(partial(lockstep, tracked=tracked), step)
        step.buffers.refuse_moved(tracked.all())
        self._remember(step, moving=frozenset(), still=False, lanes=lanes)
        return loss

    def _inspect_lanes(
        self, step: Step, modules: Modules, earlier: LaneTraits | None
    ) -> LaneTraits:
        """Run the first inspection of a model in lanes, and return its findings."""
        with attributes_of(step):
            watch = LaneInspection(modules)
            with NonReducingNorms(step.counters, watch, rows=step.global_batch.size) as norms:
                inspect_model(step, watch)
            of_two = len(norms.called) * 2 // max(watch.forwards, 2)  # a third is of rows seen
            refuse_looks(norms.called[:of_two])
            slots = watch.slots()
        with attributes_of(step):
            refuse_shared_state(step, slots)
        step.buffers.refuse_moved({})
        return (earlier or LaneTraits()).after(slots, watch.way(), singles=norms.singles > 0)

    def _one_by_one(self, step: Step, before: Before) -> Tensor:
        """Run a streaming step, or a two-pass one if the loss is coupled."""
        run = gather if step.coupled else stream
        if not step.batch.size:
            return run(step)
        traits, inspected = self._findings(step)
        if traits is None or (step.traits.steps in AGAIN and not inspected):
            with Detecting(self._inputs), self._batchnorm_detector(before), attributes_of(step):
                inspect_model(step)
            step.attempts.traits = replace(step.traits, moving=None)
        else:
            self._at_new_sizes(step)
        self._collates.ask(step)
        earlier = self._traits.get(step.signature)
        if earlier is None:
            step.discover = discoverer(step, before, self._inputs.closure)
        # Forward may call batch_norm where the inspection has not observed it
        # (test_only_some_micro_batches_is_refused).
        with Detecting(self._inputs), self._batchnorm_detector(before):
            loss = clocked(run, step)
        moving = step.buffers.moving
        if earlier is not None:
            moving |= earlier.moving or frozenset()
        drew = step.drew_any() if earlier is None else not earlier.still
        self._remember(step, moving=moving, still=not drew and step.draws is None)
        return loss

    def _findings(self, step: Step) -> tuple[Traits | None, bool]:
        """Return the findings that hold for a step, and whether they are of an attempt of it."""
        found = step.attempts.traits
        return found or self._traits.get(step.signature), found is not None

    def _remember(self, step: Step, **found: Any) -> None:
        """Record the findings of a step that is complete."""
        self._familiar[step.signature].keep(reads=step.reads)
        step.doubt_batch()
        vars(step.traits).update(coupled=step.coupled, **found)
        self._traits[step.signature] = step.traits

    def _at_new_sizes(self, step: Step) -> None:
        """Compare the full batch with its parts again, where its sizes are new."""
        compared = step.traits.sizes
        if compared is None or not compared.matter:
            return
        if not compared.new(*pair_of(step)):
            doubt_beyond(step)
            return
        with Detecting(self._inputs), attributes_of(step), quietly():
            compare_new_sizes(step)

    def _batchnorm_detector(self, before: Before) -> AbstractContextManager[None]:
        """Return a context that detects batch normalisation outside of modules."""
        if self._inputs.norms.now != "exact":
            return nullcontext()
        return BatchNormDetector(before, self._singles)

    def _divide(self, step: Step, modules: Modules, before: Before, meeting: list[str]) -> None:
        """Prepare the parts of a step that only a divided one needs."""
        names = self.refuse_division(modules, meeting)
        every = once(_of_model, modules)
        if step.global_batch.several and isinstance(self._inputs.loss, Algorithm1):
            raise NotExactError(
                "Algorithm 1 to the letter is for one process, and there are several: leave "
                "Loss.algorithm1 out"
            )
        traits, local = self._current_traits(step, every), step.batchnorm == "local"
        step.lanes = bool(names) or step.global_batch.lanes
        if step.calls is not None:
            step.calls.divided = True
        step.coupled = step.global_batch.coupled
        step.counters = counters(modules) if step.lanes else []
        step.local = len(training_batchnorms(every)) if local and not step.lanes else 0
        step.buffers = ForwardBuffers(
            [b for b in before.buffers if not b.path.startswith(LOSS)] if before.buffers else [],
            running_statistics(every) if step.lanes or local else set(),
            traits.moving if traits else None,
        )
        if traits is not None:
            # Those of an attempt of this step count it.
            step.traits = traits.of_next(more=step.attempts.traits is None)
        if step.gradients is not None:
            step.gradients.divide(accumulator=step.accumulator)
            step.familiar = self._familiar[step.signature]
            persons = once(_of_persons, modules)
            step.attributes = Attributes(persons) if persons else NO_ATTRIBUTES

    def _current_traits(self, step: Step, of_model: Modules) -> Traits | None:
        """Return the findings of earlier steps, if the model is unchanged since its inspection."""
        familiar = self._familiar.get(step.signature)
        if familiar is None:
            familiar = self._familiar[step.signature] = Familiar()
        traits, inspected = self._findings(step)
        batch = step.batch if isinstance(step.batch, TensorBatch) else None
        arguments: list[Any] = [] if batch is None else [batch.inputs]
        if step.loss.declares:  # any other is watched in every step
            every = of_model + [(LOSS + p, m) for p, m in self._inputs.state.modules]
            arguments += [] if batch is None else [batch.targets]
            recognised = familiar.has_model(every, step.loss.functions(), arguments)
        else:
            recognised = familiar.has_model(of_model, arguments=arguments)
        if recognised or traits is None or inspected:
            return traits
        step.traits.steps = traits.steps + 1
        step.attempts.other_model = True
        del self._traits[step.signature]
        return None

    def _link_to_model(self) -> DeviceLink:
        device = self._inputs.device
        if self._link is None or self._link[0] != device:
            self._link = (device, link_to(device))
        return self._link[1]


def _of_model(modules: Modules) -> Modules:
    """Return the modules of the model, without those of the loss."""
    return [(path, module) for path, module in modules if not path.startswith(LOSS)]


def _of_persons(modules: Modules) -> list[nn.Module]:
    """Return the modules of the model that may store something in their attributes."""
    return [
        one for _, one in _of_model(modules) if not type(one).__module__.startswith("torch.nn.")
    ]


def clocked(run: Callable[[Step], Tensor], step: Step) -> Tensor:
    """Run the mechanism of a step; record its seconds where they are wanted.

    What is found out only once, before it begins, is not in them.
    """
    step.begin()
    if not step.clocked:
        return run(step)
    finish(step.device)
    start = perf_counter()
    loss = run(step)
    finish(step.device)
    step.seconds = perf_counter() - start
    return loss
