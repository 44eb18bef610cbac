"""Snapshots of a step's state: for a retry of a micro-batch, and for trial steps of training.

A step changes more than gradients: buffers, the RNG state, samples passed to an observer. When
memory runs out in a micro-batch, all that must be restored before it is tried again in parts. This
module has the progress of an attempt, its restoring, and what the next attempt has to know.

Source: MBS, section 3.2 (the micro-batch must fit); the ways back are ours.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from anybatch.core import pytree
from anybatch.core.batch import Batch, MicroBatch
from anybatch.core.modules import Modules, first_parameter, local
from anybatch.core.oom import forget
from anybatch.core.retry import Retry
from anybatch.core.rng import RNGState
from anybatch.core.transaction import Before, uninterrupted
from anybatch.distributed.local_batch import Layout, LocalBatch
from anybatch.errors import BatchError, NotExactError, NotYetError
from anybatch.execution.buffers import ForwardBuffers
from anybatch.execution.full_batch_rng.mode import FullBatchRNG
from anybatch.execution.gradients import Gradients
from anybatch.execution.traits import Traits
from anybatch.loss.base import Algorithm1, Loss, loss_among

Observer = Callable[[Any, Any], None]

Phase = Literal["forward", "backward", "summed", "shown", "fired"]
"""How far a micro-batch has come: "summed" when its gradients are in the sum. The step
is "fired" when hooks of parameters may have been."""


class Moment(NamedTuple):
    """Snapshot at the start of a micro-batch: RNG state and buffer statistics.

    Attributes:
        rng: None where steps of this signature draw nothing, so that it is not recorded.
    """

    rng: RNGState | None
    statistics: list[Tensor | None]


NOTHING_MOVES = Moment(None, [])
"""Where steps of the signature draw nothing, and forward moves no statistics."""


@dataclass
class Attempts:
    """Findings of the attempts of a step, for the next one.

    Attributes:
        rows: how many an observer got.
        retries: how often memory ran out.
        failed: samples that were computed at once when it did last.
        limit: samples that may be computed at once from here on; 0 (default) is no limit.
        most: the same, where a plan for so many is needed: memory ran out undivided.
        failure: the error then; it holds no tensors.
        coupled: the loss needs all outputs at once.
        traits: findings of an attempt that has inspected the model; None where none has.
        other_model: the model is not the one that earlier steps have inspected.
        times: how often each reason has come.
    """

    rows: int = 0
    retries: int = 0
    failed: int = 0
    limit: int = 0
    most: int = 0
    failure: Exception | None = None
    coupled: bool = False
    traits: Traits | None = None
    other_model: bool = False
    times: dict[str, int] = field(default_factory=dict)

    def learn(self, retry: Retry) -> None:
        """Take in why an attempt ended."""
        self.times[retry.reason] = self.times.get(retry.reason, 0) + 1
        self.other_model |= retry.reason == "inspection"
        if self.times[retry.reason] > MOST.get(retry.reason, sys.maxsize):
            raise NotExactError(
                "a step that is run again must find the same model, and this one has changed each "
                f"time ({retry.reason}, {self.times[retry.reason]} times): forward or the loss "
                "depends on how often it is called. Take that out, or give micro_batch >= the "
                "batch size"
            )
        if retry.reason == "coupled":
            self.coupled = True
        else:  # another size or another model: what was inspected holds no longer
            self.traits = None

    def explain(self, error: Exception) -> None:
        """Name memory that ran out in an earlier attempt as the cause of an error that goes out.

        What was inspected goes: the error holds the frame that holds it, and it may hold tensors
        (test_the_error_that_goes_out_holds_no_tensor_of_the_step).
        """
        self.traits = None
        if self.failure is not error and error.__cause__ is None:
            error.__cause__ = self.failure


class FullOutputs:
    """Outputs of all samples of an attempt, detached, in the order of the batch.

    Micro-batches write their rows into tensors of the full batch, so that no rows are there twice.

    Attributes:
        tree: the outputs; None before a micro-batch is done.
        inside: the loss is among them.

    Args:
        inside: the model returns its loss.
    """

    def __init__(self, *, inside: bool) -> None:
        self.tree: Any = None
        self.inside = inside

    def add(self, outputs: Any, micro: MicroBatch, of: int, axes: Layout) -> None:
        """Take the outputs of a micro-batch.

        Args:
            outputs: of the model.
            micro: the micro-batch.
            of: samples of the batch.
            axes: the dimension of each tensor that holds the samples; None for a constant.

        Raises:
            BatchError: they cannot be joined with those of other micro-batches.
        """
        found = pytree.leaves(outputs, "outputs")
        dims = [None] * len(pytree.flat(outputs)) if micro.size == of else list(axes)
        if len(dims) != len(pytree.flat(outputs)):
            raise BatchError(
                "outputs that are kept must be as many tensors for any number of samples, and the "
                f"model returned {len(pytree.flat(outputs))}, where {len(dims)} were inspected: "
                "leave keep_outputs out, and pass observe="
            )
        if self.tree is None:
            self.tree = _zipped(partial(_of_full_batch, size=of), outputs, dims)
        loss, remaining = loss_among(outputs) if self.inside else None, iter(dims)
        for (path, one), (_, own) in zip(found, pytree.leaves(self.tree), strict=True):
            dim = next(remaining) if isinstance(one, Tensor) else None
            if dim is not None:
                rows = own.narrow(dim, micro.begin, micro.size)
                if rows.shape != one.shape:
                    raise BatchError(
                        "outputs that are kept must agree in all dimensions but that of the "
                        f"samples, and {path} has shape {tuple(one.shape)} where "
                        f"{tuple(rows.shape)} was expected: pad all samples to one length, or "
                        "leave keep_outputs out, and pass observe="
                    )
                rows.copy_(one.detach())
            elif one is not loss:
                pytree.check_constant(path, own, one)

    def of_step(self, loss: Tensor) -> Any:
        """Return the outputs, with the loss of the full batch in place of a micro-batch's."""
        if self.inside and self.tree is not None:
            loss_among(self.tree).copy_(loss)
        return self.tree


