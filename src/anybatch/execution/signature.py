"""Signature of a batch, to which a plan belongs, and its description for dry runs.

Two batches of one signature hold the same bytes. One bounds another where every row of it is at
least as large, because a kernel on fewer elements needs no more memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from anybatch.core import accelerator, pytree
from anybatch.core.absent import absent
from anybatch.core.batch import Batch, LazyBatch, MicroBatch, TensorBatch, row_shapes
from anybatch.core.modules import Modules, local, parts_of_sparse, tensors_of
from anybatch.core.plan import OffloadPlan
from anybatch.core.plan_sections import Memory
from anybatch.core.retry import Retry
from anybatch.core.rng import RNGState
from anybatch.distributed.fsdp import Sharded
from anybatch.execution.prefetch import HostLink, Shipment
from anybatch.loss.base import Loss
from anybatch.loss.state import LossState
from anybatch.memory.fakes import Fakes
from anybatch.memory.ledger import StepTimeline
from anybatch.memory.meter import Meter

Shapes = tuple[tuple[int, ...], ...]
"""The shape of one row of each tensor of a batch."""


class ModulesInTiles(Protocol):
    """Interface that runs modules that act on each token by itself in tiles of tokens."""

    def run(self, model: nn.Module, forward: Callable[[], Any]) -> Any:
        """Return ``forward()``, which calls the model."""

    def of_copy(self, model: nn.Module, copied: nn.Module) -> ModulesInTiles:
        """Return the same for a copy of the model without data."""


@dataclass(frozen=True)
class Signature:
    """Signature that a plan belongs to: all properties of a batch that decide a step's bytes.

    Attributes:
        tensors: path, dimensions and dtype of each tensor of the batch.
        modes: whether it is loaded during the step, the modes of the modules, the frozen
            parameters, and the options that are on in the optimizer.
        numbers: path and value of entries that are no tensors.
        lanes: micro-batches wait for each other in BatchNorm.
        trains: with backward; else forward only.
        shapes: the shape of one row of each tensor.
        size: N_B, samples in the mini-batch.
        before: bytes of gradients that are there already and are added to.
        global_samples: samples of all ranks that are planned for; 0 (default) is one process.
        most: samples that a micro-batch may have, where memory ran out with all of them at once; 0
            (default) where it did not.
    """

    tensors: Any
    modes: Any
    numbers: tuple[tuple[str, Any], ...]
    lanes: bool
    trains: bool
    shapes: Shapes
    size: int
    before: int
    global_samples: int = 0
    most: int = 0

    @property
    def largest(self) -> int:
        """The most samples that a micro-batch may have."""
        return self.most or self.size

    @property
    def elements(self) -> int:
        """Elements of one sample."""
        return elements(self.shapes)

    def like(self, other: Signature) -> bool:
        """Say whether they differ in sizes and numbers only."""
        return (self.tensors, self.modes, self.lanes) == (other.tensors, other.modes, other.lanes)

    def bounds(self, other: Signature) -> bool:
        """Say whether a step of `other` holds no more than one of this, at the same micro-batch."""
        like = self.like(other) and self.numbers == other.numbers
        return (
            like
            and (self.trains or not other.trains)
            and all(
                all(mine >= its for mine, its in zip(a, b, strict=True))
                for a, b in zip(self.shapes, other.shapes, strict=True)
            )
        )


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run: division of the batch, and offloaded tensors.

    Attributes:
        micro_batch: samples in a micro-batch.
        accumulator: gradients are summed in one, so out of memory costs one micro-batch.
        memory: that of the plan.
        coupled: the loss needs all outputs at once.
        loss: the loss in words.
        lanes: micro-batches wait for each other.
        offload: which saved tensors are offloaded; None (default) where none is.
        passes: returns that step as it passes; None (default) where that was not foreseen.
        trying: the search that this step is a part of, in words; nothing (default) where it is in
            none, or the search has ended.
    """

    micro_batch: int
    accumulator: bool
    memory: Memory
    coupled: bool
    loss: str
    lanes: bool = False
    offload: OffloadPlan | None = None
    passes: Callable[[], StepTimeline] | None = field(default=None, compare=False, repr=False)
    trying: str = ""

    def states_to_add(self, states: int) -> int:
        """Return the bytes of the optimizer's state that a step with so many does not have yet."""
        return max(0, dict(self.memory.owners).get("optimizer", 0) - states)

    def with_more(self, nbytes: int) -> RunPlan:
        """Return a plan that predicts so many bytes more."""
        if not nbytes:
            return self
        return replace(self, memory=replace(self.memory, predicted=self.memory.predicted + nbytes))


