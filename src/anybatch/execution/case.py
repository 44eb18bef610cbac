"""Description of a step without its micro-batch size, for dry runs and timing.

A case names the model, the loss, the rows and the parameters of a step. `as_fakes` makes the same
case of tensors without data; both go through the same mechanisms (`anybatch.planner.rehearse`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core import tree
from anybatch.core.absent import absent
from anybatch.core.batch import Batch, MicroBatch, TensorBatch
from anybatch.core.modules import Modules, tensors_of
from anybatch.distributed.sharded import Sharded
from anybatch.execution.device import HostLink, Shipment
from anybatch.loss.declared import Loss
from anybatch.loss.state import LossState
from anybatch.memory.fakes import Fakes
from anybatch.memory.meter import Meter

MICRO_BATCHES = 3
"""Of a rehearsal: the first has no gradients yet, the second has another on its way."""


@dataclass(frozen=True)
class Case:
    """Input of a dry run: all of a step except the size of its micro-batches.

    Attributes:
        model: the user's own, or a fake of it.
        loss: its loss.
        rows: samples of the batch: all of them, or those that were loaded of a lazy one.
        size: N_B, samples in the mini-batch.
        lazy: samples are loaded during the step, so not all targets are known.
        modules: every module a step runs, those of the loss too.
        leaves: every parameter that may receive a gradient.
        device: where the model is.
        batchnorm: "exact" or "local".
        trains: with backward; else forward only.
        lanes: micro-batches wait for each other in BatchNorm.
        mode: a context that is entered for it.
        draws: every draw is made for the full batch.
        global_samples: samples of all ranks; 0 (default) is one process.
        sharded: has gathered the model; None for an unsharded one.
        paged: ids of the parameters whose memory is paged, within `page_bytes`.
        page_bytes: bytes for them and their gradients.
        spare: bytes that may be tried with real tensors while fakes are rehearsed.
        meets: samples that meet inside the model, where `size` is more; 0 (default): they are not.
        state: the places where the loss can have state; None (default) if not needed.
    """

    model: nn.Module
    loss: Loss
    rows: TensorBatch
    size: int
    lazy: bool
    modules: Modules
    leaves: list[Tensor]
    device: torch.device
    batchnorm: str
    trains: bool
    lanes: bool = False
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext
    draws: bool = False
    global_samples: int = 0
    sharded: Sharded | None = None
    paged: frozenset[int] = frozenset()
    page_bytes: int = 0
    spare: int = 0
    meets: int = 0
    state: LossState | None = None

    @property
    def together(self) -> int:
        """Samples of the batch that meet inside the model, on all ranks."""
        return max(self.meets or self.size, self.global_samples)

    @property
    def fake(self) -> bool:
        """Whether it is made of tensors without data."""
        return self.mode is not nullcontext

    def batch(self, count: int) -> Batch:
        """Return the batch, limited to its first `count` micro-batches."""
        if self.lazy:
            return Loaded(self.rows, self.size, count)
        return FirstRows(self.rows.inputs, self.rows.targets, self.size, self.rows.size, count)


@dataclass(frozen=True)
class FirstRows(TensorBatch):
    """Batch of `size` rows in memory, limited to its first `count` micro-batches.

    Of a small batch there are more rows than it has, `there`, so that there can be so many.
    """

    there: int
    count: int

    def micro_batches(self, micro_batch: int) -> Iterator[MicroBatch]:
        """Yield the first few."""
        every = TensorBatch(self.inputs, self.targets, self.there)
        yield from islice(every.micro_batches(micro_batch), self.count)


@dataclass(frozen=True)
class Loaded:
    """The same, of rows that get memory of their own, as those of a `LazyBatch` do."""

    rows: TensorBatch
    size: int
    count: int

    def micro_batches(self, micro_batch: int) -> Iterator[MicroBatch]:
        """Yield the first few."""
        for micro in islice(self.rows.micro_batches(micro_batch), self.count):
            items = micro.map(Tensor.clone)
            yield items.map(Tensor.clone)


class Claiming(HostLink):
    """Copies micro-batches to the device, and names them inputs for the meter."""

    def __init__(self, device: torch.device, meter: Meter) -> None:
        super().__init__(device)
        self._meter = meter

    def send(self, micro_batch: MicroBatch) -> Shipment:
        """Copy the tensors that are not on the device, and claim all of them as inputs."""
        if absent() is not None:  # a batch on the host is copied to it
            micro_batch = micro_batch.map(Tensor.clone)
        sent = super().send(micro_batch)
        pair = (sent.micro_batch.inputs, sent.micro_batch.targets)
        self._meter.claim("inputs", (tensor for _, tensor in tree.tensors(pair)))
        return sent


def as_fakes(case: Case) -> Case:
    """Return the case on fakes.

    Raises:
        Exception: the model or the loss cannot be copied, or holds tensors that cannot be faked.
    """
    fakes = Fakes()
    model, loss = fakes.copy((case.model, case.loss), [module for _, module in case.modules])
    rows = max(case.size, 4 * MICRO_BATCHES)
    pair = (case.rows.inputs, case.rows.targets)
    inputs, targets = fakes.rows(pair, case.rows.size, rows)
    return Case(
        model=model,
        loss=loss,
        rows=TensorBatch(inputs, targets, rows),
        size=case.size if case.lazy else rows,
        lazy=case.lazy,
        modules=[(path, fakes.copy(module, [])) for path, module in case.modules],
        leaves=[fakes.of(leaf) for leaf in case.leaves],
        device=case.device,
        batchnorm=case.batchnorm,
        trains=case.trains,
        lanes=case.lanes,
        mode=fakes.entered,
        draws=case.draws,
        global_samples=case.global_samples,
        paged=frozenset(id(fakes.of(p)) for p in _every(case) if id(p) in case.paged),
        page_bytes=case.page_bytes,
        meets=case.size,
        state=LossState(loss.functions(), model),
    )


def _every(case: Case) -> list[Tensor]:
    return [*tensors_of((module for _, module in case.modules), "_parameters"), *case.leaves]


def few(case: Case, rows: int) -> Case:
    """Return the case with `rows` rows or more; where they are repeated, no more than that.

    Where not all rows of the batch are there, it is the case of a batch of those that are.
    """
    there = case.rows.size
    if there >= rows:
        return case if case.lazy or there >= case.size else replace(case, size=there)
    pair = (case.rows.inputs, case.rows.targets)
    times, rest = divmod(rows, there)
    pieces, sizes = [pair] * times, [there] * times
    if rest:
        pieces, sizes = [*pieces, tree.rows(pair, 0, rest, there)], [*sizes, rest]
    inputs, targets = tree.join(pieces, sizes=sizes, name="rows")
    size = case.size if case.lazy else rows
    meets = min(case.meets or case.size, size)
    return replace(case, rows=TensorBatch(inputs, targets, rows), size=size, meets=meets)


def first_rows(case: Case, size: int) -> Case:
    """Return the case of a batch of just `size` samples, where its rows are all there."""
    if case.lazy or case.rows.size <= size:
        return case
    pair = (case.rows.inputs, case.rows.targets)
    with case.mode():
        inputs, targets = tree.rows(pair, 0, size, case.rows.size)
    meets = min(case.meets, size)
    return replace(case, rows=TensorBatch(inputs, targets, size), size=size, meets=meets)


def stretched(rows: TensorBatch, shapes: Sequence[tuple[int, ...]], count: int) -> TensorBatch:
    """Return the first rows in other shapes: short dimensions are repeated, long ones cut.

    Args:
        rows: at least one.
        shapes: of a row of each of its tensors, in order.
        count: rows to take, or all that there are.
    """
    count, wanted = min(count, rows.size), iter(shapes)

    def one(tensor: Tensor) -> Tensor:
        longer = tensor.detach()
        for dim, length in enumerate(next(wanted), 1):
            if longer.shape[dim] != length:
                index = torch.arange(length, device=tensor.device) % max(longer.shape[dim], 1)
                longer = longer.index_select(dim, index)
        return longer.requires_grad_(tensor.requires_grad)

    few_rows = tree.rows((rows.inputs, rows.targets), 0, count, rows.size)
    inputs, targets = tree.map_tensors(one, few_rows)
    return TensorBatch(inputs, targets, count)
