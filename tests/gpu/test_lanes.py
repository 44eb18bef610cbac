"""BatchNorm of the full batch on a CUDA device, in lanes and over ranks on NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.exactness.test_lanes import ROWS, N
from tests.oracle import assert_exact, state_of, undivided
from tests.pool import ranks
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Engine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


ELSEWHERE = {"reentrant checkpoint", "class weights, ignored", "InfoNCE"}
"""Without an undivided batch that is one pass; with tensors of the loss on the host."""


def on_device(row: str) -> tuple[nn.Module, Tensor, Tensor, Any]:
    torch.manual_seed(0)
    make, rows, loss = ROWS[row]
    model, x, y = make().double().cuda(), rows().double(), torch.randint(3, (N,))
    return model, x, y, loss


def computed(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    grads = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss} | grads


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 8])
@pytest.mark.parametrize("row", [name for name in ROWS if name not in ELSEWHERE])
def test_lanes_are_exact(row: str, micro_batch: int) -> None:
    model, x, y, loss = on_device(row)
    want = undivided(model, loss, x.cuda(), y.cuda())
    engine = Engine(model, loss, micro_batch=micro_batch)
    found = engine.backward(x, y)
    got = computed(model, found)
    assert_exact(got, {name: value for name, value in want.items() if "buffer" not in name})


def test_lanes_are_exact_within_a_budget_that_holds() -> None:
    model, _, y, loss = on_device("2d")
    x = torch.randn(N, 2, 64, 64).double()
    want = undivided(model, loss, x.cuda(), y.cuda())
    memory = anybatch.plan(model, loss, (x, y), memory="4GiB", timed=False).memory
    assert memory is not None
    budget = (memory.floor + memory.undivided) // 2
    engine = Engine(model, loss, memory=budget)
    for _ in range(3):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        found = engine.backward(x, y)
        assert torch.cuda.max_memory_allocated() <= budget
        got = computed(model, found)
        assert_exact(got, {name: value for name, value in want.items() if "buffer" not in name})
        assert engine.last is not None
        assert engine.last.moved_bytes > 0


@pytest.mark.parametrize("micro_batch", [4, 22])
def test_draws_are_those_of_the_whole_batch(micro_batch: int) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double().cuda()
    x, y = torch.randn(N, 6).double().cuda(), torch.randint(3, (N,)).cuda()
    torch.manual_seed(1)
    want = undivided(model, F.cross_entropy, x, y)
    torch.manual_seed(1)
    found = Engine(model, F.cross_entropy, micro_batch=micro_batch, rng="batch").backward(x, y)
    got = computed(model, found)
    assert_exact(got, want)


def dropped(rank: int, size: int, n: int) -> Any:
    """Run a step of dropout on the rows of a rank, all ranks on one device; `size` 1 is torch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double().cuda()
    x, y = torch.randn(N, 6).double().cuda(), torch.randint(3, (N,)).cuda()
    torch.manual_seed(1 + rank)
    if size == 1:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
    else:
        rows = slice(n) if rank == 0 else slice(n, N)
        engine = Engine(model, F.cross_entropy, micro_batch=3, rng="batch")
        loss = engine.backward(x[rows], y[rows])
    found = {name: value.cpu() for name, value in state_of(model, loss).items()}
    return found, torch.cuda.get_rng_state()


@pytest.mark.parametrize("n", [7, N])
def test_draws_are_those_of_the_batch_of_all_ranks(n: int) -> None:
    want, rng = dropped(0, 1, N)
    with ranks(2) as pool:
        for got, its in pool.run(dropped, n):
            assert_exact(got, want)
            assert torch.equal(its, rng)


def test_one_rank_on_nccl_is_one_process(tmp_path: Any) -> None:
    """Several need several devices; the collectives of one run all the same."""
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
    try:
        model, x, y, loss = on_device("2d")
        want = undivided(model, loss, x.cuda(), y.cuda())
        found = Engine(model, loss, micro_batch=8).backward(x, y)
        got = computed(model, found)
        assert_exact(got, {name: value for name, value in want.items() if "buffer" not in name})
    finally:
        torch.distributed.destroy_process_group()
