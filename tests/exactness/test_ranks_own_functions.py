"""A loss of values of its own is that of the samples of all ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.exactness.test_own_functions import MEET, SEPARATE, N, problem, wanted
from tests.oracle import assert_exact, state_of
from tests.pool import Pool, ranks
from torch import Tensor

from anybatch import Engine

SHARDS = (8, 5)
LOSSES = {**SEPARATE, **MEET}
NAMES = [
    *("squares", "by their number", "focal", "dice of each", "two heads", "a constant"),
    *("masked", "masked, bounded", "two masks", "a count as an integer", "weights of each class"),
    *("the score of each action", "several losses, stacked", "centred", "root of the mean"),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with ranks(len(SHARDS)) as found:
        yield found


def on_rank(rank: int, _size: int, name: str, micro_batch: int) -> dict[str, Tensor]:
    model, x, y = problem()
    own = slice(sum(SHARDS[:rank]), sum(SHARDS[: rank + 1]))
    engine = Engine(model, LOSSES[name], micro_batch=micro_batch)
    for _ in range(2):
        model.zero_grad()
        loss = engine.backward(x[own], y[own])
    return state_of(model, loss)


@pytest.mark.large(few=7)
@pytest.mark.parametrize("micro_batch", [3, N])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_that_of_all_ranks(pool: Pool, name: str, micro_batch: int) -> None:
    assert sum(SHARDS) == N
    want = wanted(LOSSES[name])
    for got in pool.run(on_rank, name, micro_batch):
        assert_exact(got, want)
        assert torch.isfinite(got["loss"])
