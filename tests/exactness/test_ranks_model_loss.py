"""Engine(model) over ranks: the loss that a model returns is that of the batch of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_after, undivided
from tests.pool import Pool, ranks
from tests.unit.loss.test_model_loss import (
    batch,
    loss_of,
    model,
    shifted,
    summed,
    two_terms,
    unshifted,
)

from anybatch import Engine, Loss
from anybatch.errors import LossError

N = 12
SHARDS = {2: (7, 5), 3: (5, 0, 7)}
LOSSES = {"shifted": shifted, "summed": summed, "two terms": two_terms}
DECLARED = {"nothing": None, "a sum": Loss.inside(count=None)}


@pytest.fixture(scope="module", params=[2, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with ranks(request.param) as found:
        yield found


def trained(rank: int, size: int, lose: str, norm: bool, declared: str) -> Any:
    """Return loss, gradients and buffers of all ranks' rows at once, and as an engine has them."""
    torch.manual_seed(1)
    net, rows = model(LOSSES[lose], norm=norm), batch(N)
    begin, n = sum(SHARDS[size][:rank]), SHARDS[size][rank]
    own = {name: column[begin : begin + n] for name, column in rows.items()}
    want = undivided(net, loss_of, rows, None)
    got = state_after(net, lambda m: Engine(m, DECLARED[declared], micro_batch=3).backward(own))
    return want, got


@pytest.mark.product
@pytest.mark.parametrize("norm", [False, True], ids=["streaming", "lanes"])
@pytest.mark.parametrize("lose", LOSSES)
def test_it_is_that_of_all_ranks(pool: Pool, lose: str, norm: bool) -> None:
    for want, got in pool.run(trained, lose, norm, "nothing"):
        assert_exact(got, want)


def test_a_declared_sum_is_that_of_all_ranks(pool: Pool) -> None:
    for want, got in pool.run(trained, "summed", False, "a sum"):
        assert_exact(got, want)


def contradicted(rank: int, size: int) -> str:
    """Return what a count says that forgets that labels are shifted."""
    torch.manual_seed(1)
    rows = batch(N)
    begin, n = sum(SHARDS[size][:rank]), SHARDS[size][rank]
    own = {name: column[begin : begin + n] for name, column in rows.items()}
    try:
        Engine(model(), Loss.inside(count=unshifted), micro_batch=3).backward(own)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_contradiction_ends_the_step_on_every_rank(pool: Pool) -> None:
    said = pool.run(contradicted)
    assert all(said)
    assert any(one.startswith(LossError.__name__) and "count says" in one for one in said)
