"""The batch over all ranks: loss and gradient of all samples, wherever they are.

Every rank runs its own samples, in micro-batches of its own number; few values are exchanged:

    begin       sizes; whether samples meet; a rank without samples learns what it misses
    totals      denominators of the loss, counted over all samples
    meetings    moments of BatchNorm forward, two sums backward: from the last lane of each rank
    gradients   one sum over all ranks, in float32 or better, with no division by their number; of
                a streamed step, from the second on, while its last backward still runs
    end         a result counts only if all ranks have theirs; else no rank keeps its own

Source: AGBN, Algorithms 2 and 5 (means weighted by m_i).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from anybatch.core import pytree
from anybatch.core.accelerator import home, of, wide
from anybatch.core.moments import merged_in_order
from anybatch.core.rng import RNGState
from anybatch.distributed import gradients
from anybatch.distributed.buckets import Pieces
from anybatch.distributed.coordinator import END, Coordinator, Scripts
from anybatch.distributed.gradients import GradientSums
from anybatch.distributed.handshake import Alike, Beginning, Here
from anybatch.distributed.local_batch import Amended, Layout, LocalBatch, Rows, Take
from anybatch.distributed.process_group import Group, packed
from anybatch.errors import NotExactError, RankError
from anybatch.loss.base import Total

P = ParamSpec("P")
R = TypeVar("R")


def meets(method: Callable[Concatenate[Ranks, P], R]) -> Callable[Concatenate[Ranks, P], R]:
    """Wrap a method so that it ends before Ctrl-C does: other ranks would wait for this one."""

    @wraps(method)
    def wrapped(self: Ranks, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._coordinator.shielded():
            return method(self, *args, **kwargs)

    return wrapped


class Ranks(LocalBatch):
    """Ranks of one step, joined by collectives.

    Args:
        coordinator: the collectives of the step.
        here: the values of this rank.
        alike: values that must be the same on all.
        scripts: the collectives of earlier steps of this signature, if any.
        dense: places of the parameters that had a dense gradient in it, on some rank; None where
            they cannot be sent before the end of backward. Default empty.

    Attributes:
        size: N_B over all ranks.
        begin: the place of this rank's first sample among them.
        micro_batch: the smallest of any rank that has samples.
        lanes: samples meet in BatchNorm on some rank.
        coupled: some rank knows that the loss needs all outputs.
        settled: no rank has to plan for more samples than it has, so the step can begin; else all
            ranks come together once more.
        dense: as given, and after `gradients` as this step has found it.

    Raises:
        BatchError: no rank has a sample.
        RankError: some call `backward`, others `evaluate`; or they are not alike.
    """

    several = True

    def __init__(
        self,
        coordinator: Coordinator,
        here: Here,
        alike: Alike,
        scripts: Scripts | None = None,
        dense: tuple[int, ...] | None = (),
    ) -> None:
        self._coordinator, self._here, self.dense = coordinator, here, dense
        self._offered: Pieces | None = None
        self._counted: list[list[Total] | None] = []
        self._ending = False
        self._sums: GradientSums | None = None
        self._loss: tuple[Tensor, Tensor] | None = None
        self._moves: Any = None
        with coordinator.shielded():
            facts = coordinator.begin([*map(float, here), *alike], scripts or {})
            found = Beginning(facts, coordinator.group.rank)
            if not found.settled:
                coordinator.begin_again()
        self.size, self.begin = found.size, found.begin
        self.micro_batch, self.lanes, self.coupled = found.micro_batch, found.lanes, found.coupled
        self.settled, self._sizes, self._first = found.settled, found.sizes, found.first

    @property
    def script(self) -> Scripts:
        """The collectives of the step."""
        return {self._coordinator.sends_early: tuple(self._coordinator.script)}

    @property
    def sending(self) -> bool:
        """Whether gradients are on their way."""
        return self._coordinator.early is not None and self._coordinator.early.begun

    def offer(self, parameters: Sequence[Tensor]) -> None:
        """Offer to send gradients early that were dense in the last step of this signature."""
        places = self.dense or ()
        if gradients.OVERLAP and not self._counted and max(places, default=-1) < len(parameters):
            self._offered = Pieces(self._coordinator.group, parameters, places) if places else None

    def during(self, take: Take) -> AbstractContextManager[None]:
        """Return the context of the last backward, which sends early if all ranks agreed."""
        early = self._coordinator.early
        return nullcontext() if early is None else early.during(take)

    def totals(self, totals: list[Total] | None) -> list[Total] | None:
        """Return the denominators of the full batch; a rank without samples passes an empty list.

        A micro-batch that is tried again gets the earlier counts.
        """
        if not self._counted:
            with self._coordinator.shielded():
                self._counted.append(self._count(totals))
        return self._counted[0]

    def _count(self, totals: list[Total] | None) -> list[Total] | None:
        offer = 0 if self._offered is None else self._offered.digest
        part = packed_totals(totals, has_rows=self._here.size > 0, offer=offer)
        rows = [row.tolist() for row in self._coordinator.gather("the loss", part)]
        found = counted(rows, totals or [])
        countable = found is not None and all(one.denominator is not None for one in found)
        if countable and self._offered and all(row[-1] == offer for row in rows):
            self._coordinator.send_early(self._offered)
        return found

    @meets
    def sum_of(self, what: str, value: float | Tensor) -> float | Tensor:
        """Return the sum over all ranks: a tensor on the device of `value`, or a number."""
        number = (
            wide(value) if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        )
        total = self._coordinator.sum(what, number.reshape(1))[0]
        if isinstance(value, Tensor):
            return total.to(value.device, value.dtype if value.dtype != torch.long else None)
        return float(total)

    @meets
    def reduce(self, key: Any, part: Any, add: Callable[[Any, Any], Any]) -> Any:
        """Return the sum of tensors, or of moments, over all ranks."""
        if isinstance(part, Tensor):
            real = torch.view_as_real(part) if part.is_complex() else part
            total = self._coordinator.sum(str(key), real).reshape(real.shape)
            total = total.to(real.device, real.dtype)
            return torch.view_as_complex(total) if part.is_complex() else total
        rows = self._coordinator.gather(str(key), part.packed())
        return merged_in_order([row.to(home(part.mean.device)) for row in rows], add)

    @meets
    def gather(self, key: Any, rows: Tensor) -> tuple[Tensor, int]:
        """Return the rows of all ranks, and where these begin among them."""
        self._coordinator.call(str(key))
        with self._coordinator.raw():
            sizes = self._coordinator.group.objects(len(rows))
            gathered = joined_rows(self._coordinator.group, rows, sizes)
        return gathered, sum(sizes[: self._coordinator.group.rank])

    @meets
    def rows(self, outputs: Any, targets: Any, layout: Layout, size: int) -> Rows:
        """Return outputs and targets of all ranks, in their order; see `Rows`."""
        found, aims = rows_of_all(self._coordinator, outputs, targets, layout, size)
        leads = self._coordinator.group.rank == self._first
        return Rows(found, aims, self.size, self.begin, leads=leads, here=size)

    def loss(self, here: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor that `end` fills with the loss of all samples."""
        self._loss = here, torch.empty_like(here, dtype=dtype)
        return self._loss[1]

    @meets
    def gradients(self, sums: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor | None]:
        """Return the sums over all ranks; None where no rank has one.

        Where pieces were agreed on, the presence of gradients is exchanged at the end, which may
        `amend` the sums.
        """
        self._ending = True
        early = self._coordinator.early
        found = GradientSums(self._coordinator, sums, early)
        if early is not None:
            self._sums = found
            totals = found.early()
            self._coordinator.early = None
            return totals
        kinds = torch.tensor(found.kinds, dtype=torch.float64)
        found.receive(self._coordinator.gather(found.place, kinds))
        totals = [None] * len(sums)
        for at, total in found.late():
            totals[at] = total
        self._note(found)
        return totals

    def _note(self, sums: GradientSums) -> None:
        if self.dense is not None:
            self.dense = sums.dense

    @meets
    def agree(self, devices: Sequence[torch.device]) -> None:
        """Check that all ranks have one RNG state, and copy it to those without samples."""
        own = RNGState.on(devices)
        check = torch.tensor([own.checksum()], dtype=torch.float64)
        found = [float(row) for row in self._coordinator.gather("the RNG state", check)]
        first = found[self._first]
        # A rank without samples draws nothing (test_draws_are_those_of_the_batch_of_all_ranks).
        other = [r for r, size in enumerate(self._sizes) if size and found[r] != first]
        if other:
            raise different_draws(self._first, other)
        if not all(self._sizes):
            state: RNGState = self._coordinator.broadcast_object(own, self._first)
            if not self._here.size:
                state.put_on(devices)

    def refuse_smaller(self) -> None:
        """Refuse to run a smaller step: the hooks of other ranks may have fired."""
        if self._ending:
            raise RankError(
                "memory must suffice until a step has ended on all ranks, and it ran out on this "
                "one after the gradients had been summed: give less memory= or a smaller "
                "micro_batch"
            )

    def moves(self, buffers: Any) -> None:
        """Copy buffers that forward moved to ranks without samples, when the step ends."""
        self._moves = buffers

    @meets
    def end(self) -> Amended:
        """Wait until all ranks have ended the step; return the amended sums.

        Raises:
            Retry: the step has to be run again.
        """
        amended = self._end()
        if self._moves is not None and not all(self._sizes):
            buffers = self._coordinator.broadcast_object(self._moves.on_host(), self._first)
            if not self._here.size:
                self._moves.receive(buffers)
        return amended

    def _end(self) -> Amended:
        sums, loss = self._sums, self._loss
        numbers = [] if sums is None else sums.kinds
        numbers = numbers if loss is None else [*numbers, float(loss[0])]
        if not numbers:
            self._coordinator.end()
            return []
        place = END if sums is None else sums.place
        rows = self._coordinator.gather(place, torch.tensor(numbers, dtype=torch.float64))
        amended = [] if sums is None else self._amended(sums, rows)
        if loss is not None:
            loss[1].fill_(sum(float(row[-1]) for row in rows))
        self._coordinator.over()
        return amended

    def _amended(self, sums: GradientSums, rows: list[Tensor]) -> Amended:
        missing = sums.receive([row[: len(sums.kinds)] for row in rows])
        self._note(sums)
        amended = [(sums.parameters[at], total) for at, total in sums.late()]
        if missing:
            self._coordinator.off_script()
            self._coordinator.end()
        return amended