def tensor_signature(rows: TensorBatch | MicroBatch) -> tuple[Any, ...]:
    """Return path, dimensions and dtype of every tensor."""
    if isinstance(rows, TensorBatch):
        return rows.form
    every = pytree.tensors((rows.inputs, rows.targets))
    return tuple([(path, t.dim(), t.dtype) for path, t in every])


def shapes_of(rows: TensorBatch | MicroBatch) -> Shapes:
    """Return the shape of one row of every tensor."""
    if isinstance(rows, TensorBatch) and rows.bare:
        return tuple(rows.inputs.shape[1:]), tuple(rows.targets.shape[1:])
    return row_shapes((rows.inputs, rows.targets))


def numbers_of(rows: TensorBatch | MicroBatch) -> tuple[tuple[str, Any], ...]:
    """Return path and value of every number, flag and text that is no row."""
    if isinstance(rows, TensorBatch) and rows.bare:
        return ()
    leaves = pytree.leaves((rows.inputs, rows.targets))
    return tuple((path, leaf) for path, leaf in leaves if isinstance(leaf, PLAIN))


PLAIN = bool | int | float | str


RATES = frozenset(("lr", "initial_lr", "max_lr", "min_lr"))
"""Entries of torch's schedules in a group of parameters."""


def switched_on(optimizer: torch.optim.Optimizer | None) -> tuple[Any, ...]:
    """Return how many parameters each group has, and which of its options are not off.

    A learning rate changes no memory, and is 0 for a step where a schedule warms up from it or ends
    at it; a momentum that is there does.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    return tuple(
        (
            len(group["params"]),
            *(k for k, v in group.items() if isinstance(v, PLAIN) and v and k not in RATES),
        )
        for group in groups
    )


def elements(shapes: Shapes) -> int:
    """Return the elements of one sample."""
    return sum(map(prod, shapes))


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor that are here; of a sparse one, of the entries that are."""
    tensor = local(tensor)
    parts = parts_of_sparse(tensor) or (tensor,)
    return sum(part.numel() * part.element_size() for part in parts)


# Description of a step without its micro-batch size, for dry runs and timing.
#
# A case names the model, the loss, the rows and the parameters of a step. `as_fakes` makes the same
# case of tensors without data; both go through the same mechanisms (`anybatch.planner.rehearsal`).

MICRO_BATCHES = 3
"""Of a rehearsal: the first has no gradients yet, the second has another on its way."""