def _zipped(function: Callable[..., Tensor], outputs: Any, dims: Iterable[int | None]) -> Any:
    """Return a tree of the results of a function of each tensor and its dimension."""
    remaining = iter(dims)
    return pytree.map_tensors(lambda tensor: function(tensor, next(remaining)), outputs)


def _of_full_batch(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """Return a tensor for the rows of all samples; a copy of one without rows."""
    if dim is None:
        return tensor.detach().clone()
    return tensor.new_empty([*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]])


MOST = {"coupled": 1, "meeting": 2, "inspection": 2, "sites": 2}
"""How often a reason can come in one step; of others each makes the next one smaller or shorter."""


@dataclass(kw_only=True)
class Repeatable(ABC):
    """Mini-batch, model, loss and progress of a try; `Step` adds forward and backward.

    Attributes:
        micro_batch: N_mu, samples that are loaded at once.
        gradients: where gradients come together; None runs forward only.
        limit: samples that are computed at once; less than `micro_batch` once memory ran out.
        divided: the batch is more than one micro-batch, here or over all ranks.
        done: micro-batches that are done.
        phase: of the micro-batch being computed.
        rng: the RNG state as it was recorded last in this step.
        start: the RNG state that it began with, on all ranks.
        traits: findings of the steps of its signature, of this one too.
        attempts: what earlier attempts have learned.
        global_batch: the batch over all ranks, as far as it is not here.
        draws: draws as the full batch would; None lets each micro-batch draw for itself.
        full_outputs: gets the outputs of all samples; None (default) stores none.
    """

    model: nn.Module
    loss: Loss
    batch: Batch
    micro_batch: int
    buffers: ForwardBuffers
    gradients: Gradients | None
    observe: Observer | None = field(default=None, init=False)
    limit: int = field(init=False)
    divided: bool = field(init=False)
    done: int = field(default=0, init=False)
    phase: Phase = field(default="forward", init=False)
    _rows: int = field(default=0, init=False)
    rng: RNGState | None = None
    start: RNGState | None = None
    traits: Traits = field(default_factory=Traits, init=False)
    attempts: Attempts = field(default_factory=Attempts)
    global_batch: LocalBatch = field(default_factory=LocalBatch)
    draws: FullBatchRNG | None = field(default=None, init=False)
    full_outputs: FullOutputs | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.limit = self.micro_batch
        self.divided = self.batch.size > self.micro_batch or self.global_batch.several

    @property
    def retries(self) -> int:
        """How often memory ran out."""
        return self.attempts.retries

    @cached_property
    def device(self) -> torch.device:
        """Where the model is."""
        parameter = first_parameter(self.model)
        return torch.device("cpu") if parameter is None else parameter.device

    @abstractmethod
    def rows(self, outputs: Any, begin: int, size: int, of: int) -> Any:
        """Return `size` rows of outputs that hold `of`; outputs without samples are unchanged."""

    def show(self, outputs: Any, micro: MicroBatch) -> None:
        """Let the observer see the rows of a micro-batch, once, though the step start over."""
        begin, self._rows = self._rows, self._rows + micro.size
        self.done += 1
        if self.full_outputs is not None:
            axes = self.traits.layout or self.traits.extra_layout
            self.full_outputs.add(self.loss.outputs(outputs), micro, self.batch.size, axes)
        if self.observe is None or self._rows <= self.attempts.rows:
            return
        observed, self.attempts.rows = max(self.attempts.rows - begin, 0), self._rows
        targets = micro.targets
        if observed:
            outputs = self.rows(outputs, observed, micro.size - observed, micro.size)
            targets = pytree.rows(targets, observed, micro.size, micro.size)
        before, self.phase = self.phase, "shown"
        there = [] if self.gradients is None else self.gradients.marks()
        with nullcontext() if self.draws is None else self.draws.paused():
            self.observe(pytree.map_tensors(Tensor.detach, self.loss.outputs(outputs)), targets)
        if self.gradients is not None:
            self.gradients.refuse_moved(there)
        self.phase = before

    def moment(self) -> Moment:
        """Note where a micro-batch begins."""
        if self.traits.still and not self.buffers.run_on:
            return NOTHING_MOVES
        if not self.traits.still:
            self.rng = RNGState.now()
        return Moment(None if self.traits.still else self.rng, self.buffers.statistics())

    def drew(self) -> bool:
        """Return whether something was drawn since the RNG state was recorded last."""
        return self.rng is None or not RNGState.now().same_as(self.rng)

    def drew_any(self) -> bool:
        """Say whether something was drawn since the step began."""
        assert self.start is not None
        return not RNGState.now().same_as(self.start)

    def put_back(self, rng: RNGState) -> None:
        """Restore an RNG state, and record it as the present one."""
        rng.put_back()
        self.rng = rng

    def begin_again(self) -> None:
        """Restore the RNG state of the step's start, and restart."""
        assert self.start is not None
        self.put_back(self.start)
        self.restart()

    def go_back(self, moment: Moment, failure: Exception) -> None:
        """Undo a micro-batch that ran out of memory, for a retry in smaller parts.

        Raises:
            Exception: `failure`, where parts are no help or the sums cannot be undone.
        """
        if not (self.can_shrink() and self._can_go_back(moment)):
            try:
                raise failure
            finally:
                # Its traceback holds this frame (test_no_step_lives_until_garbage_is_collected).
                del failure
        self.shrink(failure)
        if self.gradients is not None and self.phase == "backward":
            self.gradients.drop()
        if moment.rng is not None:
            self.put_back(moment.rng)
        self.buffers.go_back(moment.statistics)
        self.forget_casts()

    def _can_go_back(self, moment: Moment) -> bool:
        if isinstance(self.loss, Algorithm1) or self.global_batch.sending:
            return False  # its parts do not add up to it, or what they add up to has left
        if moment.rng is None and self.drew():
            return False  # for the first time, and nobody has noted where it began
        if self.phase == "backward":
            return self.gradients is not None and self.gradients.accumulator
        return self.phase == "forward"

    def can_shrink(self) -> bool:
        """Say whether the step may be tried smaller: not after the observer or a hook failed."""
        return min(self.limit, self.batch.size) > 1 and self.unseen()

    def unseen(self) -> bool:
        """Say whether neither the observer nor a hook has been called for this micro-batch."""
        return self.phase not in ("shown", "fired")

    def may_stop(self) -> bool:
        """Say whether the step may end here and be tried smaller; one of several ranks may not."""
        return self.can_shrink() and not self.global_batch.several

    def shrink(self, failure: Exception) -> None:
        """Halve the samples that are computed at once, after `failure`, and free its memory."""
        forget(failure, outside=sys.exception())
        attempts, failed = self.attempts, min(self.limit, self.batch.size)
        attempts.failure, attempts.failed = failure, failed
        attempts.retries += 1
        self.limit = attempts.limit = (failed + 1) // 2

    def restart(self) -> None:
        """Begin again: nothing summed, buffers as they were; at the size of the limit."""
        self.micro_batch = self.limit
        self.done = self._rows = 0
        if self.full_outputs is not None:
            self.full_outputs = FullOutputs(inside=self.full_outputs.inside)
        self.phase = "forward"
        self.buffers.restart()
        self.forget_casts()
        if self.draws is not None:
            self.draws.shared.begin()
        if self.gradients is not None:
            self.gradients.restart()

    def forget_casts(self) -> None:
        """Drop the casts of the weights that autocast keeps: some were made without a graph."""
        if torch.is_autocast_enabled(self.device.type):
            torch.clear_autocast_cache()