# Outputs and targets of all ranks, received in their final memory.
#
# Ranks exchange shapes, check that they can be joined, and send every tensor into its rows of the
# joined one. So in addition to its own rows a rank holds only the joined tensor.
#
#     rank 0:  3 rows ──┐  ┌─ 0 0 0 1 1 ─┐  the same on every rank
#     rank 1:  2 rows ──┘  └─ in place ──┘


class Sent(NamedTuple):
    """Description of one rank's rows, as sent to all ranks.

    Attributes:
        size: samples.
        layout: the dimension of each output that holds the samples.
        values: outputs and targets, with places where there are tensors; None without samples.
        kinds: shape and dtype of each tensor.
    """

    size: int
    layout: Layout
    values: Any
    kinds: list[tuple[tuple[int, ...], torch.dtype]]

    def axis(self, at: int) -> int | None:
        """Return the dimension of a tensor that holds the samples; None for a constant."""
        if at < len(self.layout):
            return self.layout[at]
        return 0 if self.kinds[at][0] else None


class _TensorSlot:
    """Stands for a tensor in a tree that is sent."""

    def __init__(self, at: int) -> None:
        self.at = at


def rows_of_all(
    coordinator: Coordinator, outputs: Any, targets: Any, layout: Layout, size: int
) -> tuple[Any, Any]:
    """Return outputs and targets of all ranks, in their order.

    Args:
        coordinator: the collectives of the step.
        outputs: of this rank; anything where `size` is 0.
        targets: the same.
        layout: the dimension of each output that holds the samples.
        size: samples of this rank.

    Raises:
        BatchError: they cannot be joined; all ranks say so.
    """
    mine: list[Tensor] = []

    def marked(tensor: Tensor) -> Any:
        mine.append(tensor.detach())
        return _TensorSlot(len(mine) - 1)

    here = pytree.map_tensors(marked, (outputs, targets)) if size else None
    form = packed((size, layout, here, [(tuple(t.shape), t.dtype) for t in mine]))  # may fail
    coordinator.call("the outputs")
    with coordinator.raw():
        every = [Sent(*one) for one in coordinator.group.unpacked(form)]
        constants = [
            _constants(coordinator.group, rank, one, mine) for rank, one in enumerate(every)
        ]
    forms = _joined(every, constants)  # may fail, on all ranks alike
    places = iter(range(max(len(one.kinds) for one in every)))
    with coordinator.raw():
        fill = partial(_filled, coordinator.group, every, mine)
        found: tuple[Any, Any] = pytree.map_tensors(lambda t: fill(next(places), t), forms)
    return found


