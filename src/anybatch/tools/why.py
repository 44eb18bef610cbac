"""`why`: the ways to hold less than an undivided batch does, side by side, and the one of a plan.

Gradient checkpointing, a fused head, a tiled MLP and offloading are each offered by some library as
a flag, and whether a flag suffices is usually found by crashing. Here one ledger forecasts all of
them by dry runs: the rungs of a plan, and the flags that are no rung. Nothing is trained.

    rows      undivided │ micro-batches │ blocks again │ chunks │ tiles │ offload │ several
    columns   one sample: the least memory │ micro-batches of n │ all samples at once
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from anybatch.core.optimizers import bare
from anybatch.core.plan import Plan
from anybatch.core.units import show_bytes, show_samples
from anybatch.engine.engine import BatchNormMode, Engine
from anybatch.engine.rank_session import several
from anybatch.errors import BudgetError, NotYetError
from anybatch.execution.signature import RunPlan, first_rows
from anybatch.loss.base import Loss
from anybatch.planner import rehearsal
from anybatch.planner.budget import Foreseen
from anybatch.planner.forecast import Forecast
from anybatch.planner.memory_model import TILES, PlanningRequest
from anybatch.planner.offload_memory import OffloadedSizes
from anybatch.planner.paged_lockstep import PagedLockstep
from anybatch.planner.planner import Planner
from anybatch.planner.resident_memory import ResidentSizes
from anybatch.planner.search import MicroBatchSearch
from anybatch.tools.planning import Question

UNDIVIDED, SPLIT, AGAIN = "the batch undivided", "micro-batches", "blocks computed again"
CHUNKS, OFFLOAD, TILED = "head and loss in chunks", "saved tensors offloaded", "MLPs in tiles"
CHUNKS_TILED, CHUNKS_AGAIN = "chunks and tiles", "blocks again and chunks"
STATES = "states offloaded"

ELSEWHERE = {
    UNDIVIDED: "a plain loop",
    SPLIT: "gradient accumulation",
    AGAIN: "torch.utils.checkpoint, gradient_checkpointing of transformers",
    CHUNKS: "Liger's fused cross-entropy, torch's F.linear_cross_entropy",
    OFFLOAD: "torch's save_on_cpu, offloading of activations in FSDP and TRL",
    TILED: "tiled MLPs of Liger and DeepSpeed",
    CHUNKS_TILED: "both by Liger",
    STATES: "DeepSpeed ZeRO-Offload",
    CHUNKS_AGAIN: "gradient_checkpointing and Liger's head",
}
"""Way -> where else it is offered; in the order in which a plan tries them."""

FLAGS = AGAIN, CHUNKS_AGAIN
"""Ways that no plan has."""

INEXACT = "gradient accumulation, with another BatchNorm"

SAMPLES = 2
"""Samples of the dry runs that count FLOPs."""


@dataclass(frozen=True)
class Way:
    """A way to run a batch, and the bytes that a step then holds at its peak.

    Attributes:
        name: of the way.
        elsewhere: who else offers it.
        least: of the size that holds least, which is one sample or all; None where that is unknown.
        divided: in micro-batches of `Alternatives.micro_batch`; None where that was not forecast.
        undivided: with all samples at once; None where that was not forecast.
        again: the part that is computed again or moved; or the reason why it does not apply.
    """

    name: str
    elsewhere: str
    least: int | None
    divided: int | None
    undivided: int | None
    again: str = "nothing"

    def fits(self, budget: int, n: int) -> str:
        """Return the most samples that fit at once in a budget, in words."""
        sizes = {"all": self.undivided, str(n): self.divided, "1": self.least}
        return next((name for name, held in sizes.items() if held and held <= budget), "no")


@dataclass(frozen=True)
class Alternatives:
    """The ways to run a batch, and the plan within a budget; it prints as a table.

    Attributes:
        rows: the ways.
        size: N_B, samples in the batch.
        micro_batch: samples in the micro-batches of the column between.
        budget: bytes; those of the plan, or of its refusal.
        plan: within the budget; None where nothing fits.
    """

    rows: tuple[Way, ...]
    size: int
    micro_batch: int
    budget: int
    plan: Plan | None

    def way(self, name: str) -> Way:
        """Return the way of that name."""
        return next(row for row in self.rows if row.name == name)

    @property
    def chosen(self) -> str:
        """The name of the way that the plan has; nothing where there is no plan."""
        plan, memory = self.plan, None if self.plan is None else self.plan.memory
        if plan is None or memory is None:
            return ""
        if plan.states is not None or plan.offload is not None:
            return OFFLOAD if plan.states is None else STATES
        if memory.chunked:
            return CHUNKS_TILED if memory.tile else CHUNKS
        if memory.tile:
            return TILED
        return SPLIT if plan.micro_batch < self.size else UNDIVIDED

    @property
    def sentence(self) -> str:
        """The way that the plan has, and why: the ones before it that do not fit."""
        shown, tried = show_bytes(self.budget), dict[str, int]()
        for row in self.rows:
            held = row.undivided if row.name == UNDIVIDED else row.least
            if held is not None and row.name not in FLAGS:
                tried[row.name] = held
        if self.plan is None:
            name = min(tried, key=lambda one: tried[one])
            return f"No plan fits in {shown}: the least is {show_bytes(tried[name])}, by {name}."
        names, chosen = [*tried], self.chosen
        more = [
            f"{name} {show_bytes(tried[name])}"
            for name in names[: names.index(chosen)]
            if tried[name] > self.budget
        ]
        how = "" if chosen == UNDIVIDED else f", {show_samples(self.plan.micro_batch)} at once"
        why = f"more would be {', '.join(more)}" if more else "it fits"
        if not more and chosen not in (UNDIVIDED, SPLIT):
            why = "more samples fit at once than without"
        return f"The plan for {shown} is {chosen}{how}: {why}."

    def __str__(self) -> str:
        n = self.micro_batch
        middle = [f"{n} at once"] if 1 < n < self.size else []
        head = ["way", "also by", "least", *middle, f"all {self.size}", "computed again", "fits"]
        lines = [head]
        for row in self.rows:
            figures = [row.least, *([row.divided] if middle else []), row.undivided]
            cells = ["-" if count is None else show_bytes(count) for count in figures]
            mark = " *" if row.name in FLAGS else " <" if row.name == self.chosen else ""
            fits = row.fits(self.budget, n)
            lines.append([row.name + mark, row.elsewhere, *cells, row.again, fits])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([*table, "", NOTE, self.sentence])

    __repr__ = __str__


NOTE = "<  the plan    *  no part of a plan    least: of one sample at once"


def why(
    model: nn.Module,
    loss_fn: Callable[..., Tensor] | Loss | None,
    batch: tuple[Any, Any],
    *,
    memory: float | str | None = None,
    micro_batch: int | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    batchnorm: BatchNormMode = "exact",
    states: Literal["host", "file", "auto"] | None = None,
) -> Alternatives:
    """Compare the ways to hold less than an undivided batch does, and name that of the plan.

    Dry runs forecast all bytes. Checkpointing is of blocks that a list of modules has several of.

    Args:
        model: as for `Engine`, and so are `loss_fn`, `memory`, `optimizer` and `batchnorm`.
        loss_fn: the loss.
        batch: ``(inputs, targets)`` as for `Engine.backward`.
        memory: the budget of the plan. Default None: as for `Engine`.
        micro_batch: samples in those of one column, and of the plan. Default None chooses.
        optimizer: its state counts with its size after the first step.
        batchnorm: as in `Engine`.
        states: as in `anybatch.plan`, for one more row. Default None: they are on the device.

    Returns:
        The ways; print them.

    Raises:
        AnybatchError: `Engine.backward` would raise it; or there are several ranks.

    Example:
        >>> print(anybatch.planning.why(model, loss_fn, (inputs, targets), memory="6GiB"))
    """
    inputs, targets = batch
    options: dict[str, Any] = {"optimizer": optimizer, "batchnorm": batchnorm}
    make = partial(Engine, model, loss_fn, **options)
    pair, settings = (inputs, targets), {"memory": memory, "micro_batch": micro_batch}
    return ways_of(Question(model, bare(optimizer), pair, make, **settings), states)  # type: ignore[arg-type]


def ways_of(question: Question, states: str | None = None) -> Alternatives:
    """Return the ways to run the batch of a `question`; with `states`, as in `why`, one more."""
    _refuse_ranks()
    make = question.make
    question = replace(question, make=partial(make, tune="off", cache=None))
    plan, size = None, question.size
    try:
        plan = question.answer(None, states, timed=False)
        budget = 0 if plan.memory is None else plan.memory.budget
    except BudgetError as error:
        budget = error.budget
    n = min(size, question.micro_batch or (1 if plan is None else plan.micro_batch))
    ledger = _Ledger(n)
    ledger.foresee(question)
    if states is not None:
        ledger.held[STATES] = _with_states(question, states), None, None
        ledger.words[STATES] = "nothing; parameters, gradients and states are moved"
    with checkpointed(question.model) as count:
        if count:
            ledger.again = f"forward of {count} blocks"
            ledger.foresee(question)
    return Alternatives(tuple(ledger.rows()), size, n, budget, plan)


def _refuse_ranks() -> None:
    if several():
        raise NotYetError(
            "the ways to run a batch are compared in one process, and there are several: compare "
            "them without torchrun"
        )


def _with_states(question: Question, states: str) -> int:
    """Return the fewest bytes with all states offloaded that can be."""
    least = replace(question, memory=1, micro_batch=None)
    try:
        memory = least.answer(None, states, timed=False).memory
    except BudgetError as error:
        return error.needed
    return 0 if memory is None else memory.predicted


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[int]:
    """Checkpoint the repeated blocks of a model in the body; yield how many there are.

    Blocks are modules with modules inside, of which a `ModuleList` or a `Sequential` holds several.
    """
    found = list(_in_lists(model))
    counts = Counter(type(holder._modules[name]) for holder, name in found)
    blocks = [one for one in found if counts[type(one[0]._modules[one[1]])] > 1]
    before = [holder._modules[name] for holder, name in blocks]
    try:
        for (holder, name), block in zip(blocks, before, strict=True):
            assert block is not None
            holder._modules[name] = Checkpointed(block)
        yield len(blocks)
    finally:
        for (holder, name), block in zip(blocks, before, strict=True):
            holder._modules[name] = block


def _in_lists(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the holder and the name of each outermost block of a list.

    A `Sequential` in a list is a block where none of its own modules has modules inside.
    """
    lists = nn.ModuleList, nn.Sequential
    for name, child in module.named_children():
        inner = [*child.children()]
        simple = isinstance(child, nn.Sequential) and not any([*one.children()] for one in inner)
        if isinstance(module, lists) and inner and (simple or not isinstance(child, lists)):
            yield module, name
        else:
            yield from _in_lists(child)


