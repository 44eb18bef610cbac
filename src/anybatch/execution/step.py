"""Step as the mechanisms use it: micro-batches in, forward, backward, gradients out.

Streaming and gathering order these methods differently; each is defined here once. The state for
repeating a step is in `anybatch.execution.attempts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from anybatch.core import modules, pytree
from anybatch.core.barrier import ForwardOf, Way, looks_here
from anybatch.core.batch import (
    Batch,
    Hung,
    LazyBatch,
    MicroBatch,
    TensorBatch,
    copied,
    doubts_of,
    first_rows,
    hanging,
    hangs,
)
from anybatch.core.modules import call_model
from anybatch.core.plan_sections import Capacity, LockstepLimits
from anybatch.core.python_state import NO_ATTRIBUTES, Attributes
from anybatch.core.retry import Retry
from anybatch.core.rng import RNGState
from anybatch.distributed.fsdp import Sharded
from anybatch.distributed.global_batch import devices_of
from anybatch.errors import LossError, NotExactError, NotYetError
from anybatch.execution.attempts import Repeatable
from anybatch.execution.full_batch_rng.mode import FullBatchRNG
from anybatch.execution.gradients import outside_autocast, run_backward
from anybatch.execution.prefetch import DeviceLink, HostLink, feed
from anybatch.execution.proof.inspected import Familiar
from anybatch.execution.signature import ModulesInTiles
from anybatch.execution.single_sample import check_single, refuse_single_sample
from anybatch.execution.strides import one_row
from anybatch.loss.base import Loss, Part, Scope, Total
from anybatch.loss.calls import Derivatives, LossCalls
from anybatch.loss.chunked import Deferring, stand_ins, with_few_columns
from anybatch.loss.chunked_rows import ChunkedLosses
from anybatch.loss.traced_model import OtherFormError
from anybatch.memory.fakes import is_fake


class Scaler(Protocol):
    """The part of ``torch.amp.GradScaler`` that a step needs."""

    def scale(self, outputs: Tensor) -> Tensor:
        """Return the tensor times the present scale."""


class MicroBatchOffloader(Protocol):
    """Interface that offloads the saved tensors of a micro-batch."""

    def run(self, work: Callable[[], None], size: int, *, first: bool) -> None:
        """Do `work`, forward and backward of `size` samples; the `first` finds no sums yet."""


NO_GRAPH = (
    "forward must make the graph that it differentiates, because it also runs where gradients are "
    "off, and torch.autograd.grad found none: write `with torch.enable_grad():` around that part "
    "of it"
)

WITHOUT_DATA = (
    "forward must not store tensors where they cannot be restored after a run on tensors without "
    "data, and its outputs have no data: it stored one in a place that no name of its code leads "
    "to. Store tables in attributes of the model or of a module file, or give micro_batch >= the "
    "batch size"
)

HOOKED = "support saved tensor hooks"
"""In torch's error if torch.func differentiates under offloading."""

NO_HOOKS = (
    "where saved tensors are offloaded, forward must not differentiate with torch.func (grad, "
    "vjp, jacrev, hessian), whose saved tensors torch does not offload: give more memory, so that "
    "none is offloaded, or use torch.autograd.grad"
)

IN_CHECKPOINT = (
    "a loss that the model returns must be computed outside of torch.utils.checkpoint, which "
    "recomputes it where it is not traced: let the checkpoint end before the loss"
)

LENGTHS = "rows were loaded of another length than those for which numbers of samples were compared"
CHANGES = "forward builds another graph from step to step"


