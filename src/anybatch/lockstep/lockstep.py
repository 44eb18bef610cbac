"""A step in lanes: micro-batches that wait for each other wherever their samples meet.

Every lane runs forward, computes its share of the loss, and runs backward. BatchNorm is a barrier
in both directions, so each lane computes its rows as in the undivided batch. A loss that couples
the samples is one more barrier, of outputs, and needs no second forward: the graphs still exist.

    lane 0:  forward ─┬─ BatchNorm ─┬─ forward ─┬─ loss ─┬─ backward ─┬─ BatchNorm ─┬─ backward
    lane 1:  forward ─┘             └─ forward ─┘        └─ backward ─┘             └─ backward

Tensors of waiting lanes are offloaded as far as they do not fit (`anybatch.memory.lane_pager`).

Source: BatchNorm over parts: AGBN, Algorithms 1-3.
"""

from __future__ import annotations

import contextvars
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
)
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

from anybatch.core import accelerators, pytree
from anybatch.core.accelerator import Accelerator
from anybatch.core.barrier import Route, exchange
from anybatch.core.batch import MicroBatch, copied, made_up
from anybatch.core.transaction import HeldBack, uninterrupted
from anybatch.execution.step import Step, check_trains
from anybatch.execution.streaming import Normalization, normalization
from anybatch.execution.two_pass import loss_of_all, shares, value_of_all
from anybatch.lockstep.batchnorm import MeetingNorms, Tracked
from anybatch.lockstep.scheduler import Lanes, LaneTurns
from anybatch.loss.base import Total
from anybatch.memory.lane_pager import SMALL, LanePager, Paging, keep
from anybatch.memory.meter import Meter
from anybatch.memory.spill import maker


def lockstep(step: Step, tracked: Tracked) -> Tensor:
    """Run the step in as many lanes as it has micro-batches.

    Args:
        step: the mini-batch and the model; see `anybatch.execution.step`. Waiting
            lanes may hold its `lane_bytes` on the device.
        tracked: its running statistics.

    Returns:
        The loss of the full batch, a detached 0-dim tensor.

    Raises:
        LockstepError: the model takes another path for other samples.
        Retry: some micro-batch has shown that the loss couples the samples, or the lanes meet
            elsewhere than in earlier steps.
    """
    together = LockstepState(step)
    with uninterrupted() as held:  # or a thread of the pager, and its file, would be left
        _run(step, tracked, together, held)
    if step.gradients is not None and step.batch.size:
        check_trains(together.trained)
    together.show()
    step.finish(together.correction())
    return together.loss()


def _run(step: Step, tracked: Tracked, together: LockstepState, held: HeldBack) -> None:
    """Run all lanes; Ctrl-C takes effect during the wait for them."""
    around = Surroundings.now()
    meters = [mode for mode in around.dispatches if isinstance(mode, Meter)]
    lanes = max(step.count, 1)  # a rank without samples meets the others all the same
    pager = _pager(step, meters)
    turns = LaneTurns(lanes, step.slots, step.gradients, pager, everything=step.draws is not None)
    entered = partial(around.entered, None if pager is None else Paging(pager))
    beyond = step.global_batch if step.global_batch.several else None
    try:
        if pager is not None:
            pager.ready()
        with warnings.catch_warnings():  # lanes that catch some too do not end in their order
            Lanes(lanes, turns, entered, beyond).run(
                lambda lane: _lane(step, tracked, together, lane, pager), held.let_through
            )
        turns.finish()
    except BaseException:
        turns.slots.put_back()
        raise
    finally:
        if pager is not None:
            pager.close()
            step.moved = pager.moved


AHEAD = 1.5
"""Multiple of a segment's bytes that may wait in addition to the running lane, without a budget."""


def _pager(step: Step, meters: list[Meter]) -> LanePager | None:
    """Return the pager that offloads tensors beyond the budget; None where all tensors fit."""
    if step.inside is None and (step.lane_bytes is None or step.count < 2):
        return None
    turns, small = (0, 1) if step.budgeted else (AHEAD, SMALL)
    return LanePager(
        step.lane_bytes or 0,
        maker(step.spill, step.device, direct=False)(),
        step.device,
        meters,
        small=small,
        segments=turns,
        inside=step.inside,
    )