# Snapshot and restore of all state around trial steps of training.
#
# A step that failed is undone by `anybatch.core.transaction`, which records the state that a step
# changes before the optimizer: gradients, buffers and RNG. Trial steps change the parameters and
# the optimizer's state, too. Copies of them wait in host memory and are copied back into the same
# tensors, so references to these (of a schedule, an average, another optimizer) remain valid.

Back = Callable[[], Any]
"""Puts a thing back as it was, and returns it."""


@contextmanager
def as_it_was(
    modules: Modules, leaves: Iterable[Tensor], optimizer: torch.optim.Optimizer | None
) -> Iterator[None]:
    """Run the body as trial training, and restore all state however it ends.

    Args:
        modules: every module that a step runs.
        leaves: every parameter that is trained.
        optimizer: the one that steps; its groups' options and its state are restored, too. None
            where none does.

    Raises:
        NotYetError: the optimizer's state waits elsewhere.
        RuntimeError: something could not be restored; its notes name it. An exception of the body
            is raised instead, with these notes.
    """
    every = list(leaves)
    steps: list[Back] = [restorer(leaf) for leaf in every]
    steps += [] if optimizer is None else [_states(optimizer), _options(optimizer)]
    before, raised = Before(modules, every), None
    try:
        before.suspend_hooks()
        for leaf in every:
            leaf.grad = None  # those that are there are not written to
        yield
    except BaseException as error:
        raised = error
        raise
    finally:
        with uninterrupted():
            failures = before.put_back()
            with torch.no_grad():
                failures += [failed for step in steps if (failed := _tried(step)) is not None]
        if failures:
            found = raised or RuntimeError(
                "the state that tried steps changed could not be restored"
            )
            for failure in failures:
                found.add_note(
                    f"and the state before the tried steps could not be restored: {failure}"
                )
            if raised is None:
                raise found


