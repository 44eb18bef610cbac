"""Parameters gathered from their parts on all ranks, and parts cut from full gradients.

``DTensor.full_tensor`` makes one collective a parameter, and waits for a rank that is gone until
the process group gives up. Here many parameters are gathered at once, by a wait that ends. Parts
are as `torch.chunk` makes them: the last ranks may have fewer rows, or none.

    rank 0  [w0 b0] ─┐             ┌─> w = [w0 w1]
    rank 1  [w1 b1] ─┴─> gather ───┴─> b = [b0 b1]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anybatch.core.modules import local
from anybatch.distributed.group import Group

PIECE = 2**20
"""Elements that are gathered together; a parameter with more is gathered by itself."""


Shards = list[tuple[Any, torch.dtype]]
"""DTensors, and the dtype in which each is gathered."""


def gathered(shards: Shards, group: Group | None) -> dict[int, nn.Parameter]:
    """Return the full parameter of each sharded one, by the id of the shard.

    Args:
        shards: in the same order on every rank.
        group: waits for collectives; None where there is one rank.
    """
    found: dict[int, nn.Parameter] = {}
    with torch.inference_mode(mode=False), torch.no_grad():
        pieces: dict[Any, Shards] = {}
        for shard, dtype in shards:
            axis, handle = axis_of(shard)
            if group is None or axis is None or dist.get_world_size(handle) == 1:
                found[id(shard)] = _parameter(local(shard).to(dtype), shard)
                continue
            key = dtype, shard.device, id(handle)
            waiting = pieces.setdefault(key, [])
            if sum(one.numel() for one, _ in waiting) + shard.numel() > PIECE:
                found.update(_gather(waiting, group))
                waiting.clear()
            waiting.append((shard, dtype))
        for waiting in pieces.values():
            assert group is not None
            found.update(_gather(waiting, group))
    return found


def _gather(shards: Shards, group: Group) -> Iterator[tuple[int, nn.Parameter]]:
    """Gather parameters of one dtype in one collective, [N, elements of a rank]."""
    if not shards:
        return
    _, handle = axis_of(shards[0][0])
    size = dist.get_world_size(handle)
    rows = [_rows(shard, dtype, size) for shard, dtype in shards]
    mine = torch.cat([row.reshape(-1) for row in rows]) if len(rows) > 1 else rows[0].reshape(-1)
    mine = mine.contiguous()
    flat = mine.new_empty(size * mine.numel())  # as bytes, because gloo knows few dtypes
    group.wait(group.start_gather(flat.view(torch.uint8), mine.view(torch.uint8), handle))
    every = flat.view(size, -1)
    counts = [row.numel() for row in rows]
    for (shard, _), row, part in zip(shards, rows, torch.split(every, counts, 1), strict=True):
        axis, _ = axis_of(shard)
        length = shard.shape[axis]
        full = part.reshape(size * len(row), *row.shape[1:])[:length].movedim(0, axis)
        exclusive = len(shards) == 1 and full.numel() == every.numel() and full.is_contiguous()
        data = full if exclusive else full.clone(memory_format=torch.contiguous_format)
        yield id(shard), _parameter(data, shard)


def _rows(shard: Any, dtype: torch.dtype, size: int) -> Tensor:
    """Return this rank's rows, the sharded dimension first, filled up to as many as any has."""
    axis, _ = axis_of(shard)
    mine = local(shard).to(dtype).movedim(axis, 0)
    most = -(-shard.shape[axis] // size)
    if len(mine) == most:
        return mine
    filled = mine.new_zeros((most, *mine.shape[1:]))
    filled[: len(mine)] = mine
    return filled


def _parameter(full: Tensor, shard: Tensor) -> nn.Parameter:
    return nn.Parameter(full, requires_grad=shard.requires_grad)


def part_of(total: Tensor, shard: Any) -> Tensor:
    """Return this rank's part of a full gradient, without memory of other parts."""
    total = total.to_dense() if total.is_sparse else total
    tensor = sys.modules["torch.distributed.tensor"]
    found: Tensor = tensor.distribute_tensor(
        total, shard.device_mesh, shard.placements, src_data_rank=None
    )
    part = local(found)
    exclusive = part.untyped_storage().nbytes() == part.numel() * part.element_size()
    return found if exclusive else found.clone()


def axis_of(shard: Any) -> tuple[Any, Any]:
    """Return the dimension that is sharded, and the process group over which; None if none is."""
    for dim, placement in enumerate(shard.placements):
        if placement.is_shard():
            return placement.dim, shard.device_mesh.get_group(dim)
    return None, None