def _lane(
    step: Step, tracked: Tracked, together: LockstepState, lane: int, pager: LanePager | None
) -> None:
    """Run one lane: forward, its share of the loss, backward."""
    empty = not step.batch.size
    bring = partial(keep, pager) if pager is not None else None
    route = None if step.ways is None else Route(step.ways)
    norms = MeetingNorms(tracked, bring, empty=empty, route=route, singles=step.singles)
    draws = None if step.draws is None else step.draws.of_lane()
    with norms, nullcontext() if draws is None else draws:
        micro = together.next()
        outputs = step.call(micro, draws)
        norms.arrives()
        lose = together.lose_nothing if empty else partial(together.lose, lane)
        roots, weights = lose(outputs, micro)
        del outputs, micro, lose
        norms.again = True
        together.trained += step.pull(roots, weights)
    if empty and step.gradients is not None:
        step.gradients.restart()


class LockstepState:
    """State that the lanes of a step share: the batch that feeds them, and its loss.

    Attributes:
        trained: how many roots of backwards had a gradient.
    """

    def __init__(self, step: Step) -> None:
        self.trained = 0
        self._step = step
        self._feed: Iterator[MicroBatch] = step.feed(
            ahead=False
        )  # what a lane brings is its own, and may leave
        self._normalize: Normalization | None = None
        self._coupled: Tensor | None = None
        self._shown: dict[int, tuple[Any, MicroBatch]] = {}

    def next(self) -> MicroBatch:
        """Return the micro-batch of the lane that runs for the first time."""
        if not self._step.batch.size:
            return made_up(self._step.batch, 1)
        micro = next(self._feed)
        return copied(micro) if self._step.traits.copies else micro

    def lose(self, lane: int, outputs: Any, micro: MicroBatch) -> tuple[list[Tensor], list[Tensor]]:
        """Return the roots of a lane's backward, and their gradients."""
        step = self._step
        detached = pytree.map_tensors(Tensor.detach, outputs)
        if step.observe is not None or step.full_outputs is not None:
            shown = step.loss.outputs(detached)  # not the terms, whose graph would stay
            self._shown[lane] = shown, MicroBatch(None, micro.targets, micro.size, micro.begin)
        if self._normalize is None and not step.coupled:
            self._count(step.totals(outputs, micro))
        if self._normalize is not None:
            parts = step.parts(outputs, micro, self._normalize.totals)
            weights = self._normalize(parts, micro.size)
            self._normalize.count()
            return [part.numerator for part in parts], step.scaled(weights)
        gradients, begin = exchange(
            "the loss", (detached, micro.targets, micro.size), self._lose_all
        )
        if step.draws is not None:
            step.draws.settle()
        if step.gradients is None:
            return [], []
        return shares(step, pytree.flat(outputs), gradients, begin)

    def lose_nothing(self, outputs: Any, micro: MicroBatch) -> tuple[list[Tensor], list[Tensor]]:
        """Join the loss on a rank without samples, and return roots with gradients of zero."""
        del micro
        step = self._step
        if not step.coupled:
            self._count([])
        if step.coupled:
            step.found = step.loss.name
            rows = step.global_batch.rows(None, None, (), 0)
            with torch.no_grad(), self._full_batch_draws():
                self._coupled = value_of_all(step, rows)
        roots = [t for _, t in pytree.tensors(outputs) if t.requires_grad]
        return roots, [torch.zeros_like(root) for root in roots]

    def _count(self, totals: list[Total] | None) -> None:
        """Record the denominator of the loss, or that it needs all outputs at once."""
        self._normalize = normalization(self._step, totals)
        self._step.coupled = self._normalize is None

    def _full_batch_draws(self) -> AbstractContextManager[None]:
        """Return the context for the loss of all outputs, with torch's full-batch draws."""
        draws = self._step.draws
        return nullcontext() if draws is None else draws.full_loss_draws()

    def correction(self) -> float | Tensor:
        """Return the factor that the sum of the gradients still lacks."""
        return 1.0 if self._normalize is None else self._normalize.correction()

    def loss(self) -> Tensor:
        """Return the loss of the full batch."""
        if self._normalize is not None:
            return self._normalize.loss()
        assert self._coupled is not None
        return self._coupled

    def show(self) -> None:
        """Let the observer see every micro-batch, in order."""
        step = self._step
        step.done = step.count
        for lane in sorted(self._shown):
            step.show(*self._shown[lane])
        step.done = step.count

    def _lose_all(self, parts: list[tuple[Any, Any, int]]) -> list[tuple[list[Tensor | None], int]]:
        """Take the loss of all outputs; return its gradients, and where each lane's rows begin."""
        step = self._step
        step.found = step.loss.name
        outputs, targets, sizes = (list(found) for found in zip(*parts, strict=True))
        step.check_structure(outputs[0])
        joined = pytree.join(outputs, list(step.traits.axes), sizes=sizes)
        aims = pytree.join(targets, sizes=sizes, name="targets")
        rows = step.global_batch.rows(joined, aims, step.traits.axes, step.batch.size)
        del joined, aims
        with self._full_batch_draws():
            if step.gradients is None:
                self._coupled = value_of_all(step, rows)
                return [([], 0)] * len(sizes)
            with torch.enable_grad():
                result = loss_of_all(step, rows)
        self._coupled = result.loss
        return [(result.gradients, result.begin + sum(sizes[:k])) for k in range(len(sizes))]