def _tried(step: Back) -> Exception | None:
    try:
        step()
    except Exception as error:
        return error
    return None


def restorer(one: Any) -> Back:
    """Return a function that restores a tensor's values, or all entries of a list or mapping."""
    if isinstance(one, Tensor):
        if one.is_meta:
            raise NotYetError(
                "a step must be able to restore all that it changes, and a tensor of the "
                "optimizer's state is offloaded: bring it back first"
            )
        return partial(_values_back, one, local(one).detach().to("cpu", copy=True))
    if isinstance(one, dict):
        return partial(_entries_back, one, {name: restorer(value) for name, value in one.items()})
    if isinstance(one, list | tuple):
        return partial(_items_back, one, [restorer(value) for value in one])
    return _left(one)


def _left(one: Any) -> Back:
    def same() -> Any:
        return one

    return same


def _values_back(tensor: Tensor, values: Tensor) -> Tensor:
    local(tensor).copy_(values)
    return tensor


def _entries_back(found: dict[Any, Any], entries: dict[Any, Back]) -> dict[Any, Any]:
    for name in [name for name in found if name not in entries]:
        del found[name]
    for name, back in entries.items():
        found[name] = back()
    return found


def _items_back(found: Any, items: list[Back]) -> Any:
    values = [back() for back in items]
    if isinstance(found, list):
        found[:] = values
    return found


def _states(optimizer: torch.optim.Optimizer) -> Back:
    """Return a function that restores the optimizer's states, and drops those added since."""
    return partial(
        _entries_back,
        optimizer.state,
        {leaf: restorer(one) for leaf, one in optimizer.state.items()},
    )


def _options(optimizer: torch.optim.Optimizer) -> Back:
    """Return a function that restores the parameter groups and every option of each."""
    groups = list(optimizer.param_groups)
    entries = [
        {name: _left(one) if name == "params" else restorer(one) for name, one in group.items()}
        for group in groups
    ]

    def back() -> None:
        optimizer.param_groups[:] = groups
        for group, options in zip(groups, entries, strict=True):
            _entries_back(group, options)

    return back
