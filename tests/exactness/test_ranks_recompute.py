"""A tensor that one rank computes again, and that is another one: both ranks run the step again."""

from __future__ import annotations

import pytest
import torch
from tests.networks import Clipped
from tests.offloads import slow_link, small_leave
from tests.oracle import assert_exact, state_of, undivided
from tests.pool import ranks
from torch import Tensor
from torch.nn import functional as F

from anybatch import Engine

SIZE = 512
"""Samples of a rank."""


def rows_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(10 * step + rank)
    x, y = torch.randn(2, SIZE, 32, dtype=torch.float64).unbind()
    return x, y


def most(rank: int, step: int) -> float:
    """Return the bound of the results; only one rank has some that are beyond it."""
    return 0.05 if step >= 2 and rank else 9.0


def on_rank(rank: int, _size: int) -> list[tuple[dict[str, Tensor], int]]:
    small_leave()
    slow_link()
    net, found = Clipped(32, 4).double(), []
    engine = Engine(
        net, F.mse_loss, memory="900KiB", micro_batch=SIZE, rungs=["offload"], cache=None
    )
    for step in range(5):
        net.most = most(rank, step)
        net.zero_grad()
        loss = engine.backward(*rows_of(rank, step))
        assert engine.last is not None
        found.append((state_of(net, loss), engine.last.remade_bytes))
    return found


@pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "data"),
    reason="this torch does not say what hooks have given a node",
)
def test_one_rank_that_computes_another_tensor_again_has_both_run_the_step_again() -> None:
    with ranks(2) as pool:
        every = pool.run(on_rank)
    assert any(again > 0 for _, again in every[1][:2])
    for step in range(5):
        wanted, net = [], Clipped(32, 4).double()
        for rank in range(2):
            x, y = rows_of(rank, step)
            net.most = most(rank, step)
            wanted.append(undivided(net, F.mse_loss, x, y))
        mean = {name: (wanted[0][name] + wanted[1][name]) / 2 for name in wanted[0]}
        for found in every:
            assert_exact(found[step][0], mean)
