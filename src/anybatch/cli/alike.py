"""One model on every rank: the same weights in the beginning, the same buffers in every step.

DistributedDataParallel sends the weights of rank 0 to all and so hides a model that draws them from
a generator of its own; such a run cannot be repeated. Here it is found. Buffers are sent, as
DistributedDataParallel does: a forward may store statistics of its rows in them.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from anybatch.cli.faults import TrainingError
from anybatch.devices import group_of


def refuse_unequal(model: nn.Module) -> None:
    """Refuse a model that is not the same on every rank.

    Raises:
        TrainingError: naming the ranks where it differs from that of rank 0.
    """
    rows = group_of().gather(torch.tensor([_checksum(model)], dtype=torch.float64))
    others = [f"rank {rank}" for rank, row in enumerate(rows) if not torch.equal(row, rows[0])]
    if others:
        raise TrainingError(
            f"every rank must begin with the same weights; those of {', '.join(others)} are not "
            "those of rank 0. Let the model draw them from the generators of torch, Python or "
            "numpy, which --seed sets alike."
        )


def same_buffers(model: nn.Module) -> None:
    """Give all ranks the buffers of rank 0, in one piece for each dtype."""
    group = group_of()
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for buffer in model.buffers():
        kinds.setdefault(buffer.dtype, []).append(buffer.detach())
    for buffers in kinds.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers]).to(group.device)
        sizes = [buffer.numel() for buffer in buffers]
        pieces = torch.split(group.sent(flat, 0), sizes)
        for buffer, piece in zip(buffers, pieces, strict=True):
            if group.rank != 0:
                buffer.copy_(piece.reshape(buffer.shape))


def _checksum(model: nn.Module) -> float:
    """Return a number of 48 bits made of all parameters and buffers."""
    found = hashlib.blake2b(digest_size=6)
    for name, tensor in model.state_dict().items():
        found.update(name.encode())
        if isinstance(tensor, Tensor):
            found.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return float(int.from_bytes(found.digest(), "big"))