def joined_rows(group: Group, own: Tensor, sizes: list[int]) -> Tensor:
    """Return the rows of all ranks, [sum of sizes, ...], that differ in their number only."""
    shape = (sum(sizes), *own.shape[1:])
    full = torch.empty(shape, dtype=own.dtype, device=group.device)
    for rank, part in enumerate(torch.split(full, sizes)):
        _receive(group, rank, part, own)
    return full.to(own.device)


def _constants(group: Group, rank: int, one: Sent, mine: list[Tensor]) -> dict[int, Tensor]:
    """Return the tensors without rows of a rank, by their place."""
    found: dict[int, Tensor] = {}
    for at, (shape, dtype) in enumerate(one.kinds):
        if one.axis(at) is None:
            found[at] = torch.empty(shape, dtype=dtype, device=group.device)
            _receive(group, rank, found[at], mine[at] if rank == group.rank else None)
    return found


def _joined(every: list[Sent], constants: list[dict[int, Tensor]]) -> tuple[Any, Any]:
    """Return all outputs and targets, without memory for those that have rows."""

    def placed(one: Sent, values: dict[int, Tensor], leaf: Any) -> Any:
        if not isinstance(leaf, _TensorSlot):
            return leaf
        shape, dtype = one.kinds[leaf.at]
        return values.get(leaf.at, torch.empty(shape, dtype=dtype, device="meta"))

    pairs = zip(every, constants, strict=True)
    there = [
        (one, pytree.map_leaves(partial(placed, one, k), one.values))
        for one, k in pairs
        if one.size
    ]
    sizes = [one.size for one, _ in there]
    outputs = pytree.join([found[0] for _, found in there], list(there[0][0].layout), sizes=sizes)
    return outputs, pytree.join([found[1] for _, found in there], sizes=sizes, name="targets")


