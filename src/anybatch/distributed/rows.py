"""Outputs and targets of all ranks, received in their final memory.

Ranks exchange shapes, check that they can be joined, and send every tensor into its rows of the
joined one. So in addition to its own rows a rank holds only the joined tensor.

    rank 0:  3 rows ──┐  ┌─ 0 0 0 1 1 ─┐  the same on every rank
    rank 1:  2 rows ──┘  └─ in place ──┘
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anybatch.core import tree
from anybatch.distributed.coordinator import Coordinator
from anybatch.distributed.group import Group, packed
from anybatch.distributed.local_batch import Layout


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

    here = tree.map_tensors(marked, (outputs, targets)) if size else None
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
        found: tuple[Any, Any] = tree.map_tensors(lambda t: fill(next(places), t), forms)
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
        (one, tree.map_leaves(partial(placed, one, k), one.values)) for one, k in pairs if one.size
    ]
    sizes = [one.size for one, _ in there]
    outputs = tree.join([found[0] for _, found in there], list(there[0][0].layout), sizes=sizes)
    return outputs, tree.join([found[1] for _, found in there], sizes=sizes, name="targets")


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