# The modes of a thread, for threads that compute in its name.
#
# Grad mode, autocast, inference mode, function and dispatch modes, saved-tensor hooks and context
# variables belong to the thread that entered them. A lane that did not enter them too would compute
# in float32 under the user's autocast, on the wrong device, or without the meter.


@dataclass(frozen=True)
class Surroundings:
    """The modes that a thread is in at one moment."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    functions: tuple[Any, ...]
    dispatches: tuple[Any, ...]
    hooks: tuple[Any, ...]
    variables: contextvars.Context
    streams: tuple[tuple[Accelerator, Any], ...]

    @classmethod
    def now(cls) -> Surroundings:
        """Return those of this thread."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return cls(
            grad=torch.is_grad_enabled(),
            autocast=tuple(
                (type_, torch.is_autocast_enabled(type_), torch.get_autocast_dtype(type_))
                for type_ in accelerators.autocast_types()
            ),
            cache=torch.is_autocast_cache_enabled(),
            functions=tuple(_get_current_function_mode_stack()),  # type: ignore[no-untyped-call]
            dispatches=tuple(_get_current_dispatch_mode_stack()),
            hooks=tuple(top) if top else (),
            variables=contextvars.copy_context(),
            streams=tuple(accelerators.streams()),
        )

    @contextmanager
    def entered(self, paging: Any = None) -> Iterator[None]:
        """Enter them, in this thread, for the body; backward runs in this thread.

        Args:
            paging: a dispatch mode below all of the user's, whose kernels it must intercept, and
                above the meter. Default None.
        """
        for variable, value in self.variables.items():
            variable.set(value)
        with ExitStack() as stack:
            for there, stream in self.streams:
                stack.enter_context(there.on(stream))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            for type_, enabled, dtype in self.autocast:
                if enabled:
                    stack.enter_context(
                        torch.autocast(type_, dtype=dtype, enabled=True, cache_enabled=self.cache)
                    )
            if self.hooks:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.hooks))
            for mode in self.functions:
                _push_mode(mode)  # type: ignore[no-untyped-call]
                stack.callback(_pop_mode)
            meters = [mode for mode in self.dispatches if isinstance(mode, Meter)]
            others = [mode for mode in self.dispatches if not isinstance(mode, Meter)]
            for mode in [*meters, *([] if paging is None else [paging]), *others]:
                _push_dispatch_mode(mode)
                stack.callback(_pop_dispatch_mode)
            yield
