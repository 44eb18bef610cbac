"""Guide: with rng="batch" the ranks draw together what the undivided batch would.

Real processes on gloo, each with its shard and with dice of its own; rank 0's count. Loss,
gradients and buffers are those of one process with all samples and rank 0's seeds, in float64, and
so is where the generators of torch, Python and numpy stand afterwards, on every rank.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.claims.test_dice import NOISE, N, Noisy, Normed, assert_same, by_torch, coupled, trained
from tests.claims.test_ranks import SHARDS, shard
from tests.ranks.pool import Pool, ranks
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine

LOSSES = {"one pass": F.cross_entropy, "coupled": coupled}
MODELS = {"streaming": Noisy, "lanes": Normed}


@pytest.fixture(scope="module", params=[2, 4])
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[int, Pool]]:
    with ranks(request.param) as found:
        yield request.param, found


def problem(kind: str, row: str) -> tuple[nn.Module, Tensor, Tensor]:
    """The same in every process."""
    torch.manual_seed(0)
    make, inputs = NOISE[row]
    return MODELS[kind](make()), inputs(), torch.randint(3, (N,))


def other_dice(rank: int) -> None:
    """Throw rank 0's dice nowhere, and those of the others somewhere else."""
    if rank:
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        torch.randn(1)


def of_row(rank: int, size: int, kind: str, loss: str, row: str, form: str, micro: int) -> Any:
    """Train a row of the table for two steps, the second without the first three samples."""
    torch.set_default_dtype(torch.float64)
    model, x, y = problem(kind, row)
    sizes = SHARDS[size][form]
    engines: dict[int, Engine] = {}

    def step(copied: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        made = Engine(copied, LOSSES[loss], micro_batch=micro, rng="batch")
        engine = engines.setdefault(id(copied), made)
        left = max(range(size), key=lambda r: sizes[r])
        now = tuple(n - (N - len(x)) * (r == left) for r, n in enumerate(sizes))
        other_dice(rank)
        return engine.backward(shard(x, now, rank), shard(y, now, rank))

    return trained(step)(model, x, y)


@pytest.mark.parametrize(
    ("kind", "loss", "form", "micro"),
    [
        ("streaming", "one pass", "uneven", 3),
        ("streaming", "coupled", "empty", 8),
        ("lanes", "one pass", "empty", 3),
        ("lanes", "coupled", "uneven", 22),
    ],
)
@pytest.mark.parametrize("row", NOISE)
def test_draws_are_those_of_the_batch_of_all_ranks(
    pool: tuple[int, Pool], kind: str, loss: str, row: str, form: str, micro: int
) -> None:
    _, workers = pool
    torch.set_default_dtype(torch.float64)
    try:
        want = by_torch(*_with_loss(problem(kind, row), loss))
    finally:
        torch.set_default_dtype(torch.float32)
    found = workers.run(of_row, kind, loss, row, form, micro)
    for got in found:
        assert_same(got, want)
        assert all(torch.equal(got[0][name], found[0][0][name]) for name in got[0])


def _with_loss(found: tuple[nn.Module, Tensor, Tensor], loss: str) -> Any:
    model, x, y = found
    return model, LOSSES[loss], x, y
