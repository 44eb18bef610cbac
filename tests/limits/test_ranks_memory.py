"""Law 2 over ranks: a step holds no more than the budget, the samples of other ranks included.

A coupled loss is taken on the outputs of all ranks, on every one of them. Peaks are of live tensors
that the meter counts in the first step of a plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.oracle import assert_exact, same, snapshot, state_of, undivided
from tests.pool import Pool, ranks
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Engine
from anybatch.distributed.coordinator import Coordinator
from anybatch.errors import BudgetError

SHARDS = {2: (9, 4), 4: (5, 2, 1, 7)}
ENOUGH = "8MiB"
HOW = {"stream": "evaluate", "lanes": "backward", "all_gather": "evaluate"}


@pytest.fixture(scope="module", params=[2, 4])
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[int, Pool]]:
    with ranks(request.param, fresh=True) as found:
        yield request.param, found


class Compares(nn.Module):
    """Each sample beside all samples, inside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(144, 64)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 1, 12, 12] -> [n, 3, 12, 12]."""
        z = self.layer(x.flatten(1))
        others, _ = anybatch.gather_batch(z)
        every = z.unsqueeze(1) * others.unsqueeze(0)
        return every.tanh().mean((1, 2)).reshape(-1, 1, 1, 1).expand(-1, 3, *x.shape[2:])


def model_of(variant: str) -> nn.Module:
    torch.manual_seed(0)
    if variant == "all_gather":
        return Compares()
    norm = nn.BatchNorm2d(6) if variant == "lanes" else nn.GroupNorm(2, 6)
    ends = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 3, 3, padding=1)
    return nn.Sequential(ends[0], norm, nn.Tanh(), ends[1])


def ratio(out: Tensor, y: Tensor) -> Tensor:
    return (out * y).sum() / out.square().sum()


def nce(out: Tensor, y: Tensor) -> Tensor:
    z = F.normalize((out + y).flatten(1), dim=1)
    return F.cross_entropy(3 * z @ z.T, torch.arange(len(z)))


LOSSES = {"ratio": ratio, "nce": nce, "mse": F.mse_loss}


def rows(rank: int, sizes: tuple[int, ...], wide: int = 12) -> tuple[Tensor, Tensor]:
    """[n, 1, wide, wide] and [n, 3, wide, wide]: those of a rank."""
    torch.manual_seed(1)
    n, begin = sum(sizes), sum(sizes[:rank])
    x, y = torch.randn(n, 1, wide, wide), torch.rand(n, 3, wide, wide)
    return x[begin : begin + sizes[rank]], y[begin : begin + sizes[rank]]


def held(rank: int, size: int, variant: str, loss: str, memory: Any, how: str = "backward") -> Any:
    """Return the peak of a first step and what was predicted, or the bytes that are needed."""
    model, batch = model_of(variant), rows(rank, SHARDS[size])
    engine = Engine(model, LOSSES[loss], memory=memory, micro_batch=1)
    before = snapshot(model)
    try:
        getattr(engine, how)(*batch)
    except anybatch.errors.AnybatchError as error:
        assert same(snapshot(model), before)
        return error.needed if isinstance(error, BudgetError) else str(error)
    assert engine.last is not None
    return engine.last.peak_bytes, engine.last.predicted_bytes


@pytest.mark.large(few=1)
@pytest.mark.parametrize(
    ("variant", "loss"), [("stream", "ratio"), ("lanes", "nce"), ("all_gather", "mse")]
)
def test_what_all_ranks_hold_is_in_the_budget(
    pool: tuple[int, Pool], variant: str, loss: str
) -> None:
    _, workers = pool
    needed = workers.run(held, variant, loss, 1024)
    assert all(isinstance(count, int) for count in needed), needed  # none of them fits
    for peak, predicted in workers.run(held, variant, loss, max(needed)):
        assert peak <= predicted <= max(needed)
    for peak, predicted in workers.run(held, variant, loss, ENOUGH, HOW[variant]):
        assert peak <= predicted
    said = workers.run(held, variant, loss, max(needed) - 1)
    assert [count for count in said if isinstance(count, int)]
    assert all(isinstance(one, int) or "BudgetError" in one for one in said)


def towers(variant: str) -> nn.Module:
    """Return two encoders of [n, 16], whose embeddings are most of what a step holds."""
    torch.manual_seed(0)

    def one() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 128))

    if variant == "encoders":
        return anybatch.Encoders({"a": one(), "b": one()}, scale=14.0)
    return anybatch.joint(lambda f, g, a, b: (F.normalize(f(a)), F.normalize(g(b))), one(), one())


def compared(rank: int, size: int, variant: str, symmetric: bool, how: str) -> tuple[int, int, int]:
    """Return the peak of a contrastive step, what was predicted, and what of it may be sent."""
    torch.manual_seed(rank)
    count = 30 * SHARDS[size][rank]
    rows = {"a": torch.randn(count, 16), "b": torch.randn(count, 16)}
    loss = anybatch.contrastive(symmetric=symmetric)
    engine = Engine(towers(variant), loss, memory=ENOUGH, micro_batch=8)
    getattr(engine, how)(rows if variant == "encoders" else tuple(rows.values()))
    assert engine.plan is not None
    assert engine.plan.memory is not None
    assert engine.last is not None
    assert engine.last.peak_bytes is not None
    assert engine.last.predicted_bytes is not None
    sent = dict(engine.plan.memory.owners)["transfer buffers"]
    return engine.last.peak_bytes, engine.last.predicted_bytes, sent


@pytest.mark.large(few=2)
@pytest.mark.parametrize("how", ["backward", "evaluate"])
@pytest.mark.parametrize("symmetric", [False, True], ids=["one", "both"])
@pytest.mark.parametrize("variant", ["joint", "encoders"])
def test_a_contrastive_step_is_foreseen_with_the_rows_of_this_rank(
    pool: tuple[int, Pool], variant: str, symmetric: bool, how: str
) -> None:
    _, workers = pool
    for peak, predicted, sent in workers.run(compared, variant, symmetric, how):
        assert peak <= predicted <= 1.05 * peak + sent


def counted(rank: int, size: int, totals: list[int]) -> list[tuple[int, int]]:
    """Step with five samples on rank 0, one on others and the rest on rank 1.

    Returns:
        For each step how often ranks came together before it, and forecasts made until then.
    """
    engine = Engine(model_of("stream"), ratio, memory=ENOUGH, micro_batch=2)
    found = []
    for total in totals:
        sizes = (5, total - 5 - (size - 2), *[1] * (size - 2))
        with mock.patch.object(
            Coordinator, "begin", autospec=True, side_effect=Coordinator.begin
        ) as began:
            engine.backward(*rows(rank, sizes))
        assert engine._planner is not None
        found.append((began.call_count, engine._planner._foreseen.rehearsed))
    return found


@pytest.mark.large(few=1)
def test_other_numbers_elsewhere_make_no_other_plan(pool: tuple[int, Pool]) -> None:
    _, workers = pool
    for rank, found in enumerate(workers.run(counted, [12, 9, 17, 12, 25, 25])):
        began, rehearsed = zip(*found, strict=True)
        assert began == (3, 1, 2, 1, 2, 1)  # and once more, since the loss is coupled
        if rank != 1:
            assert rehearsed == (1, 1, 2, 2, 2, 2)  # for 12, and for 32


def smaller(rank: int, size: int) -> tuple[int, int, list[dict[str, Tensor]]]:
    """Step with many small samples, then twice with few large ones, within what these need."""
    model, few = model_of("stream").double(), (3, *[2] * (size - 1))
    many, large = ([t.double() for t in rows(rank, *of)] for of in (((9,) * size, 4), (few, 12)))
    with pytest.raises(BudgetError) as caught:
        Engine(model, ratio, memory=1024, micro_batch=1).backward(*large)
    needed = torch.tensor([caught.value.needed])
    dist.all_reduce(needed, dist.ReduceOp.MAX)
    budget = int(needed) + 4096  # so many large ones would need more
    engine = Engine(model, ratio, memory=budget, micro_batch=1)
    engine.backward(*many)
    found = []
    for _ in range(2):
        model.zero_grad()
        found.append(state_of(model, engine.backward(*large)))
    assert engine.last is not None
    assert engine.last.predicted_bytes is not None
    return engine.last.predicted_bytes, budget, found


@pytest.mark.large(few=1)
def test_what_would_not_fit_next_to_the_most_samples_may_fit_next_to_these(
    pool: tuple[int, Pool],
) -> None:
    size, workers = pool
    few = (3, *[2] * (size - 1))
    full = [torch.cat(t).double() for t in zip(*(rows(r, few) for r in range(size)), strict=True)]
    want = undivided(model_of("stream").double(), ratio, *full)
    for predicted, budget, found in workers.run(smaller):
        assert predicted <= budget
        for got in found:
            assert_exact(got, want)
