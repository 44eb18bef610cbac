"""Runner of a step by its mechanism: undivided, streaming, two-pass or lockstep; with retry.

Which mechanism a batch needs is found out by its first step (`anybatch.execution.look`, and the
loss that is watched) and remembered for the kind of batch; so is a size at which memory ran out.

    whole ──out of memory──> divided        streamed ──the loss couples samples──> gathered
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anybatch.core.batch import Batch, TensorBatch
from anybatch.core.hanging import refuse_missing
from anybatch.core.kept import Attributes
from anybatch.core.memory import Inside, Room
from anybatch.core.modules import Modules, eager, in_training, renormalised
from anybatch.core.norm.alone import AloneNorms
from anybatch.core.norm.counters import (
    counters,
    names_of_norms,
    refuse_lanes,
    refuse_scripted_norms,
    running_statistics,
    training_batchnorms,
)
from anybatch.core.norm.sites import OtherSitesError
from anybatch.core.plan import Away
from anybatch.core.rng import Dice
from anybatch.core.undo import Before
from anybatch.distributed.everyone import Alone, Everyone
from anybatch.distributed.unison import OffScriptError
from anybatch.engine.given import LOSS, Given
from anybatch.errors import NotExactError
from anybatch.execution.buffers import ForwardBuffers, put_back_moved
from anybatch.execution.collated import Collates
from anybatch.execution.device import Link, link_to
from anybatch.execution.dice.learn import attributes_of, learn
from anybatch.execution.dice.refuse import refuse_scripted
from anybatch.execution.dice.shared import Laws, Shared, UnknownDrawError
from anybatch.execution.dice.whole import WholeDice
from anybatch.execution.discover import discoverer
from anybatch.execution.full_size import compare_new_sizes, doubt_larger
from anybatch.execution.gather import COUPLED, gather
from anybatch.execution.gradients import Gradients
from anybatch.execution.look import AGAIN, look, quietly
from anybatch.execution.proof.familiar import Familiar
from anybatch.execution.records import Seen, SeenInLanes
from anybatch.execution.repeatable import OutputsChangedError, SmallerPlanError, Tries
from anybatch.execution.retry import whole_step
from anybatch.execution.step import Step
from anybatch.execution.stream import stream
from anybatch.execution.strides import standard_strides
from anybatch.execution.undivided import undivided
from anybatch.lockstep.alike import refuse_looks
from anybatch.lockstep.batchnorm import Tracked
from anybatch.lockstep.late import Singles, listening
from anybatch.lockstep.lockstep import lockstep
from anybatch.lockstep.parts import values_of_a_part
from anybatch.lockstep.slots import LaneLook
from anybatch.loss.declared import Algorithm1
from anybatch.loss.watched import NotAPartError
from anybatch.memory.spill import maker, require_place, require_room
from anybatch.offload.keeping import Keeping


class Runner:
    """Runner of steps, with the findings of earlier ones.

    Args:
        given: model, loss and optimizer.
    """

    def __init__(self, given: Given) -> None:
        self._given = given
        self._link: tuple[torch.device, Link] | None = None
        self._seen: dict[Any, Seen] = {}
        self._laws: dict[Any, Laws] = {}
        self._shrunk: dict[Any, tuple[int, int]] = {}
        self._most: dict[Any, int] = {}
        self._walked: set[Any] = set()
        self._familiar: dict[Any, Familiar] = {}
        self._keeping: tuple[Any, Keeping] | None = None
        self._singles = Singles()
        self._collates = Collates()

    def step(
        self,
        batch: Batch,
        modules: Modules,
        before: Before,
        gradients: Gradients | None,
        micro_batch: int,
        *,
        apart: bool = False,
        room: Room = 0,
        everyone: Everyone | None = None,
        away: Away | None = None,
        tries: Tries | None = None,
    ) -> Step:
        """Return a step that has not begun.

        Args:
            batch: the mini-batch.
            modules: every module that it runs.
            before: the state before it.
            gradients: where its gradients come together; None runs forward only.
            micro_batch: samples in a micro-batch; fewer where memory ran out at that.
            apart: sum gradients in an accumulator. Default False.
            room: bytes that waiting micro-batches may hold on the device; None lets all of it stay.
                Default 0.
            everyone: the batch over all ranks; None (default) is one process.
            away: which saved tensors leave; None (default) where all of them stay.
            tries: what is kept of it from an earlier plan; None (default) where there was none.

        Raises:
            NotExactError: the batch would have to be divided, and must not be.
        """
        signature = self.signature(batch, modules, trains=gradients is not None)
        shared = self._given.rng == "batch" and everyone is not None and everyone.several
        start = Dice.now() if shared else before.dice
        fits = self._shrunk.get(signature, (0, micro_batch))[1]
        step = Step(
            model=self._given.model,
            loss=self._given.loss,
            batch=batch,
            micro_batch=min(micro_batch, fits),
            link=self._link_to_model(),
            buffers=ForwardBuffers([], set()),
            gradients=gradients,
            signature=signature,
            batchnorm=self._given.batchnorm,
            dice=start,
            start=start,
            apart=apart,
            room=room,
            everyone=everyone or Alone(batch.size),
            private=frozenset(map(id, [*self._given.rows_leaves(batch), *self._given.shards])),
            sharded=self._given.sharded,
            tries=tries or Tries(),
            calls=self._given.calls(first=not self._made(signature)),
        )
        if step.calls is not None:
            before.patched.insert(0, step.calls.restart)
        if self._given.rng == "batch":
            step.draws = self._draws(step)
        if step.divided:
            self._divide(step, modules, before)
        if away is not None and step.lanes:
            self._require(away)
            step.inside, step.spill = Inside(away.rooms[1], away.later, away.makes), away.where
        elif away is not None:
            step.away = self._away(away)
        return step

    def _require(self, away: Away) -> None:
        """Require a store with the capacity for offloaded tensors."""
        require_place(away.store, self._given.device)
        require_room(away.most, away.where)

    def _away(self, away: Away) -> Keeping:
        """Return where saved tensors go, as they went in earlier steps."""
        self._require(away)
        device = self._given.device
        kind = device, away.where
        if self._keeping is None or self._keeping[0] != kind:
            self._keeping = kind, Keeping(maker(away.where, device), device)
        keeping = self._keeping[1]
        keeping.begin(away.rooms)
        return keeping

    def close(self) -> None:
        """Release the file or the host memory of offloaded saved tensors."""
        if self._keeping is not None:
            self._keeping[1].close()
            self._keeping = None

    def signature(self, batch: Batch, modules: Modules, *, trains: bool) -> Any:
        """Return the signature of a step: dimensions, dtypes, modes and direction."""
        modes = tuple(in_training(module) for _, module in modules)
        return self._given.kinds(batch), modes, not trains, self._given.batchnorm

    def _made(self, signature: Any) -> bool:
        """Return whether a step of this signature has been made."""
        return signature in self._seen or signature in self._walked

    def coupled(self, signature: Any) -> bool:
        """Return whether earlier steps have found a coupled loss."""
        seen = self._seen.get(signature)
        return seen is not None and seen.coupled

    def refuse_division(self, modules: Modules) -> None:
        """Raise an error before the run where a batch cannot be divided.

        Raises:
            NotExactError: naming the BatchNorm layers that cannot wait for each other, and why, or
                an embedding to which forward writes.
        """
        if self._given.batchnorm != "local":
            refuse_scripted_norms(modules)
        written = renormalised(modules)
        if written:
            raise NotExactError(
                "parameters must not change before the whole batch is done, and forward writes to "
                f"{written[0][0] or 'the model'}.weight (max_norm={written[0][1].max_norm}): leave "
                "max_norm out and call torch.renorm on the weight after each step, or give "
                "micro_batch >= the batch size"
            )
        names = self._given.meets(modules)
        if names:
            refuse_lanes(modules, names, literal=isinstance(self._given.loss, Algorithm1))

    def failed_at(self, step: Step) -> int:
        """Remember the size that a step ended with; return that at which memory ran out, or 0."""
        failed, _ = self._shrunk.get(step.signature, (0, 0))
        if step.retries:
            failed = step.failed
            self._shrunk[step.signature] = failed, step.limit
        if step.tries.most:
            self._most[step.signature] = step.tries.most
        return failed

    def most(self, batch: Batch, modules: Modules, *, trains: bool) -> int:
        """Return the most samples to plan for, where memory ran out undivided; 0 is no limit."""
        if not self._most:
            return 0
        return self._most.get(self.signature(batch, modules, trains=trains), 0)

    def run(self, step: Step, modules: Modules, before: Before) -> Tensor:
        """Run the step, and while memory runs out run it again, smaller.

        Returns:
            The loss of the whole batch, a detached 0-dim tensor.
        """
        run = partial(self._delivered, step, modules, before)
        try:  # no closures: the frames of an error would hold what they close over
            with standard_strides():
                loss = whole_step(step, run, partial(self._prepare, step, modules, before))
            if isinstance(step.away, Keeping):
                step.moved += step.away.moved
                step.remade += step.away.remade
        finally:
            step.discover = None
        return loss

    def _delivered(self, step: Step, modules: Modules, before: Before) -> Tensor:
        """Run the step and deliver it, or raise: until then the others may have it run again."""
        loss = self._once(step, modules, before)
        step.agree()
        step.everyone.moves(step.buffers)
        step.fire_hooks()
        step.deliver()
        return loss

    def _once(self, step: Step, modules: Modules, before: Before) -> Tensor:
        if not step.divided:
            if step.signature not in self._walked:  # once: a graph is walked for it
                step.discover = discoverer(step, before, self._given.closure)
            loss = undivided(step)
            self._walked.add(step.signature)
            return loss
        if step.batchnorm != "local":
            refuse_scripted_norms(modules)
        while True:
            try:
                if step.lanes:
                    with eager(), values_of_a_part():  # what is compiled would be with lanes
                        return self._in_lanes(step, modules, before)
                return self._divided(step, before)
            except AttributeError as error:
                refuse_missing(error, step.hung)
                raise
            except UnknownDrawError:
                step.begin_again()
                with (
                    AloneNorms(step.counters, rows=step.everyone.size)
                    if step.lanes
                    else nullcontext()
                ):
                    learn(step)
                step.restart()
                step.everyone.again(coupled=False)

    def _draws(self, step: Step) -> WholeDice:
        """Return the dispatch mode of full-batch draws for the micro-batches of a step."""
        if step.divided:
            refuse_scripted(self._given.model)
        laws = self._laws.setdefault(step.signature, Laws())
        # An interrupted step has asked and learnt nothing (test_a_ctrl_c_while_draws_are_learnt).
        laws.asked.clear()
        modules = {id(module) for module in self._given.model.modules()}
        everyone = step.everyone
        return WholeDice(Shared(laws, everyone.size, modules, everyone.begin, everyone.several))

    def _prepare(self, step: Step, modules: Modules, before: Before) -> None:
        """Restore all but the observations already made, for a retry at a smaller size.

        Raises:
            SmallerPlanError: nobody has foreseen what the batch holds when it is divided.
        """
        put_back_moved(before.buffers)
        whole = not step.divided
        step.begin_again()
        if not whole:
            return
        self._divide(step, modules, before)
        if step.budgeted:
            tries = step.tries
            tries.retries, tries.failed, tries.most = step.retries, step.failed, step.limit
            raise SmallerPlanError

    def _in_lanes(self, step: Step, modules: Modules, before: Before) -> Tensor:
        """Let micro-batches wait for each other, where samples meet in BatchNorm."""
        names = names_of_norms(modules)
        tracked = Tracked(step.counters, names)
        if not step.batch.size:
            return self._without_samples(step, tracked, names)
        seen = self._seen.get(step.signature)
        lanes = None if seen is None else seen.lanes
        if lanes is None or not lanes.current or step.steps in AGAIN:
            lanes, step.ways = self._look_at_lanes(step, modules, before, lanes), None
        else:
            step.ways = lanes.ways
            self._at_new_sizes(step)
        self._collates.ask(step)
        step.slots, step.singles = list(lanes.slots), lanes.singles
        try:
            loss = lockstep(step, tracked)
        except NotAPartError:  # some micro-batch shows what the first one did not
            step.everyone.again(coupled=True)
            step.begin_again()
            step.coupled, tracked = True, Tracked(step.counters, names)
            loss = lockstep(step, tracked)
        except OutputsChangedError:
            if seen is None:
                raise
            self._forget(step)
            return self._in_lanes(step, modules, before)
        except (OtherSitesError, OffScriptError):
            if seen is not None:
                self._seen[step.signature] = replace(seen, lanes=replace(lanes, current=False))
            step.everyone.again(coupled=False, others=True)
            step.begin_again()
            return self._in_lanes(step, modules, before)
        step.buffers.refuse_moved(tracked.all())
        self._familiar[step.signature].keep(reads=step.reads)
        step.doubt_batch()
        self._seen[step.signature] = Seen(
            step.coupled,
            frozenset(),
            step.layout,
            step.copies,
            lanes=lanes,
            doubts=step.doubts,
            looked=step.looked,
            sizes=step.sizes,
            steps=step.steps,
            mixed=step.mixed,
        )
        return loss

    def _without_samples(self, step: Step, tracked: Tracked, names: dict[int, str]) -> Tensor:
        """Run lockstep without samples, and again where other ranks change their collectives."""
        try:
            return lockstep(step, tracked)
        except OffScriptError:
            step.everyone.again(coupled=False, others=True)
            step.begin_again()
        return lockstep(step, Tracked(step.counters, names))

    def _look_at_lanes(
        self, step: Step, modules: Modules, before: Before, known: SeenInLanes | None
    ) -> SeenInLanes:
        """Run the first inspection of a model in lanes, and return its findings."""
        with attributes_of(step):
            watch = LaneLook(modules)
            with AloneNorms(step.counters, watch, rows=step.everyone.size) as alone:
                look(step, watch)
            of_two = len(alone.called) * 2 // max(watch.forwards, 2)  # a third is of rows seen
            refuse_looks(alone.called[:of_two])
            slots = watch.slots()
        step.buffers.refuse_moved({})
        step.discover = discoverer(step, before, self._given.closure)
        return (known or SeenInLanes()).after(slots, watch.way(), singles=alone.singles > 0)

    def _divided(self, step: Step, before: Before) -> Tensor:
        """Run a streaming step, or a two-pass one where a coupled loss is recorded or detected."""
        seen = self._seen.get(step.signature)
        if not step.batch.size:
            return self._streamed_or_gathered(step, None)
        if seen is None or step.steps in AGAIN:
            with self._given.hearing(), self._listening(before), attributes_of(step):
                look(step)
        else:
            self._at_new_sizes(step)
        self._collates.ask(step)
        if seen is None:
            step.discover = discoverer(step, before, self._given.closure)
        try:
            # what the first look has not come to
            with self._given.hearing(), self._listening(before):
                return self._streamed_or_gathered(step, seen)
        except OutputsChangedError:
            if seen is None:
                raise
        self._forget(step)
        return self._divided(step, before)

    def _at_new_sizes(self, step: Step) -> None:
        """Compare the full batch with its parts again, where its sizes are new."""
        known = step.sizes
        if known is None or not known.matter:
            return
        if not known.new(step.everyone.size, step.micro_batch):
            doubt_larger(step)
            return
        with self._given.hearing(), attributes_of(step), quietly():
            compare_new_sizes(step)

    def _forget(self, step: Step) -> None:
        """Have the model looked at again, as it was when the step began."""
        del self._seen[step.signature]
        step.everyone.again(coupled=False)
        step.begin_again()
        step.attributes.put_back()
        step.coupled = False

    def _listening(self, before: Before) -> AbstractContextManager[None]:
        """Return a context that detects batch normalisation outside of modules."""
        if self._given.batchnorm != "exact":
            return nullcontext()
        return listening(before, self._singles)

    def _streamed_or_gathered(self, step: Step, seen: Seen | None) -> Tensor:
        loss = None if step.coupled else stream(step)
        if loss is None:
            step.coupled = True
            step.begin_again()
            loss = gather(step)
        if not step.batch.size:  # a rank without samples has seen nothing
            return loss
        moving = step.buffers.moving if seen is None else seen.moving | step.buffers.moving
        drew = step.draws is not None or (step.drew_any() if seen is None else not seen.still)
        coupled = step.found == COUPLED
        self._familiar[step.signature].keep(reads=step.reads)
        step.doubt_batch()
        self._seen[step.signature] = Seen(
            coupled,
            moving,
            step.layout,
            step.copies,
            not drew,
            doubts=step.doubts,
            looked=step.looked,
            sizes=step.sizes,
            steps=step.steps,
            mixed=step.mixed,
        )
        return loss

    def _divide(self, step: Step, modules: Modules, before: Before) -> None:
        """Prepare the parts of a step that only a divided one needs."""
        self.refuse_division(modules)
        if step.everyone.several and isinstance(self._given.loss, Algorithm1):
            raise NotExactError(
                "Algorithm 1 to the letter knows one process, and there are several: leave "
                "Loss.algorithm1 out"
            )
        seen, local = self._known(step, modules), self._given.batchnorm == "local"
        step.lanes = bool(self._given.meets(modules)) or step.everyone.lanes
        if step.calls is not None:
            step.calls.divided = True
        step.coupled = step.everyone.coupled
        step.counters = counters(modules) if step.lanes else []
        step.local = 0 if step.lanes else len(training_batchnorms(of_model(modules)))
        step.buffers = ForwardBuffers(
            [b for b in before.buffers if not b.path.startswith(LOSS)],
            running_statistics(of_model(modules)) if step.lanes or local else set(),
            seen.moving if seen else None,
        )
        if seen is not None:
            step.layout, step.copies, step.still = seen.layout, seen.copies, seen.still
            step.doubts, step.looked, step.steps = seen.doubts, seen.looked, seen.steps + 1
            step.sizes, step.mixed = seen.sizes, seen.mixed
        if step.gradients is not None:
            step.gradients.divide(apart=step.apart)
            step.familiar = self._familiar[step.signature]
            step.attributes = Attributes(module for _, module in of_model(modules))

    def _known(self, step: Step, modules: Modules) -> Seen | None:
        """Return the findings of earlier steps, if the model is unchanged since its inspection."""
        familiar = self._familiar.setdefault(step.signature, Familiar())
        seen = self._seen.get(step.signature)
        batch = step.batch if isinstance(step.batch, TensorBatch) else None
        given: list[Any] = [] if batch is None else [batch.inputs]
        if step.loss.declares:  # any other is watched in every step
            every = of_model(modules) + [(LOSS + p, m) for p, m in self._given.state.modules]
            given += [] if batch is None else [batch.targets]
            known = familiar.has_model(every, step.loss.functions(), given)
        else:
            known = familiar.has_model(of_model(modules), given=given)
        if known or seen is None:
            return seen
        step.steps = seen.steps + 1
        del self._seen[step.signature]
        return None

    def _link_to_model(self) -> Link:
        device = self._given.device
        if self._link is None or self._link[0] != device:
            self._link = (device, link_to(device))
        return self._link[1]


def of_model(modules: Modules) -> Modules:
    """Return the modules of the model, without those of the loss."""
    return [(path, module) for path, module in modules if not path.startswith(LOSS)]
