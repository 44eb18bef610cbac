"""Saved tensors leave on every rank: the gradient is that of the batch over all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.offloads import small_leave
from tests.oracle import assert_exact, state_of, undivided
from tests.pool import Pool, ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import anybatch
from anybatch import Engine, Plan
from anybatch.errors import AnybatchError, BudgetError, NotYetError
from anybatch.memory.spill import Spill
from anybatch.reports import Memory, OffloadPlan

SHARDS = {2: (5, 2), 4: (3, 0, 1, 2)}
Batch = tuple[Tensor, Tensor]
HOW = {
    ("stream", "mse"): "streaming",
    ("stream", "nce"): "two-pass",
    ("lanes", "mse"): "lockstep",
    ("lanes", "nce"): "lockstep",
}


@pytest.fixture(scope="module", params=[2, 4])
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[int, Pool]]:
    with ranks(request.param) as found:
        yield request.param, found


def model_of(variant: str) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(1, 6, 3, padding=1)]
    for _ in range(3):
        norm = nn.BatchNorm2d(6) if variant == "lanes" else nn.GroupNorm(2, 6)
        layers += [nn.Tanh(), nn.Conv2d(6, 6, 3, padding=1), norm]
    return nn.Sequential(*layers, nn.Conv2d(6, 3, 3, padding=1)).double()


def nce(out: Tensor, y: Tensor) -> Tensor:
    z = F.normalize((out + y).flatten(1), dim=1)
    return F.cross_entropy(3 * z @ z.T, torch.arange(len(z)))


LOSSES = {"nce": nce, "mse": F.mse_loss}


def rows(rank: int, sizes: tuple[int, ...]) -> Batch:
    """[n, 1, 24, 24] and [n, 3, 24, 24]: those of a rank."""
    torch.manual_seed(1)
    n, begin = sum(sizes), sum(sizes[:rank])
    x = torch.randn(n, 1, 24, 24, dtype=torch.float64)
    y = torch.rand(n, 3, 24, 24, dtype=torch.float64)
    return x[begin : begin + sizes[rank]], y[begin : begin + sizes[rank]]


def needed(model: nn.Module, loss: Any, batch: Batch, *, offload: str) -> int:
    """Return the most bytes that any rank says a step needs."""
    engine = Engine(model, loss, memory=1024)
    assert engine._planner is not None
    engine._planner.spill = Spill(offload)
    found = 0
    try:
        engine.backward(*batch)
    except BudgetError as error:
        found = error.needed
    except AnybatchError:  # another rank has failed first
        found = 0
    every = torch.tensor([found])
    dist.all_reduce(every, dist.ReduceOp.MAX)
    return int(every)


def trained(rank: int, size: int, variant: str, loss: str, share: float) -> Any:
    """Return what two steps leave, and what each has held, foreseen and moved."""
    small_leave()
    model, batch = model_of(variant), rows(rank, SHARDS[size])
    low = needed(model, LOSSES[loss], batch, offload="auto")
    high = needed(model, LOSSES[loss], batch, offload="off")
    memory = low + int(share * (high - low))
    engine = Engine(model, LOSSES[loss], memory=memory)
    assert engine._planner is not None
    engine._planner.timed = False
    model.load_state_dict(model_of(variant).state_dict())
    messages = []
    for _ in range(2):
        model.zero_grad()
        value = engine.backward(*batch)
        assert engine.last is not None
        last = engine.last
        gone = last.moved_bytes + last.remade_bytes
        messages.append((last.peak_bytes, last.predicted_bytes, memory, gone))
    return state_of(model, value), messages, low, high, engine.plan and engine.plan.mechanism


@pytest.mark.large(few=1)
@pytest.mark.parametrize(
    ("variant", "loss", "share"),
    [
        *((variant, loss, 0.0) for variant, loss in HOW),
        ("stream", "mse", 0.6),
        *(("lanes", loss, 0.6) for loss in ("mse", "nce")),
    ],
)
def test_two_steps_within_what_no_rank_could_keep_are_those_of_the_whole_batch(
    pool: tuple[int, Pool], variant: str, loss: str, share: float
) -> None:
    size, workers = pool
    every = [rows(rank, SHARDS[size]) for rank in range(size)]
    x, y = (torch.cat(t) for t in zip(*every, strict=True))
    model = model_of(variant)
    model(x)  # the first step moves statistics, no weights
    want = undivided(model, LOSSES[loss], x, y)
    moved = 0
    for rank, (state, messages, low, high, mechanism) in enumerate(
        workers.run(trained, variant, loss, share)
    ):
        assert low < 0.9 * high
        assert_exact(state, want)
        if not SHARDS[size][rank]:
            continue
        for peak, predicted, memory, count in messages:
            assert predicted <= memory
            assert peak is None or peak <= predicted
            moved += count
        assert mechanism in (HOW[variant, loss], "undivided")  # all of a rank's in one micro-batch
    assert moved > 0


def moved_on_request(rank: int, size: int) -> list[int]:
    """Return the bytes moved where it was requested, by name and by a plan."""
    small_leave()
    model, batch = model_of("stream"), rows(rank, (2,) * size)
    asks = Engine(model, F.mse_loss, memory="1GiB", micro_batch=1)
    assert asks._planner is not None
    asks._planner.spill = Spill("file")
    memory = Memory(1 << 30, "by hand", 1 << 30, (), 1, 1, "nobody")
    leaves = OffloadPlan("file", None, (0, 0), 0, 0, 1)
    made = Plan(1, "streaming", "in place", "", True, (), memory, offload=leaves)
    found = []
    for engine in (asks, asks, Engine(model, F.mse_loss, plan=made)):
        model.zero_grad()
        engine.backward(*batch)
        assert engine.last is not None
        found.append(engine.last.moved_bytes)
    return found[1:]


def test_it_may_be_requested_and_a_plan_is_obeyed(pool: tuple[int, Pool]) -> None:
    _, workers = pool
    for asks, obeys in workers.run(moved_on_request):
        assert asks == 0  # after the step that was recorded: a gibibyte is enough
        assert obeys > 0


def spread(rank: int, size: int) -> list[str]:
    """Return what is said where parameters are spread: as requested, and by a plan."""
    model, batch = model_of("stream"), rows(rank, (2,) * size)
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    memory = Memory(1 << 30, "by hand", 1 << 30, (), 1, 1, "nobody")
    leaves = OffloadPlan("file", None, (1 << 20, 1 << 20), 0, 0, 1)
    made = Plan(1, "streaming", "in place", "", True, (), memory, offload=leaves)
    asks, said = Engine(model, F.mse_loss, memory="1GiB"), []
    assert asks._planner is not None
    asks._planner.spill = Spill("file")
    for engine in (asks, Engine(model, F.mse_loss, plan=made)):
        try:
            engine.backward(*batch)
        except NotYetError as error:
            said.append(str(error))
    Engine(model, F.mse_loss, micro_batch=1).backward(*batch)  # ranks still agree
    return said


def test_where_parameters_are_spread_nothing_leaves_yet(pool: tuple[int, Pool]) -> None:
    _, workers = pool
    for said in workers.run(spread):
        assert len(said) == 2
        for one in said:
            assert one.startswith("saved tensors cannot be offloaded today where parameters")
            assert 'plan with offload="off"' in one


def paged(rank: int, size: int) -> list[str]:
    """Return what is said where parameters should leave on several ranks."""
    model, batch = model_of("stream"), rows(rank, (2,) * size)
    optimizer, said = torch.optim.AdamW(model.parameters()), []
    with anybatch.offload_states(optimizer, model=model, memory="1MiB"):
        engine = Engine(model, F.mse_loss, optimizer=optimizer, micro_batch=1)
        for step in (engine.backward, engine.evaluate, engine.foresee):
            try:
                step(*batch)
            except NotYetError as error:
                said.append(str(error))
    Engine(model, F.mse_loss, micro_batch=1).backward(*batch)  # ranks still agree
    return said


def test_parameters_are_not_offloaded_over_ranks_yet(pool: tuple[int, Pool]) -> None:
    _, workers = pool
    for said in workers.run(paged):
        assert len(said) == 3
        assert all("over several ranks today: offload only" in text for text in said)
