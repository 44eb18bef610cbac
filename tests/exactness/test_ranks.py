"""README: the batch may be spread over ranks, unevenly; the gradient is still that of all of it.

Real processes on gloo. Each has its shard, perhaps none, in micro-batches of its own; loss,
gradients, running statistics and counters are those of the undivided batch of one process in
float64, and the same bit for bit on every rank.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from benchmarks.mbs.cases import CASES
from benchmarks.mbs.problem import rows as rows_of
from tests.exactness.test_exactness import noise as noise_of
from tests.exactness.test_exactness import truth
from tests.exactness.test_lanes import ROWS, N, by_torch, info_nce, trained
from tests.oracle import assert_exact, error_of, state_after
from tests.pool import Pool, ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from anybatch import Engine, LazyBatch

SHARDS = {
    2: {"uneven": (13, 9), "empty": (22, 0)},
    4: {"uneven": (7, 2, 1, 12), "empty": (0, 9, 0, 13)},
}


@pytest.fixture(scope="module", params=[2, 4])
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[int, Pool]]:
    with ranks(request.param, fresh=True) as found:
        yield request.param, found


def shard(tensor: Any, sizes: tuple[int, ...], rank: int) -> Any:
    begin = sum(sizes[:rank])
    return rows_of(tensor, slice(begin, begin + sizes[rank]))


def of_row(rank: int, size: int, row: str, variant: str, micro_batch: int, ddp: bool) -> Any:
    """Train a row of the table for two steps, the second without the first three samples."""
    torch.set_default_dtype(torch.float64)
    make, rows, loss = ROWS[row]
    model, x, y = make(), rows(), torch.randint(3, (N,))
    sizes = SHARDS[size][variant]
    engines: dict[int, Engine] = {}

    def step(copied: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        full = DistributedDataParallel(copied) if ddp else copied
        engine = engines.setdefault(id(copied), Engine(full, loss, micro_batch=micro_batch))
        left = max(range(size), key=lambda r: sizes[r])
        now = tuple(n - (N - len(x)) * (r == left) for r, n in enumerate(sizes))
        found = engine.backward(shard(x, now, rank), shard(y, now, rank))
        assert engine.last is not None
        assert engine.last.samples == len(x)
        return found

    return trained(step)(model, x, y)


@pytest.mark.large(few=2, part=40)
@pytest.mark.parametrize(("variant", "micro_batch"), [("uneven", 3), ("empty", 22)])
@pytest.mark.parametrize("row", ROWS)
def test_batchnorm_is_that_of_all_ranks(
    pool: tuple[int, Pool], row: str, variant: str, micro_batch: int
) -> None:
    _, workers = pool
    torch.set_default_dtype(torch.float64)
    try:
        make, rows, loss = ROWS[row]
        model, x, y = make(), rows(), torch.randint(3, (N,))
        want = by_torch(model, loss, x, y)
        order = torch.cat([torch.randperm(3), 3 + torch.randperm(N - 3)])
        noise = None
        if loss is not info_nce:
            noise = error_of(by_torch(model, loss, x[order], y[order]), want)
        found = workers.run(of_row, row, variant, micro_batch, False)
        for got in found:
            assert_exact(got, want, noise)
            assert all(torch.equal(got[name], found[0][name]) for name in got)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.product
@pytest.mark.parametrize("row", ["2d", "dice", "checkpoint"])
def test_a_model_in_ddp_gives_the_same(pool: tuple[int, Pool], row: str) -> None:
    _, workers = pool
    plain = workers.run(of_row, row, "uneven", 3, False)
    for got, want in zip(workers.run(of_row, row, "uneven", 3, True), plain, strict=True):
        assert all(torch.equal(got[name], want[name]) for name in want)


def of_case(rank: int, size: int, at: int, micro_batch: int) -> Any:
    """Run one step of a case of the catalogue."""
    problem = CASES[at].make(0)
    loss = problem.declared() if problem.declared else problem.loss_fn
    parts = [problem.batch // (size + 1)] * size
    parts[-1] += problem.batch - sum(parts)

    def run(model: nn.Module) -> Tensor:
        inputs = shard(problem.inputs, tuple(parts), rank)
        targets = None if problem.targets is None else shard(problem.targets, tuple(parts), rank)
        return Engine(model, loss, micro_batch=micro_batch).backward(inputs, targets)

    return state_after(problem.model, run)


@pytest.mark.large(few=6, part=20)
@pytest.mark.parametrize("at", range(len(CASES)), ids=lambda at: CASES[at].name)
def test_every_loss_is_that_of_all_ranks(pool: tuple[int, Pool], at: int) -> None:
    _, workers = pool
    problem = CASES[at].make(0)
    want = truth(copy.copy(problem))
    found = workers.run(of_case, at, 3)
    for got in found:
        assert_exact(got, want, noise_of(problem, want))
        assert all(torch.equal(got[name], found[0][name]) for name in got)


def ragged(size: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Rows whose targets are ignored here and there, on rank 0 nearly all, and the shards."""
    x, y = torch.randn(N, 5, dtype=torch.float64), torch.randint(3, (N,))
    sizes = SHARDS[size]["uneven"]
    y[: sizes[0] - 1] = -100
    y[N - 2] = -100
    return x, y, sizes


def normed() -> nn.Module:
    """Return a network whose samples meet on the way to its loss."""
    layers = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)
    return nn.Sequential(*layers).double()


def of_loader(rank: int, size: int, micro_batch: int) -> Any:
    """Train one step of rows that are loaded on the way: what divides them is known at the end."""
    model, (x, y, sizes) = normed(), ragged(size)
    rows = TensorDataset(shard(x, sizes, rank), shard(y, sizes, rank))

    def run(copied: nn.Module) -> Tensor:
        engine = Engine(copied, nn.CrossEntropyLoss(), micro_batch=micro_batch)
        return engine.backward(LazyBatch(rows))

    return state_after(model, run)


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [3, 22])
def test_a_denominator_computed_at_the_end_is_one_for_all_ranks(
    pool: tuple[int, Pool], micro_batch: int
) -> None:
    size, workers = pool
    model, (x, y, _) = normed(), ragged(size)
    want = state_after(model, lambda m: by_one(m, x, y))
    order = torch.randperm(N)
    noise = error_of(state_after(model, lambda m: by_one(m, x[order], y[order])), want)
    for got in workers.run(of_loader, micro_batch):
        assert_exact(got, want, noise)


def by_one(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Run torch's own step."""
    loss = nn.CrossEntropyLoss()(model(x), y)
    loss.backward()
    found: Tensor = loss.detach()
    return found