def _filled(group: Group, every: list[Sent], mine: list[Tensor], at: int, form: Tensor) -> Tensor:
    """Return a tensor with the rows of all ranks; a constant as it is."""
    device = mine[0].device if mine else group.device
    if not form.is_meta:
        return form.to(device)
    full = torch.empty(form.shape, dtype=form.dtype, device=group.device)
    begin = 0
    for rank, one in enumerate(every):
        axis = one.axis(at) if one.size else None
        if axis is not None:
            rows = one.kinds[at][0][axis]
            part = full.narrow(axis, begin, rows)
            _receive(group, rank, part, mine[at] if rank == group.rank else None)
            begin += rows
    return full.to(device)


def _receive(group: Group, rank: int, part: Tensor, own: Tensor | None) -> None:
    """Fill `part` with the tensor of a rank, which is `own` on that rank."""
    piece = (
        part
        if part.is_contiguous()
        else torch.empty_like(part, memory_format=torch.contiguous_format)
    )
    if rank == group.rank and own is not None:
        piece.copy_(own)
    group.sent(piece, rank)
    if piece is not part:
        part.copy_(piece)


# Facts of one rank's loss, and the denominators of the loss over all ranks.

TERMS = 8
"""Terms of a loss that are counted over ranks; one with more counts as coupled."""


