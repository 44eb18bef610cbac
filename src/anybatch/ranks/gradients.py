"""The gradients of all ranks, summed once a step.

Half precision was summed in float32 before it comes here, and no number of ranks divides it: every
rank's share was weighted by the denominator of the whole batch. Large gradients are summed where
they lie, small ones in one piece, and each sum is under way while the next is made ready.

Ring all-reduce sends 2 M (N - 1) / N bytes a rank (AGBN, section 4.1); it is the library's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anybatch.ranks.unison import SUMS, Unison

SMALL = 2**18
"""Elements up to which a gradient goes with others, in pieces of no more than four times that."""

NONE, DENSE, SPARSE = 0.0, 1.0, 2.0


def summed(unison: Unison, sums: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor | None]:
    """Return the sums over all ranks.

    Args:
        unison: the collectives of the step.
        sums: (parameter, this rank's sum), the same parameters in the same order on every rank.

    Returns:
        A tensor for each; None where no rank has one.
    """
    here = torch.tensor([_kind(total) for _, total in sums], dtype=torch.float64)
    there = torch.stack(unison.gather(f"{SUMS} {len(sums)} gradients", here))
    found: list[Tensor | None] = [None] * len(sums)
    dense: list[tuple[int, Tensor]] = []
    with unison.raw(), torch.no_grad():
        for at, (parameter, total) in enumerate(sums):
            kinds = set(there[:, at].tolist())
            if DENSE in kinds:
                dense.append((at, _dense(parameter, total)))
            elif SPARSE in kinds:
                found[at] = _sparse(unison, parameter, total)
        for at, total in _all_dense(unison, dense):
            found[at] = total
    return found


def _kind(total: Tensor | None) -> float:
    if total is None:
        return NONE
    return SPARSE if total.is_sparse else DENSE


def _dense(parameter: Tensor, total: Tensor | None) -> Tensor:
    """Return a gradient in the order in which all ranks lay it out."""
    if total is None:
        wide = torch.float32 if parameter.itemsize < 4 else parameter.dtype
        return torch.zeros(parameter.shape, dtype=wide, device=parameter.device)
    return (total.to_dense() if total.is_sparse else total).contiguous()


def _all_dense(unison: Unison, gradients: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    group = unison.group
    large = [(at, t) for at, t in gradients if t.numel() > SMALL]
    under_way: list[Any] = [
        (t, on, group.start_sum(_real(on))) for _, t in large for on in [t.to(group.device)]
    ]
    for bucket in _buckets([t for _, t in gradients if t.numel() <= SMALL]):
        flat = torch.cat([_real(t).reshape(-1) for t in bucket]).to(group.device)
        under_way.append((bucket, flat, group.start_sum(flat)))
    for target, flat, work in under_way:
        group.wait(work)
        if isinstance(target, Tensor):
            if target is not flat:
                target.copy_(flat)
        else:
            _spread(flat, target)
    return gradients


def _buckets(gradients: list[Tensor]) -> list[list[Tensor]]:
    """Return gradients of one dtype together, as many as make a piece."""
    found: list[list[Tensor]] = []
    room: dict[torch.dtype, int] = {}
    last: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        kind, size = _real(gradient).dtype, _real(gradient).numel()
        if room.get(kind, -1) < size:
            last[kind], room[kind] = [], 4 * SMALL
            found.append(last[kind])
        last[kind].append(gradient)
        room[kind] -= size
    return found


def _spread(flat: Tensor, gradients: list[Tensor]) -> None:
    sizes = [_real(gradient).numel() for gradient in gradients]
    for gradient, piece in zip(gradients, torch.split(flat, sizes), strict=True):
        _real(gradient).copy_(piece.reshape(_real(gradient).shape))


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _sparse(unison: Unison, parameter: Tensor, total: Tensor | None) -> Tensor:
    """Return the sum of gradients of which each rank has some rows."""
    part = None
    if total is not None:
        own = total.coalesce()
        part = own.indices().cpu(), own.values().cpu()
    parts = [one for one in unison.group.objects(part) if one is not None]
    return torch.sparse_coo_tensor(
        torch.cat([indices for indices, _ in parts], 1),
        torch.cat([values for _, values in parts]),
        parameter.shape,
        device=parameter.device,
    ).coalesce()
