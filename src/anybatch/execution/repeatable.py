"""State of a step that is stored for a retry of a micro-batch, or of all of it.

A step changes more than gradients: buffers, the RNG state, samples passed to an observer. When
memory runs out, or an inspection was wrong, or another plan is needed, all that must be restored
before the next attempt. This module has the progress of an attempt, the size limit of the next one,
and its restoring; `anybatch.execution.retry` and the runner decide whether there is a next one.

Source: MBS, section 3.2 (the micro-batch must fit); the ways back are ours.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from anybatch.core import tree
from anybatch.core.batch import Batch, MicroBatch
from anybatch.core.memory_errors import forget
from anybatch.core.rng import RNGState
from anybatch.core.undo import AgainError
from anybatch.distributed.local_batch import GlobalBatch, LocalBatch
from anybatch.execution.buffers import ForwardBuffers
from anybatch.execution.full_batch_rng.mode import FullBatchRNG
from anybatch.execution.gradients import Gradients
from anybatch.loss.declared import Algorithm1, Loss

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


@dataclass
class Tries:
    """Record of a step that survives each new begin, under another plan perhaps.

    Attributes:
        rows: how many an observer got.
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
    """The outputs are not those of the inspection: the model must be inspected again."""


@dataclass(kw_only=True)
class Repeatable(ABC):
    """Mini-batch, model, loss and progress of a try; `Step` adds forward and backward.

    Attributes:
        micro_batch: N_mu, samples that are loaded at once.
        gradients: where gradients come together; None runs forward only.
        limit: samples that are computed at once; less than `micro_batch` once memory ran out.
        retries: how often it did.
        failed: samples that were computed at once when it did last.
        failure: the exception; it holds no tensors.
        done: micro-batches that are done.
        phase: of the micro-batch being computed.
        rng: the RNG state as it was recorded last in this step.
        start: the RNG state that it began with, on all ranks.
        still: the first step of its signature has drawn nothing.
        tries: the record that survives each new begin.
        global_batch: the batch over all ranks, as far as it is not here.
        draws: draws as the full batch would; None lets each micro-batch draw for itself.
    """

    model: nn.Module
    loss: Loss
    batch: Batch
    micro_batch: int
    buffers: ForwardBuffers
    gradients: Gradients | None
    observe: Observer | None = None
    limit: int = field(init=False)
    retries: int = field(init=False)
    failed: int = field(init=False)
    failure: Exception | None = None
    done: int = 0
    phase: Phase = "forward"
    _rows: int = 0
    rng: RNGState | None = None
    start: RNGState | None = None
    still: bool = False
    tries: Tries = field(default_factory=Tries)
    global_batch: GlobalBatch = field(default_factory=LocalBatch)
    draws: FullBatchRNG | None = None

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
        """The type of that device, cached because every micro-batch reads it."""
        return self.device.type

    @abstractmethod
    def rows(self, outputs: Any, begin: int, size: int, of: int) -> Any:
        """Return `size` rows of outputs that hold `of`; outputs without samples are unchanged."""

    def show(self, outputs: Any, micro: MicroBatch) -> None:
        """Let the observer see the rows of a micro-batch, once, though the step start over."""
        begin, self._rows = self._rows, self._rows + micro.size
        self.done += 1
        if self.observe is None or self._rows <= self.tries.rows:
            return
        observed, self.tries.rows = max(self.tries.rows - begin, 0), self._rows
        targets = micro.targets
        if observed:
            outputs = self.rows(outputs, observed, micro.size - observed, micro.size)
            targets = tree.rows(targets, observed, micro.size, micro.size)
        before, self.phase = self.phase, "shown"
        there = [] if self.gradients is None else self.gradients.marks()
        with nullcontext() if self.draws is None else self.draws.paused():
            self.observe(tree.map_tensors(Tensor.detach, self.loss.outputs(outputs)), targets)
        if self.gradients is not None:
            self.gradients.refuse_moved(there)
        self.phase = before

    def moment(self) -> Moment:
        """Note where a micro-batch begins."""
        statistics = self.buffers.statistics()
        if not self.still:
            self.rng = RNGState.now()
        return Moment(None if self.still else self.rng, statistics)

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
            raise failure
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
        return min(self.limit, self.batch.size) > 1 and self.phase not in ("shown", "fired")

    def shrink(self, failure: Exception) -> None:
        """Halve the samples that are computed at once, after `failure`, and free its memory."""
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

    def forget_casts(self) -> None:
        """Drop the casts of the weights that autocast keeps: some were made without a graph."""
        if torch.is_autocast_enabled(self.where):
            torch.clear_autocast_cache()
