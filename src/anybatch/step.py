"""One step as the mechanisms see it: micro-batches in, forward, backward, gradients out.

Streaming and gathering order these verbs differently; what a verb means stands here once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from anybatch import tree
from anybatch._memory import Inside, Room
from anybatch.batch import Batch, MicroBatch, TensorBatch, count_micro_batches
from anybatch.buffers import ForwardBuffers
from anybatch.device import Link, feed
from anybatch.dice.whole import WholeDice
from anybatch.errors import LossError
from anybatch.gradients import Gradients
from anybatch.loss.declared import Algorithm1, Loss, Scope
from anybatch.meeting import ForwardOf
from anybatch.memory_errors import forget
from anybatch.norm.sites import Way
from anybatch.ranks.dice import devices_of
from anybatch.ranks.everyone import Alone, Everyone
from anybatch.ranks.sharded import Sharded
from anybatch.reach import AgainError
from anybatch.rng import Dice

Observer = Callable[[Any, Any], None]


class Scaler(Protocol):
    """What of ``torch.amp.GradScaler`` a step needs."""

    def scale(self, outputs: Tensor) -> Tensor:
        """Return the tensor times the present scale."""


class Away(Protocol):
    """Lets what autograd saves in a micro-batch leave the device."""

    def run(self, work: Callable[[], None], size: int, *, first: bool) -> None:
        """Do `work`, forward and backward of `size` samples; the `first` finds no sums yet."""


Phase = Literal["forward", "backward", "summed", "shown"]
"""How far a micro-batch has come: "summed" when its gradients are in the sum."""


class Moment(NamedTuple):
    """What a micro-batch moves before its gradients, as it was when it began.

    Attributes:
        dice: None where steps of this kind draw nothing, so that nobody has to note them.
    """

    dice: Dice | None
    statistics: list[Tensor | None]


Layout = tuple[int | None, ...]
"""For each output tensor the dimension that holds the samples; None where none does."""


@dataclass
class Tries:
    """What is kept of a step however often it begins again, under another plan perhaps.

    Attributes:
        rows: how many an observer has seen.
        retries: how often memory ran out under another plan.
        failed: samples that were computed at once then.
        most: samples that may be from here on; 0 (default) is no limit.
    """

    rows: int = 0
    retries: int = 0
    failed: int = 0
    most: int = 0


class SmallerPlanError(AgainError):
    """Memory ran out undivided, as was planned: another plan is needed, for fewer samples."""


class OutputsChangedError(Exception):
    """The model returns other outputs than in the first step of its kind: look again."""


@dataclass
class Step:
    """A mini-batch on its way through the model.

    Attributes:
        micro_batch: N_mu, samples that are loaded at once.
        gradients: where gradients come together; None runs forward only.
        layout: where the outputs hold the samples; None until somebody has looked.
        signature: the kind of the batch and the modes of the modules.
        copies: forward writes to its inputs, so it gets copies of them.
        own: ids of the leaves that the step itself made.
        discover: told the roots of every backward of the first step of a signature.
        batchnorm: "exact" or "local".
        local: BatchNorm layers that normalise each micro-batch by itself.
        found: what the mechanism found the loss to be, in words.
        limit: samples that are computed at once; less than `micro_batch` once memory ran out.
        retries: how often it did.
        failed: samples that were computed at once when it did last.
        failure: what was raised then; it holds nothing.
        done: micro-batches that are done.
        phase: of the micro-batch being computed.
        apart: gradients are summed in an accumulator, once the step is divided.
        dice: as they were noted last in this step.
        start: those that it began with, on all ranks.
        still: the first step of its kind has drawn nothing.
        lanes: micro-batches wait for each other where samples meet.
        counters: the ``num_batches_tracked`` of the model.
        slots: attributes and containers that every lane has of its own.
        ways: where samples meet in forward, as far as that was looked at; None where it just was.
        singles: forward normalises some samples by themselves, each as a row of channels.
        coupled: in lanes, the loss is known to need all outputs at once.
        room: bytes that waiting lanes may hold on the device; None sends nothing away.
        budgeted: `room` is what a budget leaves; else nobody has foreseen what lanes hold.
        inside: what all lanes may hold, the one that runs, too; None lets that one hold what it
            will.
        spill: where lanes leave for: "host", "file" or the folder of a file; None is what is
            nearest to the device.
        moved: bytes that left the device and returned.
        remade: bytes that were computed again instead.
        watch: sees each micro-batch as it comes, and may end the step.
        tries: what is kept of it however often it begins again.
        everyone: the batch over all ranks, as far as it is not here.
        private: ids of leaves of this batch, and of spread parameters, whose gradients concern no
            other rank.
        draws: draws as the whole batch would; None lets each micro-batch draw for itself.
        sharded: takes the gradients of a model that was spread; None where there is none.
        away: where saved tensors may go; None (default) lets all of them stay.
        deliver: writes what the step has made, once all ranks have made it. Default: nothing.
    """

    model: nn.Module
    loss: Loss
    batch: Batch
    micro_batch: int
    link: Link
    buffers: ForwardBuffers
    gradients: Gradients | None
    scaler: Scaler | None = None
    observe: Observer | None = None
    signature: Any = None
    layout: Layout | None = None
    copies: bool = False
    own: set[int] = field(default_factory=set)
    discover: Callable[[list[Tensor]], None] | None = None
    batchnorm: str = "exact"
    local: int = 0
    found: str = ""
    limit: int = field(init=False)
    retries: int = field(init=False)
    failed: int = field(init=False)
    failure: Exception | None = None
    done: int = 0
    phase: Phase = "forward"
    apart: bool = False
    _rows: int = 0
    dice: Dice | None = None
    start: Dice | None = None
    still: bool = False
    lanes: bool = False
    counters: list[Tensor] = field(default_factory=list)
    slots: list[Any] = field(default_factory=list)
    ways: tuple[Way, ...] | None = None
    singles: bool = False
    coupled: bool = False
    room: Room = None
    budgeted: bool = False
    inside: Inside | None = None
    spill: str | None = None
    moved: int = 0
    remade: int = 0
    watch: Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]] = iter
    tries: Tries = field(default_factory=Tries)
    everyone: Everyone = field(default_factory=Alone)
    private: frozenset[int] = frozenset()
    draws: WholeDice | None = None
    sharded: Sharded | None = None
    away: Away | None = None
    deliver: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.limit = self.micro_batch
        self.retries, self.failed = self.tries.retries, self.tries.failed

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        parameter = next(self.model.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    @cached_property
    def where(self) -> str:
        """The type of that device, which is asked for at every micro-batch."""
        return self.device.type

    def nothing(self) -> Tensor:
        """Return the loss of no samples: 0, as the parameters are."""
        known = (p for p in self.model.parameters() if p.is_floating_point() or p.is_complex())
        like = next(known, None)
        if like is None:
            return torch.zeros(())
        return torch.zeros((), dtype=like.dtype.to_real(), device=like.device)

    @property
    def count(self) -> int:
        """N_S, the number of micro-batches."""
        return count_micro_batches(self.batch.size, self.micro_batch)

    @property
    def divided(self) -> bool:
        """Whether the batch is more than one micro-batch, here or over all ranks."""
        return self.batch.size > self.micro_batch or self.everyone.several

    def feed(self, batch: Batch | None = None) -> Iterator[MicroBatch]:
        """Yield the micro-batches on the device; of `batch`, where some leaves of it are enough."""
        loaded = (batch or self.batch).micro_batches(self.micro_batch)
        if self.draws is not None:
            loaded = self.draws.watch(loaded)
        return feed(self.watch(loaded), self.link)

    def drawing(self) -> AbstractContextManager[Any]:
        """Return what a micro-batch is computed in, so that it draws as it should."""
        return nullcontext() if self.draws is None else self.draws

    def scope(self, outputs: Any, first: MicroBatch) -> Scope:
        """Return what is known of the whole batch after its first forward."""
        whole = self.batch if isinstance(self.batch, TensorBatch) else None
        layout = self.layout or ()
        self.check_structure(outputs)
        everyone = self.everyone.size if self.everyone.several else 0
        return Scope(self.batch.size, self.count, whole, outputs, first, layout, everyone)

    def check_structure(self, outputs: Any) -> None:
        """Raise `OutputsChangedError` where the outputs are not those that were looked at."""
        if self.layout and len(self.layout) != len(tree.flat(outputs)):
            raise OutputsChangedError

    def forward(self, micro: MicroBatch, *, begins: bool = True, ends: bool = True) -> Any:
        """Run the model on a micro-batch, its buffers as the undivided batch would find them.

        Args:
            micro: the rows.
            begins: nothing of their forward has been run.
            ends: nothing of it is left to run.
        """
        if not self.divided:
            return self.call(micro, None)
        if self.copies:
            micro = copied(micro)
        if begins:
            self.buffers.before()
        outputs = self.call(micro, self.draws)
        if ends:
            self.buffers.after()
        return outputs

    def call(self, micro: MicroBatch, draws: WholeDice | None) -> Any:
        """Call the model, with the dice of the whole batch where it has some."""
        with ForwardOf(micro.size, alone=self.divided):
            if draws is None:
                return call_model(self.model, micro.inputs)
            return draws.forward(micro, partial(call_model, self.model, micro.inputs))

    def under(self, work: Callable[[MicroBatch], None]) -> Callable[[MicroBatch], None]:
        """Return forward and backward of a micro-batch with its saved tensors away, if they go."""
        away, gradients = self.away, self.gradients
        if away is None or gradients is None:
            return work

        def kept(micro: MicroBatch) -> None:
            away.run(partial(work, micro), micro.size, first=not gradients.summed())

        return kept

    def backward(self, losses: list[Tensor], weights: list[Tensor]) -> int:
        """Accumulate the gradient of ``sum weights * losses``, scaled where there is a scaler.

        Returns:
            How many of `losses` have a gradient.
        """
        return self.pull(losses, self.scaled(weights))

    def scaled(self, weights: list[Tensor]) -> list[Tensor]:
        """Return the weights times the present scale, where there is a scaler."""
        if self.scaler is None or self.gradients is None:
            return weights
        return [self.scaler.scale(weight).to(weight.dtype) for weight in weights]

    def pull(
        self, roots: list[Tensor], gradients: list[Tensor], into: list[Tensor] | None = None
    ) -> int:
        """Accumulate what flows back from `gradients` of `roots`; return how many do.

        Roots without a graph are left out. Where `into` is given, no other leaf gets anything.
        """
        flowed = self.flow(roots, gradients, into)
        if flowed:
            self.collect()
        return flowed

    def flow(
        self, roots: list[Tensor], gradients: list[Tensor], into: list[Tensor] | None = None
    ) -> int:
        """Do the same for a part of a micro-batch, which is in no sum before `collect`."""
        pairs = [(r, g) for r, g in zip(roots, gradients, strict=True) if r.requires_grad]
        if self.gradients is None or not pairs:
            return 0
        if self.discover is not None:
            self.discover([root for root, _ in pairs])
        with _outside_autocast(pairs[0][0].device.type):
            self.phase = "backward"
            torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs], inputs=into)
        return len(pairs)

    def collect(self) -> None:
        """Take what has flowed back from a micro-batch into the sum."""
        assert self.gradients is not None
        self.phase = "summed"
        self.gradients.collect()

    def offer(self) -> None:
        """Offer other ranks to send gradients before the last backward has ended.

        Not where saved tensors leave: what is sent has room when they are gone.
        """
        if self.gradients is not None and self.everyone.several and self.away is None:
            every = self.gradients.parameters
            self.everyone.offer([p for p in every if id(p) not in self.private])

    def sending(
        self, micro: MicroBatch, factor: Callable[[], float | Tensor]
    ) -> AbstractContextManager[None]:
        """Return what a backward runs in; the last one sends to other ranks what it completes.

        Args:
            micro: whose backward it is.
            factor: returns what the sums still lack, where all ranks have agreed to send early.
        """
        gradients = self.gradients
        last = micro.begin + micro.size == self.batch.size
        if gradients is None or not (last and self.everyone.several):
            return nullcontext()
        old = gradients.summed()
        return self.everyone.during(lambda some: gradients.take(some, factor(), old))

    def finish(self, factor: float | Tensor = 1.0) -> None:
        """Make the sum of the gradients over all ranks ready, this rank's times `factor`."""
        if self.gradients is not None:
            shared = self._of_all if self.everyone.several or self.sharded else None
            self.gradients.finish(factor, shared)

    def _of_all(self, sums: list[tuple[Tensor, Tensor | None]]) -> list[Tensor | None]:
        """Return the sums over all ranks; what belongs to the rows of this one stays."""
        every = iter(self.everyone.gradients([s for s in sums if id(s[0]) not in self.private]))
        totals = [total if id(leaf) in self.private else next(every) for leaf, total in sums]
        return totals if self.sharded is None else self.sharded.cut(sums, totals)

    def show(self, outputs: Any, micro: MicroBatch) -> None:
        """Let the observer see the rows of a micro-batch, once, though the step start over."""
        begin, self._rows = self._rows, self._rows + micro.size
        self.done += 1
        if self.observe is None or self._rows <= self.tries.rows:
            return
        seen, self.tries.rows = max(self.tries.rows - begin, 0), self._rows
        targets = micro.targets
        if seen:
            outputs = self.rows(outputs, seen, micro.size - seen, micro.size)
            targets = tree.rows(targets, seen, micro.size, micro.size)
        before, self.phase = self.phase, "shown"
        with nullcontext() if self.draws is None else self.draws.paused():
            self.observe(tree.map_tensors(Tensor.detach, outputs), targets)
        self.phase = before

    def rows(self, outputs: Any, begin: int, size: int, of: int) -> Any:
        """Return `size` rows of outputs that hold `of`; what holds no samples as it is.

        Outputs beside a loss have no layout: there the first dimension decides.
        """
        axes = iter(self.layout or ())

        def narrow(tensor: Tensor) -> Tensor:
            first = 0 if tensor.dim() and tensor.shape[0] == of else None
            axis = next(axes) if self.layout else first
            return tensor if axis is None else tensor.narrow(axis, begin, size)

        return tree.map_tensors(narrow, outputs)

    def forget_casts(self) -> None:
        """Drop the casts of the weights that autocast keeps: some were made without a graph."""
        if torch.is_autocast_enabled(self.where):
            torch.clear_autocast_cache()

    def moment(self) -> Moment:
        """Note where a micro-batch begins."""
        statistics = self.buffers.statistics()
        if not self.still:
            self.dice = Dice.now()
        return Moment(None if self.still else self.dice, statistics)

    def drew(self) -> bool:
        """Say whether something was drawn since the dice were noted last."""
        return self.dice is None or not Dice.now().same_as(self.dice)

    def drew_any(self) -> bool:
        """Say whether something was drawn since the step began."""
        assert self.start is not None
        return not Dice.now().same_as(self.start)

    def put_back(self, dice: Dice) -> None:
        """Make `dice` the present ones."""
        dice.put_back()
        self.dice = dice

    def begin_again(self) -> None:
        """Put the dice back where the step began, and restart."""
        assert self.start is not None
        self.put_back(self.start)
        self.restart()

    def agree(self) -> None:
        """See that all ranks have drawn alike, where they draw for each other."""
        if self.draws is not None and self.everyone.several:
            self.everyone.agree(devices_of(self.model))

    def go_back(self, moment: Moment, failure: Exception) -> None:
        """Undo what a micro-batch did until memory ran out, for another try in smaller parts.

        Raises:
            Exception: `failure`, where parts are no help or the sums cannot be undone.
        """
        if not (self.can_shrink() and self._can_go_back(moment)):
            raise failure
        self.shrink(failure)
        if self.gradients is not None and self.phase == "backward":
            self.gradients.drop()
        if moment.dice is not None:
            self.put_back(moment.dice)
        self.buffers.go_back(moment.statistics)
        self.forget_casts()

    def _can_go_back(self, moment: Moment) -> bool:
        if isinstance(self.loss, Algorithm1) or self.everyone.sending:
            return False  # its parts do not add up to it, or what they add up to has left
        if moment.dice is None and self.drew():
            return False  # for the first time, and nobody has noted where it began
        if self.phase == "backward":
            return self.gradients is not None and self.gradients.apart
        return self.phase == "forward"

    def can_shrink(self) -> bool:
        """Say whether the step may be tried smaller: not after the observer failed."""
        return min(self.limit, self.batch.size) > 1 and self.phase != "shown"

    def shrink(self, failure: Exception) -> None:
        """Halve what is computed at once, because of `failure`, and free what that holds."""
        forget(failure, outside=sys.exception())
        self.failure = failure
        self.retries += 1
        self.failed = min(self.limit, self.batch.size)
        self.limit = (self.failed + 1) // 2

    def restart(self) -> None:
        """Begin again: nothing summed, buffers as they were; at the size of the limit."""
        self.micro_batch = self.limit
        self.done = self._rows = 0
        self.phase = "forward"
        self.buffers.restart()
        self.forget_casts()
        if self.draws is not None:
            self.draws.shared.begin()
        if self.gradients is not None:
            self.gradients.restart()


def copied(micro: MicroBatch) -> MicroBatch:
    """Return the micro-batch with copies of its inputs, which nobody else holds."""
    inputs = tree.map_tensors(lambda t: t if t.requires_grad else t.detach().clone(), micro.inputs)
    return replace(micro, inputs=inputs)


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call `model` with a tensor, the items of a tuple or list, or the keywords of a mapping."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list) and not hasattr(inputs, "_fields"):
        return model(*inputs)
    return model(inputs)


def check_trains(roots_with_grad: int) -> None:
    """Refuse a loss that no parameter can lower."""
    if roots_with_grad == 0:
        raise LossError(
            "the loss must depend on a parameter that requires grad, and no micro-batch's does: "
            "unfreeze a parameter, or call engine.evaluate"
        )


def _outside_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Backward runs outside autocast, as torch advises; forward chose the dtypes."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