class Checkpointed(nn.Module):
    """A block that backward computes again, as `torch.utils.checkpoint` does."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the block."""
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


Held = tuple[int | None, int | None, int | None]
"""Bytes at the size that holds least, in micro-batches of n, and undivided."""


class _Ledger(Planner):
    """Planner that forecasts every way, in micro-batches of `n`, and decides nothing.

    Attributes:
        again: the part that gradient checkpointing computes again; empty before it is in effect.
        held: way -> bytes of its steps.
        words: way -> the part that is computed again, or why it does not apply.
    """

    def __init__(self, n: int) -> None:
        super().__init__(1, timed=False)  # within one byte no dry run takes real rows
        self.n, self.again, self._accumulates = n, "", ELSEWHERE[SPLIT]
        self.held: dict[str, Held] = {}
        self.words = {AGAIN: "no blocks in a list are alike"}
        self._flops = self._chunk = 0

    def foresee(self, question: Question) -> None:
        """Forecast the ways of a batch, or those with gradient checkpointing."""
        engine = question.make(memory=1)
        engine._planner = self
        self._planned.clear()
        engine.foresee(*question.batch, timed=False)

    def _decide(self, request: PlanningRequest) -> RunPlan:
        """Return any plan, and forecast the ways."""
        found = self._forecast(request)
        if self.again:
            self._checkpointing(request, found)
        else:
            self._rungs(request, found)
        return ResidentSizes(found, request, MicroBatchSearch()).planned(request.signature.size)

    def _forecast(self, request: PlanningRequest) -> Forecast:
        found = Foreseen().foresee(request, rounded=False)
        return found.completed(request.signature, 0)

    def _holds(self, request: PlanningRequest, found: Forecast) -> Held:
        size = request.signature.size
        undivided = found.peak(size, size)
        if request.undivided:
            return undivided, None, undivided
        return found.least(size, size)[1], found.peak(min(self.n, size), size), undivided

    def _rungs(self, request: PlanningRequest, found: Forecast) -> None:
        self.held[SPLIT], self._flops = self._holds(request, found), _flops(found)
        if request.signature.lanes:
            self._accumulates = INEXACT
        self._offload(request, found)
        chunks = [one for one in request.smaller_chunks(found) if one]
        if not (request.may_be_chunked and chunks):
            self.words[CHUNKS] = "no linear map is wide"
        else:
            every = {c: self._of_chunks(request.in_chunks(c)) for c in chunks}
            self._chunk = min(every, key=lambda c: every[c])
            self.held[CHUNKS] = every[self._chunk]
            self.words[CHUNKS] = "logits, where their loss is no sum or mean"
        self._tiles(request)

    def _of_chunks(self, request: PlanningRequest) -> Any:
        return self._holds(request, self._forecast(request))

    def _tiles(self, request: PlanningRequest) -> None:
        tiled = request.in_tiles(TILES[0])
        found = self._of_chunks(tiled) if request.may_be_tiled else None
        if found is None or not tiled.longest:
            self.words[TILED] = "no module acts on each token alone"
            return
        self.held[TILED], self.words[TILED] = found, "forward of these modules"
        if self._chunk:
            both = request.in_chunks(self._chunk).in_tiles(TILES[0])
            self.held[CHUNKS_TILED] = self._of_chunks(both)
            self.words[CHUNKS_TILED] = self.words[TILED]

    def _offload(self, request: PlanningRequest, found: Forecast) -> None:
        """Forecast offloading: of saved tensors, in lockstep of all that a kernel does not need."""
        size, search = request.signature.size, MicroBatchSearch()
        sizes, n = OffloadedSizes(found, request, search), min(self.n, size)
        held = {size: sizes.floor(size)}
        if request.signature.lanes and size > 1 and not request.undivided:
            paged = PagedLockstep(found, request, search)
            held |= {k: _needed(paged, k) for k in {1, n} - {size}}
        elif not request.undivided:
            held |= {k: sizes.floor(k) for k in {1, n} - {size}}
        moved = show_bytes(sizes.saved(size))
        self.words[OFFLOAD] = f"cheap results; up to {moved} are moved"
        self.held[OFFLOAD] = min(held.values()), held.get(n), held[size]

    def _checkpointing(self, request: PlanningRequest, found: Forecast) -> None:
        self.held[AGAIN] = self._holds(request, found)
        more = _flops(found) / self._flops if self._flops else 0
        self.words[AGAIN] = self.again + (f", {more:.2f} x the FLOPs" if more else "")
        if self._chunk:
            self.held[CHUNKS_AGAIN] = self._of_chunks(request.in_chunks(self._chunk))
            self.words[CHUNKS_AGAIN] = self.words[AGAIN]

    def rows(self) -> Iterator[Way]:
        """Yield the ways that were forecast, and those that do not apply."""
        for name, elsewhere in ELSEWHERE.items():
            held = self.held.get(name, (None, None, None))
            if name == UNDIVIDED:
                held = None, None, self.held[SPLIT][2]
            elif name not in self.held and name not in self.words:
                continue
            other = self._accumulates if name == SPLIT else elsewhere
            yield Way(name, other, *held, self.words.get(name, "nothing"))


def _needed(paged: PagedLockstep, n: int) -> int:
    """Return the fewest bytes of lanes of `n` samples."""
    try:
        return paged.planned(n).memory.predicted
    except BudgetError as error:
        return error.needed


def _flops(found: Forecast) -> int:
    """Return the FLOPs of a step of few samples; 0 without a dry run on fakes."""
    case, counter = found.case, FlopCounterMode(display=False)
    if case is None:
        return 0

    @contextmanager
    def mode() -> Iterator[None]:
        with case.mode(), counter:
            yield

    few = replace(first_rows(case, SAMPLES), mode=mode)
    rehearsal.full_batch(few, SAMPLES, found.inspection)
    return counter.get_total_flops()
