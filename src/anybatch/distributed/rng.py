"""Shared RNG state of all ranks, so that together they make the full-batch draw.

Every rank has generators of its own, in any state. A step of ``rng="batch"`` begins on all ranks
with those of rank 0; each draws for the batch of all ranks and selects its own rows
(`anybatch.execution.full_batch_rng.mode`), so all end in the state of one process with all samples.

    rank 0:  state ──┬── draw [N, C], keep rows 0..a ──┬── the same state
    rank 1:  its own └── draw [N, C], keep rows a..b ──┤   the same
    rank 2:  its own     no samples                    └── gets it

The order of the ranks is that of their samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from anybatch.core.accelerator import of
from anybatch.core.rng import RNGState
from anybatch.distributed.coordinator import Coordinator
from anybatch.errors import NotExactError, RankError

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

    Raises:
        RankError: rank 0's model is on another number of accelerators.
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