def packed_totals(totals: list[Total] | None, *, has_rows: bool, offer: int) -> Tensor:
    """Return this rank's loss as a row of numbers, [4 + 3 TERMS].

    It is: whether samples meet, whether there are rows, terms, each term, and which pieces of
    gradients it offers to send early.
    """
    coupled = has_rows and (totals is None or len(totals) > TERMS)
    numbers = [float(coupled), float(has_rows)]
    terms = [] if coupled or totals is None else totals
    numbers.append(float(len(terms)))
    for total in terms:
        denominator = math.nan if total.denominator is None else float(total.denominator)
        numbers += [total.weight, denominator, float(total.adds)]
    numbers += [0.0] * (3 + 3 * TERMS - len(numbers)) + [float(offer)]
    return torch.tensor(numbers, dtype=torch.float64)


def counted(rows: list[list[float]], mine: list[Total]) -> list[Total] | None:
    """Return the totals over all ranks; None where a rank couples samples, or has other terms."""
    there = [row for row in rows if row[1]]
    forms = {(row[2], *row[3:-1:3], *row[5:-1:3]) for row in there}
    if any(row[0] for row in there) or len(forms) > 1:
        return None
    found = []
    for k in range(int(there[0][2])):
        weight, _, adds = there[0][3 + 3 * k : 6 + 3 * k]
        each = [row[4 + 3 * k] for row in there]
        denominator = sum(each) if adds else each[0]
        total = mine[k] if mine else Total(weight, None)
        late = math.isnan(denominator)
        found.append(replace(total, denominator=None if late else denominator))
    return found


# Shared RNG state of all ranks, so that together they make the full-batch draw.
#
# Every rank has generators of its own, in any state. A step of ``rng="batch"`` begins on all ranks
# with those of rank 0; each draws for the batch of all ranks and selects its own rows
# (`anybatch.execution.full_batch_rng.mode`), so all end in the state of one process with all
# samples.
#
#     rank 0:  state ──┬── draw [N, C], keep rows 0..a ──┬── the same state
#     rank 1:  its own └── draw [N, C], keep rows a..b ──┤   the same
#     rank 2:  its own     no samples                    └── gets it
#
# The order of the ranks is that of their samples.

LEADER = 0
"""The rank whose RNG state a step begins with."""


def devices_of(model: nn.Module) -> list[torch.device]:
    """Return the accelerators on which the parameters of a model lie, in their order."""
    every = dict.fromkeys(parameter.device for parameter in model.parameters())
    return [device for device in every if not of(device).host]


def same_rng(coordinator: Coordinator, devices: Sequence[torch.device]) -> None:
    """Set the RNG state of rank 0 on all ranks.

    Args:
        coordinator: of a step that has not begun.
        devices: accelerators of this rank's model; the first makes the draws of rank 0's first.
    """
    own = RNGState.on(devices)
    coordinator.fact('the beginning of a step with rng="batch"')
    state: RNGState = coordinator.broadcast_object(own, LEADER)
    first, own_types = [of(n).type for n, _ in state.devices], [d.type for d in devices]
    if first != own_types:
        raise RankError(
            'with rng="batch" all ranks must draw on devices of one type, and the model of rank '
            f"{LEADER} is on {_listed(first)}, that of this rank on {_listed(own_types)}: move the "
            "models alike"
        )
    state.put_on(devices)


def _listed(types: list[str]) -> str:
    """Return how many devices there are, and of which types."""
    return f"{len(types)} accelerators ({', '.join(types)})" if types else "no accelerator"


def different_draws(first: int, others: Sequence[int]) -> NotExactError:
    """Return the error for ranks with samples that end with different RNG states."""
    ranks = ", ".join(f"rank {rank}" for rank in others)
    return NotExactError(
        f'with rng="batch" every rank must draw as often as the others, and {ranks} and rank '
        f"{first} have left the random generators in different states: the draws depend on the "
        "samples, or loss, observe or the loading of samples draws on some ranks only. Use "
        'rng="micro_batch"'
    )