@dataclass(kw_only=True)
class Step(Repeatable):
    """A mini-batch in its pass through the model; `Repeatable` has its data and progress.

    Attributes:
        signature: dimensions and dtypes of the batch, and the modes of the modules.
        familiar: inspections in steps of its signature; None compares nothing.
        attributes: plain ones of the model, as they were when the step began.
        own: ids of the leaves that the step itself made.
        discover: gets the roots of every backward of the first step of a signature.
        batchnorm: "exact" or "local".
        local: BatchNorm layers that normalise each micro-batch by itself.
        found: the loss as the mechanism has found it, in words.
        accumulator: gradients are summed in an accumulator, once the step is divided.
        lanes: micro-batches wait for each other where samples meet.
        counters: the ``num_batches_tracked`` of the model.
        slots: attributes and containers that every lane has of its own.
        ways: where samples meet in forward, from earlier inspections; None if inspected in this
            step.
        singles: forward normalises some samples by themselves, each as a row of channels.
        coupled: in lanes, the loss needs all outputs at once.
        lane_bytes: bytes that waiting lanes may hold on the device; None offloads nothing.
        budgeted: `lane_bytes` follows from a budget; else the bytes of lanes were not forecast.
        tight: the budget has no bytes for all forwards of an inspection.
        inside: bytes for all lanes, the running one included; None does not limit that one.
        spill: where lanes are offloaded to: "host", "file" or the folder of a file; None is the
            store nearest to the device.
        moved: bytes that left the device and returned.
        remade: bytes that were computed again instead.
        clocked: its seconds are wanted. Default False.
        seconds: of its computing, where they are; None (default) before.
        watch: sees each micro-batch as it comes, and may end the step.
        private: ids of leaves of this batch, and of sharded parameters: no other rank has their
            gradients.
        sharded: takes the gradients of a model that was spread; None where there is none.
        offloader: offloads saved tensors; None (default) offloads none.
        deliver: writes the results of the step, once all ranks have made it. Default: nothing.
        begin: called where its mechanism begins. Default: nothing.
        sample: called where each backward begins. Default: nothing.
        calls: compares the state of the loss around its calls; None (default) where it has none.
        hanging: attributes and classes of outputs that their rows would not have.
        chunked: reports losses of wide linear maps that are computed in chunks; None (default)
            where none is.
        tiles: runs modules in tiles of tokens; None (default) runs all of them whole.
    """

    link: DeviceLink
    signature: Any = None
    batchnorm: str = "exact"
    accumulator: bool = False
    lane_bytes: Capacity = None
    budgeted: bool = False
    private: frozenset[int] = frozenset()
    sharded: Sharded | None = None
    calls: LossCalls | None = None
    chunked: ChunkedLosses | None = None
    tiles: ModulesInTiles | None = None

    # State, written later: an `__init__` of sixty fields takes long. (`int` does nothing.)
    scaler: Scaler | None = field(default=None, init=False)
    familiar: Familiar | None = field(default=None, init=False)
    attributes: Attributes = field(default=NO_ATTRIBUTES, init=False)
    own: set[int] = field(default_factory=set, init=False)
    discover: Callable[[list[Tensor]], None] | None = field(default=None, init=False)
    local: int = field(default=0, init=False)
    found: str = field(default="", init=False)
    lanes: bool = field(default=False, init=False)
    counters: list[Tensor] = field(default_factory=list, init=False)
    slots: list[Any] = field(default_factory=list, init=False)
    ways: tuple[Way, ...] | None = field(default=None, init=False)
    singles: bool = field(default=False, init=False)
    coupled: bool = field(default=False, init=False)
    inside: LockstepLimits | None = field(default=None, init=False)
    spill: str | None = field(default=None, init=False)
    moved: int = field(default=0, init=False)
    remade: int = field(default=0, init=False)
    clocked: bool = field(default=False, init=False)
    seconds: float | None = field(default=None, init=False)
    watch: Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]] = field(default=iter, init=False)
    offloader: MicroBatchOffloader | None = field(default=None, init=False)
    deliver: Callable[[], object] = field(default=int, init=False)
    begin: Callable[[], object] = field(default=int, init=False)
    sample: Callable[[], object] = field(default=int, init=False)
    hanging: set[Hung] = field(default_factory=set, init=False)
    tight: bool = field(default=False, init=False)
    _collected: int = field(default=0, init=False)

    @property
    def reads(self) -> bool:
        """Whether Python reads numbers of tensors, as far as inspections show."""
        return self.traits.sizes is not None and (
            self.traits.sizes.reads or bool(self.traits.sizes.values)
        )

    def restart(self) -> None:
        """Begin again, the state of the loss as it was, too."""
        super().restart()
        self._collected = 0
        if self.calls is not None:
            self.calls.restart()

    def totals(self, outputs: Any, micro: MicroBatch) -> list[Total] | None:
        """Return the terms of the full batch's loss; None where it couples samples.

        A loss that changes state of its own is taken so, too: it is called once.
        """
        scope = self.scope(outputs, micro)
        try:
            if self.calls is None:
                return self._in_time(self.loss.totals(scope))
            if self.calls.again:
                self.compare(outputs, micro)
            scope.values = self.calls.values  # read when the loss is called
            return self._in_time(self.calls.watched(partial(self.loss.totals, scope)))
        except OtherFormError as error:
            if self.just_inspected or self.familiar is None:
                raise LossError(str(error)) from error
            raise Retry("inspection") from error

    @property
    def bends(self) -> bool:
        """Whether backward may clamp or round gradients, so it begins from the true weights."""
        sizes = self.traits.sizes
        return sizes is not None and sizes.backward and self.gradients is not None

    def _in_time(self, totals: list[Total] | None) -> list[Total] | None:
        """Return the terms, or None where a backward that bends would begin from an estimate."""
        if not (self.bends and totals and totals[0].denominator is None):
            return totals
        if self.loss.takes_outputs:
            return None
        self.traits.doubt("a backward that is not torch's own begins from an estimated denominator")
        return totals

    def parts(self, outputs: Any, micro: MicroBatch, totals: list[Total]) -> list[Part]:
        """Return a micro-batch's part of each of `totals`."""
        calls, declares = self.calls, self.loss.declares
        if not declares and (calls is None or calls.idle):
            return self.loss.parts(outputs, micro, totals)
        call = partial(self.loss.parts, outputs, micro, totals)
        with self._derivatives(None) if declares else nullcontext():
            found = call() if calls is None else calls.called(call)
        if calls is None:
            return found
        if calls.changed:
            calls.noted += calls.changed
            raise Retry("coupled")
        return found

    def full_loss(self, outputs: Any, micro: MicroBatch) -> Tensor:
        """Return the loss of the full batch, from all outputs."""
        call = partial(self.loss.full_batch, outputs, micro)
        with self.buffers.unmoved(in_loss=True), self._derivatives(self.own):
            return call() if self.calls is None else self.calls.called(call)

    def _derivatives(self, outputs: set[int] | None) -> AbstractContextManager[Any]:
        """Return a context that refuses derivatives which a part of the batch does not have.

        Only where the loss may have some: in a function mode torch calls other functions
        (test_a_change_between_steps_counts).
        """
        if not self.divided or self.calls is None or not self.calls.differentiates:
            return nullcontext()
        return Derivatives(lambda: {*map(id, self.model.parameters()), *self.private}, outputs)

    def compare(self, outputs: Any, micro: MicroBatch, *, once: bool = False) -> None:
        """Compare a custom loss with itself, which the step calls once only where so flagged."""
        if self.calls is not None and self.loss.takes_outputs:
            trains = self.gradients is not None
            if self.budgeted:  # two calls more of all rows were not foreseen
                outputs, micro = first_rows(outputs, micro)
            self.calls.compare(self.loss.full_batch, outputs, micro, trains=trains, single=once)

    def nothing(self) -> Tensor:
        """Return the loss of no samples: 0, as the parameters are."""
        floating = (p for p in self.model.parameters() if p.is_floating_point() or p.is_complex())
        like = next(floating, None)
        if like is None:
            return torch.zeros(())
        return torch.zeros((), dtype=like.dtype.to_real(), device=like.device)

    @property
    def count(self) -> int:
        """N_S, the number of micro-batches."""
        return -(-self.batch.size // self.micro_batch)

    def feed(self, batch: Batch | None = None, *, ahead: bool = True) -> Iterator[MicroBatch]:
        """Yield the micro-batches on the device; of `batch`, if some leaves of it are enough.

        `ahead` is `anybatch.execution.prefetch.feed`'s.
        """
        loaded = (batch or self.batch).micro_batches(self.micro_batch)
        if self.draws is not None:
            loaded = self.draws.watch(loaded)
        elif batch is None and type(self.link) is HostLink and self.link.holds(self.batch):
            return self.watch(loaded)  # views of what is there already
        return feed(self.watch(loaded), self.link, ahead=ahead)

    def scope(self, outputs: Any, first: MicroBatch) -> Scope:
        """Return the `Scope` of the loss: the facts on the full batch after its first forward."""
        full_batch = self.batch if isinstance(self.batch, TensorBatch) else None
        layout = self.traits.layout or ()
        if type(outputs) is not Tensor or len(layout) > 1:
            self.check_structure(outputs)
        samples = self.global_batch.size if self.global_batch.several else 0
        return Scope(self.batch.size, self.count, full_batch, outputs, first, layout, samples)

    def check_structure(self, outputs: Any) -> None:
        """Run the step again if the outputs are not those of the inspection."""
        if self.traits.layout and len(self.traits.layout) != len(pytree.flat(outputs)):
            raise Retry("inspection")

    def forward(
        self,
        micro: MicroBatch,
        *,
        begins: bool = True,
        ends: bool = True,
        within: AbstractContextManager[Any] | None = None,
    ) -> Any:
        """Run the model on a micro-batch, its buffers as the undivided batch would find them.

        Args:
            micro: the rows.
            begins: nothing of their forward has been run.
            ends: nothing of it is left to run.
            within: context of the call of the model, without the handling of buffers. Default:
                none.
        """
        if not self.divided:
            with within or nullcontext():
                return self.call(micro, None)
        none = self.buffers.none
        if begins and not none:
            self.buffers.before()
        if within is None:
            outputs = self.call(copied(micro) if self.traits.copies else micro, self.draws)
        else:
            # A mode that follows samples has to see them copied, too
            # (test_inputs_that_forward_writes_to_remain_after_a_second_inspection).
            with within:
                outputs = self.call(copied(micro) if self.traits.copies else micro, self.draws)
        if ends and not none:
            self.buffers.after()
        return outputs

    def inspected(self, micro: MicroBatch, **how: Any) -> Any:
        """Run `forward` for an inspection, which needs few columns of wide linear maps."""
        forward = partial(self.forward, micro, **how)
        chunked = self.chunked
        return forward() if chunked is None else with_few_columns(forward, chunked.nbytes)

    def call(self, micro: MicroBatch, draws: FullBatchRNG | None) -> Any:
        """Call the model, with full-batch draws where `draws` is not None."""
        divided = self.divided
        if micro.size == 1:
            one_row()
        forward = partial(call_model, self.model, micro.inputs)
        forward = forward if self.tiles is None else partial(self.tiles.run, self.model, forward)
        forward = forward if self.chunked is None else partial(stand_ins, forward)
        if divided and type(self.loss).run is not Loss.run:
            forward = partial(self.loss.run, forward, micro.inputs)
        with ForwardOf(micro.size, standalone=divided):
            try:
                outputs = forward() if draws is None else draws.forward(micro, forward)
            except RuntimeError as error:
                refuse_single_sample(error, micro, self.batch.size)
                if HOOKED in str(error) and not looks_here():
                    raise NotYetError(NO_HOOKS) from error
                if torch.is_grad_enabled() or modules.NONE not in str(error):
                    raise
                raise NotExactError(NO_GRAPH) from error
            except (ValueError, IndexError, TypeError) as error:
                refuse_single_sample(error, micro, self.batch.size)
                raise
        if micro.size == 1 and self.traits.layout and divided:
            check_single(outputs, self.traits.layout)
        bare = type(outputs) is Tensor and not outputs.__dict__
        if divided and not bare and self.loss.takes_outputs and hangs(outputs):
            self.hanging |= hanging(outputs, "outputs", classes=True)
        return outputs

    def in_chunks(self) -> AbstractContextManager[Any]:
        """Return the context in which wide linear maps and their losses are computed in chunks."""
        return nullcontext() if self.chunked is None else Deferring(self.chunked, planned=True)

    def under(self, work: Callable[[MicroBatch], None]) -> Callable[[MicroBatch], None]:
        """Return forward and backward of a micro-batch; offload saved tensors where planned."""
        offloader, gradients = self.offloader, self.gradients
        if offloader is None or gradients is None:
            return work

        def offloaded(micro: MicroBatch) -> None:
            offloader.run(partial(work, micro), micro.size, first=not gradients.summed())

        return offloaded

    def scaled(self, weights: list[Tensor]) -> list[Tensor]:
        """Return the weights times the present scale, where there is a scaler."""
        if self.scaler is None or self.gradients is None:
            return weights
        return [self.scaler.scale(weight).to(weight.dtype) for weight in weights]

    def pull(
        self,
        roots: list[Tensor],
        gradients: list[Tensor],
        into: list[Tensor] | None = None,
        *,
        ends: bool = True,
    ) -> int:
        """Accumulate gradients of leaves from those of `roots`; return how many roots have a graph.

        Roots without a graph are left out. Where `into` is given, no other leaf gets anything. A
        part that does not end its micro-batch is in no sum before `collect`.
        """
        for root in roots:
            if not root.requires_grad:
                flows = [one.requires_grad for one in roots]
                roots, gradients = [*compress(roots, flows)], [*compress(gradients, flows)]
                break
        if self.gradients is None or not roots:
            return 0
        if {*map(type, roots)} != {Tensor}:
            _refuse_fakes(roots, self.gradients.parameters)
        if self.discover is not None:
            self.discover(roots)
        new = self._collected <= self.coupled  # the first of the step, and of a coupled loss
        if new and self.familiar is not None and self.divided and self.batch.size:
            self.recognise(found=self.familiar.has_graph(roots, looked=self.just_inspected))
        self.phase = "backward"
        self.sample()
        on = roots[0].device.type
        autocast = torch.is_autocast_enabled(on)
        run = outside_autocast(on, run_backward) if autocast else run_backward
        try:
            run(roots, gradients, into)
        except CheckpointError as error:
            if self.loss.takes_outputs:
                raise
            raise LossError(IN_CHECKPOINT) from error
        if ends:
            self.collect()
        return len(roots)

    def recognise(self, *, found: bool) -> None:
        """Have the model inspected again where a graph or a kernel was not `found` among others."""
        if found or self.familiar is None:
            return
        if not self.familiar.full:
            raise Retry("inspection")
        self.traits.doubt(CHANGES)

    @property
    def just_inspected(self) -> bool:
        """Whether this step has traced samples."""
        return self.traits.looked == self.traits.steps

    @property
    def hung(self) -> set[Hung]:
        """Attributes of its batch and outputs that their rows lack, as far as observed."""
        if isinstance(self.batch, TensorBatch | LazyBatch):
            return self.hanging | self.batch.hanging
        return self.hanging

    def doubt_batch(self) -> None:
        """Add the doubts about its batch that loading has shown."""
        if isinstance(self.batch, TensorBatch) and self.batch.bare and not self.hanging:
            inputs, targets = self.batch.inputs, self.batch.targets
            if not (inputs.__dict__ or targets.__dict__):
                return  # `hung`, without a call for each
        found, sizes = doubts_of(self.hung), self.traits.sizes
        if isinstance(self.batch, LazyBatch):
            found = (*self.batch.doubts, *found)
            if sizes is not None and sizes.counts and self.batch.shapes - sizes.lengths:
                found = (*found, LENGTHS)
        if found:
            self.traits.doubt(*found)

    def collect(self) -> None:
        """Add the gradients of a micro-batch to the sum."""
        assert self.gradients is not None
        self._collected += 1
        if self._collected == 1 + self.coupled:  # what they held may be large
            self.attributes = NO_ATTRIBUTES
        self.phase = "summed"
        self.gradients.collect()

    def offer(self) -> None:
        """Offer other ranks to send gradients before the last backward has ended.

        Not with offloaded saved tensors: gradients are sent when these are freed.
        """
        # Hooks get the sum over all ranks.
        if self.gradients is None or self.gradients.hooks.suspended:
            return
        if self.global_batch.several and self.offloader is None:
            every = self.gradients.parameters
            self.global_batch.offer([p for p in every if id(p) not in self.private])

    def backward(
        self,
        losses: list[Tensor],
        weights: list[Tensor],
        micro: MicroBatch,
        factor: Callable[[], float | Tensor],
    ) -> int:
        """Accumulate the gradient of ``sum weights * losses``, scaled where there is a scaler.

        That of the last micro-batch sends completed sums to the other ranks.

        Args:
            losses: numerators of a micro-batch.
            weights: of each.
            micro: the micro-batch.
            factor: returns the missing factor of the sums, if all ranks have agreed to send early.

        Returns:
            How many of `losses` have a gradient.
        """
        gradients = self.gradients
        if self.scaler is not None:
            weights = self.scaled(weights)
        last = self.global_batch.several and micro.begin + micro.size == self.batch.size
        if gradients is None or not last:
            return self.pull(losses, weights)
        old = gradients.summed()
        with self.global_batch.during(lambda some: gradients.take(some, factor(), old)):
            return self.pull(losses, weights)

    def finish(self, factor: float | Tensor = 1.0) -> None:
        """Make the sum of the gradients over all ranks ready, this rank's times `factor`."""
        if self.gradients is not None:
            shared = self._of_all if self.global_batch.several or self.sharded else None
            self.gradients.finish(factor, shared)

    def _of_all(self, sums: list[tuple[Tensor, Tensor | None]]) -> list[Tensor | None]:
        """Return the sums over all ranks; the sums of `private` leaves are not reduced."""
        every = iter(self.global_batch.gradients([s for s in sums if id(s[0]) not in self.private]))
        totals = [total if id(leaf) in self.private else next(every) for leaf, total in sums]
        return totals if self.sharded is None else self.sharded.cut(sums, totals)

    def fire_hooks(self) -> None:
        """Fire the hooks of the leaves, once: a failure from here on is not retried."""
        if self.gradients is None or not self.gradients.hooks.suspended:
            return
        several = self.global_batch.several
        rng = RNGState.now() if several else None
        self.phase = "fired"
        on, fire = self.device.type, self.gradients.fire
        run = outside_autocast(on, fire) if torch.is_autocast_enabled(on) else fire
        run(in_order=not several)
        if rng is not None and not RNGState.now().same_as(rng):
            raise NotExactError(
                "a hook on a parameter must compute the same on all ranks, and one drew random "
                "numbers, which differ from rank to rank: draw them from a generator with the "
                "same seed on every rank"
            )

    def rows(self, outputs: Any, begin: int, size: int, of: int) -> Any:
        """Return `size` rows of outputs that hold `of`; outputs without samples are unchanged.

        Outputs next to a loss have no layout: there the first dimension decides.
        """
        axes = iter(self.traits.axes)

        def slice_rows(tensor: Tensor) -> Tensor:
            first = 0 if tensor.dim() and tensor.shape[0] == of else None
            axis = next(axes) if self.traits.layout else first
            return tensor if axis is None else tensor.narrow(axis, begin, size)

        return pytree.map_tensors(slice_rows, outputs)

    def agree(self) -> None:
        """See that all ranks have drawn alike, where they draw for each other."""
        if self.draws is not None and self.global_batch.several:
            self.global_batch.agree(devices_of(self.model))


def _refuse_fakes(roots: list[Tensor], parameters: list[Tensor]) -> None:
    """Refuse losses without data of a model that has data."""
    if any(map(is_fake, roots)) and not any(map(is_fake, parameters)):
        raise NotExactError(WITHOUT_DATA)


def check_trains(roots_with_grad: int) -> None:
    """Refuse a loss that no parameter can lower."""
    if roots_with_grad == 0:
        raise LossError(
            "the loss must depend on a parameter that requires grad, and no micro-batch's does: "
            "unfreeze a parameter, or call engine.evaluate"
        )
