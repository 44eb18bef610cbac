"""A loss of a model's own values is that of the samples of all ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.oracle import assert_exact, state_after
from tests.pool import Pool, ranks
from tests.unit.loss.test_own_values import EXACT, N, Own, batch
from torch import Tensor, nn

from anybatch import Engine
from anybatch.errors import LossError

SHARDS = (4, 3)
NAMES = ["mean", "sum by samples", "one minus", "weighted", "masked", "learned weights", "stack"]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with ranks(len(SHARDS)) as found:
        yield found


def model_and_batch(name: str) -> tuple[Own, tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(0)
    return Own(EXACT[name]).double(), batch()


def on_rank(rank: int, _size: int, name: str, micro_batch: int) -> dict[str, Tensor]:
    model, (x, y, w) = model_and_batch(name)
    own = slice(sum(SHARDS[:rank]), sum(SHARDS[: rank + 1]))

    def run(copied: nn.Module) -> Tensor:
        return Engine(copied, micro_batch=micro_batch).backward((x[own], y[own], w[own]))

    return state_after(model, run)


def undivided(name: str) -> dict[str, Tensor]:
    model, rows = model_and_batch(name)

    def run(copied: nn.Module) -> Tensor:
        loss: Tensor = copied(*rows)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return state_after(model, run)


@pytest.mark.large(few=4)
@pytest.mark.parametrize("micro_batch", [1, 3, N])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_that_of_all_ranks(pool: Pool, name: str, micro_batch: int) -> None:
    for got in pool.run(on_rank, name, micro_batch):
        assert_exact(got, undivided(name))


@pytest.mark.parametrize("name", ["with a bound", "with a number"])
def test_a_count_with_a_bound_is_refused_over_ranks(pool: Pool, name: str) -> None:
    """The bound holds for the count of all ranks, and each counts its own."""
    for error in pool.each(on_rank, name, 3):
        assert isinstance(error, LossError)
        assert "a count with a bound" in str(error)