RESIDENT = 2
"""Of a rehearsal on a host that has all rows in memory: no micro-batch is on its way."""


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
        chunked: bytes of the chunks of wide linear maps and losses; 0 (default) computes none so.
        tiles: runs modules in tiles of tokens; None (default) runs all of them whole.
        outputs: the engine stores the outputs of all samples. Default False.
        masks_full: on fakes a mask selects all that it could. Default False: a selection, whose
            size depends on values, raises an error.
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
    chunked: int = 0
    tiles: ModulesInTiles | None = None
    outputs: bool = False
    masks_full: bool = False

    @property
    def together(self) -> int:
        """Samples of the batch that meet inside the model, on all ranks."""
        return max(self.meets or self.size, self.global_samples)

    @property
    def fake(self) -> bool:
        """Whether it is made of tensors without data."""
        return self.mode is not nullcontext

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a divided step that a rehearsal runs."""
        fetched = self.lazy or self.lanes or bool(self.paged) or self.sharded is not None
        return MICRO_BATCHES if fetched or not accelerator.of(self.device).host else RESIDENT

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
        self._meter.claim("inputs", (tensor for _, tensor in pytree.tensors(pair)))
        return sent


def as_fakes(case: Case) -> Case:
    """Return the case on fakes.

    Raises:
        Exception: the model or the loss cannot be copied, or holds tensors that cannot be faked.
    """
    fakes = Fakes(masks_full=case.masks_full, values=True)
    model, loss = fakes.copy((case.model, case.loss), [module for _, module in case.modules])
    # Chunks are foreseen by micro-batches of nearly all samples.
    rows = max(case.size * (MICRO_BATCHES if case.chunked else 1), 4 * MICRO_BATCHES)
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
        chunked=case.chunked,
        tiles=None if case.tiles is None else case.tiles.of_copy(case.model, model),
        outputs=case.outputs,
        masks_full=case.masks_full,
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
        pieces, sizes = [*pieces, pytree.rows(pair, 0, rest, there)], [*sizes, rest]
    inputs, targets = pytree.join(pieces, sizes=sizes, name="rows")
    size = case.size if case.lazy else rows
    meets = min(case.meets or case.size, size)
    return replace(case, rows=TensorBatch(inputs, targets, rows), size=size, meets=meets)


def first_rows(case: Case, size: int) -> Case:
    """Return the case of a batch of just `size` samples, where its rows are all there."""
    if case.lazy or case.rows.size <= size:
        return case
    pair = (case.rows.inputs, case.rows.targets)
    with case.mode():
        inputs, targets = pytree.rows(pair, 0, size, case.rows.size)
    meets = min(case.meets, size)
    return replace(case, rows=TensorBatch(inputs, targets, size), size=size, meets=meets)


def stretched(rows: TensorBatch, shapes: Sequence[tuple[int, ...]], count: int) -> TensorBatch:
    """Return the first rows in other shapes: short dimensions are repeated, long ones cut."""
    count, wanted = min(count, rows.size), iter(shapes)

    def one(tensor: Tensor) -> Tensor:
        longer = tensor.detach()
        for dim, length in enumerate(next(wanted), 1):
            if longer.shape[dim] != length:
                index = torch.arange(length, device=tensor.device) % max(longer.shape[dim], 1)
                longer = longer.index_select(dim, index)
        return longer.requires_grad_(tensor.requires_grad)

    few_rows = pytree.rows((rows.inputs, rows.targets), 0, count, rows.size)
    inputs, targets = pytree.map_tensors(one, few_rows)
    return TensorBatch(inputs, targets, count)


# How large the rows have been of batches that are loaded on the way: no plan may be for less.
#
# The samples of a `LazyBatch` are unknown before they are loaded. A few of them are loaded to plan
# with; if a micro-batch has longer rows, the step ends before it is run, everything is restored,
# and the step begins again under a plan for such rows.
#
#     planned for rows of 30 │ mu_0: 12 │ mu_1: 28 │ mu_2: 45: again │ planned for 45 │ mu_0 ...

FEW = MICRO_BATCHES * MICRO_BATCHES
"""Rows that are loaded to plan with."""


class Reach:
    """The largest rows so far, for each signature (paths, dimensions and dtypes)."""

    def __init__(self) -> None:
        self._largest_rows: dict[Any, TensorBatch] = {}

    def rows(self, batch: LazyBatch) -> TensorBatch:
        """Return a few rows as large as any so far; the first ones, where there are none yet.

        The RNG state is restored.
        """
        if not self._largest_rows:
            rng = RNGState.now()
            self._take(next(iter(batch.micro_batches(min(batch.size, FEW)))))
            rng.put_back()
        return max(self._largest_rows.values(), key=lambda rows: elements(shapes_of(rows)))

    def learn(self, retry: Retry) -> None:
        """Take in the larger rows for which a step is run again."""
        if retry.reason == "rows":
            self._take(retry.learned["micro"])

    def watch(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield micro-batches."""
        for micro in micro_batches:
            largest = self._largest_rows.get(tensor_signature(micro))
            if largest is None or shapes_of(largest) != _largest(largest, micro):
                raise Retry("rows", micro=micro)
            yield micro

    def _take(self, micro: MicroBatch) -> None:
        largest = self._largest_rows.get(tensor_signature(micro))
        shapes = shapes_of(micro) if largest is None else _largest(largest, micro)
        few = stretched(TensorBatch(micro.inputs, micro.targets, micro.size), shapes, FEW)
        inputs, targets = pytree.map_tensors(Tensor.clone, (few.inputs, few.targets))
        self._largest_rows[tensor_signature(micro)] = TensorBatch(inputs, targets, few.size)


def _largest(one: TensorBatch | MicroBatch, other: TensorBatch | MicroBatch) -> Shapes:
    """Return the shapes that hold the rows of both."""
    pairs = zip(shapes_of(one), shapes_of(other), strict=True)
    return tuple(tuple(map(max, a, b)) for a, b in pairs)
