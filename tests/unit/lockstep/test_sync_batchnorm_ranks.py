"""BatchNorm over ranks in a loop by hand, against one process with all rows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.oracle import assert_exact
from tests.pool import Pool, ranks
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.core.moments import merged, moments_of
from anybatch.devices import group_of
from anybatch.errors import NotExactError
from anybatch.lockstep.sync_batchnorm import GlobalBatchNorm, GroupMeeting

SHARDS = {2: (9, 4), 3: (1, 0, 12)}
N = 13


@pytest.fixture(scope="module", params=[2, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[int, Pool]]:
    with ranks(request.param) as found:
        yield request.param, found


def make(options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, **options), nn.ReLU(), nn.Flatten(),
        nn.Linear(36, 5), nn.SyncBatchNorm(5, **options), nn.Linear(5, 3),
    ).double()  # fmt: skip


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(6)
    return 50 + torch.randn(N, 2, 5, 5).double(), torch.randint(3, (N,))


def state(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    found = {"loss": loss.detach()}
    parameters = [(n, p) for n, p in model.named_parameters() if p.grad is not None]
    found |= {f"{n}.grad": p.grad.clone() for n, p in parameters}
    return found | {f"{n} (buffer)": b.clone() for n, b in model.named_buffers()}


def by_hand(rank: int, size: int, options: dict[str, Any]) -> dict[str, Tensor]:
    """Train two steps by a loop that sums gradients over ranks itself."""
    model, (x, y) = anybatch.global_batchnorm(make(options)), batch()
    begin = sum(SHARDS[size][:rank])
    own = slice(begin, begin + SHARDS[size][rank])
    for _ in range(2):
        model.zero_grad()
        loss = F.cross_entropy(model(x[own]), y[own], reduction="sum") / N
        loss.backward()
        total = loss.detach().clone()
        for tensor in [total, *(p.grad for p in model.parameters())]:
            dist.all_reduce(tensor)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
    return state(model, total)


@pytest.mark.large(few=2)
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}],
    ids=str,
)
def test_it_is_the_layer_of_one_process_with_all_rows(
    pool: tuple[int, Pool], options: dict[str, Any]
) -> None:
    _, workers = pool
    model, (x, y) = make(options), batch()
    for _ in range(2):
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
    found = workers.run(by_hand, options)
    for got in found:
        assert_exact(got, state(model, loss))
        assert all(torch.equal(got[name], found[0][name]) for name in got)


def in_engine(rank: int, size: int) -> dict[str, Tensor]:
    model, (x, y) = anybatch.global_batchnorm(make({})), batch()
    begin = sum(SHARDS[size][:rank])
    own = slice(begin, begin + SHARDS[size][rank])
    engine = anybatch.Engine(model, F.cross_entropy, memory="100MiB")
    loss = engine.backward(x[own], y[own])
    assert all("forward" not in m.__dict__ for m in model.modules())
    return state(model, loss)


def synced(rank: int, size: int) -> dict[str, Tensor]:
    model, (x, y) = make({}), batch()
    begin = sum(SHARDS[size][:rank])
    own = slice(begin, begin + SHARDS[size][rank])
    engine = anybatch.Engine(model, F.cross_entropy, micro_batch=3)
    return state(model, engine.backward(x[own], y[own]))


@pytest.mark.large(few=2)
@pytest.mark.parametrize("work", [in_engine, synced])
def test_an_engine_meets_for_layers_that_would_meet_by_themselves(
    pool: tuple[int, Pool], work: Any
) -> None:
    _, workers = pool
    model, (x, y) = make({}), batch()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    for got in workers.run(work):
        assert_exact(got, state(model, loss))


class Named(nn.Module):
    """One BatchNorm under two names of one module, and in a list that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.first = nn.Linear(2, 3), nn.BatchNorm1d(3)
        self.second, self.every = self.first, [self.first]

    def forward(self, x: Tensor) -> Tensor:
        """[n, 2] -> [n, 3]."""
        x = self.inside(x)
        for norm in (self.first, self.second, *self.every):
            x = norm(x).tanh()
        return x


def twice(name: str) -> nn.Module:
    """Make a model that uses a BatchNorm more than once."""
    torch.manual_seed(7)
    norm = nn.BatchNorm1d(3)
    nn.init.uniform_(norm.weight)
    block = nn.Sequential(norm, nn.Tanh())
    models = {
        "two places of a sequence": lambda: nn.Sequential(nn.Linear(2, 3), norm, nn.Tanh(), norm),
        "a block in two places": lambda: nn.Sequential(nn.Linear(2, 3), block, block),
        "in two parents": lambda: nn.Sequential(nn.Linear(2, 3), block, nn.Sequential(norm)),
        "two names, and a list": Named,
    }
    return models[name]().double()


def of_all(rank: int, size: int, name: str) -> dict[str, Tensor]:
    """Return what the rows of all ranks give, when each trains on its own."""
    model, (x, y) = anybatch.global_batchnorm(twice(name)), batch()
    begin = sum(SHARDS[size][:rank])
    own = slice(begin, begin + SHARDS[size][rank])
    F.cross_entropy(model(x[own, :, 0, 0] - 50), y[own], reduction="sum").div(N).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    return state(model, torch.zeros(()))


@pytest.mark.product
@pytest.mark.parametrize(
    "name",
    [
        "two places of a sequence",
        "a block in two places",
        "in two parents",
        "two names, and a list",
    ],
)
def test_a_layer_that_is_used_twice_is_one_of_all_ranks_wherever_it_is(
    pool: tuple[int, Pool], name: str
) -> None:
    model, (x, y) = twice(name), batch()
    F.cross_entropy(model(x[:, :, 0, 0] - 50), y).backward()
    for got in pool[1].run(of_all, name):
        assert_exact(got, state(model, torch.zeros(())))


def one_evaluates(rank: int, size: int, track: bool) -> Tensor | None:
    model, (x, _) = anybatch.global_batchnorm(make({"track_running_stats": track})).eval(), batch()
    return model(x[:4]).detach() if rank == 0 else None


@pytest.mark.parametrize("track", [True, False])
def test_a_rank_evaluates_while_no_other_one_does(pool: tuple[int, Pool], *, track: bool) -> None:
    # without running statistics it waited for the others
    found = pool[1].run(one_evaluates, track)
    x, _ = batch()
    assert_exact({"": found[0]}, {"": make({"track_running_stats": track}).eval()(x[:4])})


class Activated(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input).relu()


def patched() -> nn.Module:
    layer = nn.BatchNorm1d(3)
    layer.forward = torch.relu  # type: ignore[method-assign, assignment]
    return layer


@pytest.mark.parametrize(
    "layer",
    [
        Activated(3), patched(), nn.LazyBatchNorm1d(), nn.LazyBatchNorm2d(), nn.LazyBatchNorm3d(),
        nn.utils.parametrizations.weight_norm(nn.BatchNorm1d(3), dim=None),
    ],
    ids=["forward", "forward of the object", "lazy 1d", "lazy 2d", "lazy 3d", "parametrized"],
)  # fmt: skip
def test_a_layer_that_does_something_besides_is_refused_before_any_is_replaced(
    layer: nn.Module,
) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(layer))
    with pytest.raises(NotExactError, match=rf"these have .*: 1.0 \({type(layer).__name__}\)"):
        anybatch.global_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm1d


def copied(rank: int, size: int) -> dict[str, Tensor]:
    """Run a copy, as averages of weights are made."""
    model, (x, _) = anybatch.global_batchnorm(make({}), group=dist.group.WORLD), batch()
    begin = sum(SHARDS[size][:rank])
    own = slice(begin, begin + SHARDS[size][rank])
    again = copy.deepcopy(model)
    assert again[1].process_group is dist.group.WORLD
    assert again[1].weight is not model[1].weight
    assert torch.equal(again(x[own]), model(x[own]))
    return {name: b.clone() for name, b in again.named_buffers()}


def test_a_copy_of_a_layer_is_for_the_same_ranks(pool: tuple[int, Pool]) -> None:
    model, (x, _) = make({}), batch()
    model(x)
    for got in pool[1].run(copied):
        assert_exact(got, dict(model.named_buffers()))


def test_parameters_and_buffers_remain_the_same_tensors_and_one_process_is_plain() -> None:
    model = make({})
    before = [*model.parameters(), *model.buffers()]
    made = anybatch.global_batchnorm(model)
    assert made is model
    assert all(a is b for a, b in zip([*made.parameters(), *made.buffers()], before, strict=True))
    assert isinstance(anybatch.global_batchnorm(nn.BatchNorm1d(3)), GlobalBatchNorm)
    (x, _), plain = batch(), copy.deepcopy(make({}))
    assert torch.equal(made(x), plain(x))
    assert made[1].num_batches_tracked == 1
    with pytest.raises(ValueError, match="at least 2D"):
        GlobalBatchNorm(3)(torch.zeros(3))


def variances(rank: int, size: int, mean: float) -> tuple[float, float]:
    """Return the variance of float32 rows of all ranks: merged, and as E[x^2] - E[x]^2."""
    torch.manual_seed(1)
    x = (mean + 0.1 * torch.randn(4096, 1)).chunk(size)[rank]
    meeting = GroupMeeting(group_of(None))
    total = meeting.reduce("", lambda: moments_of(x), merged, lambda t: t)
    sums = torch.stack([x.sum(), x.square().sum(), torch.tensor(float(len(x)))])
    dist.all_reduce(sums)
    naive = sums[1] / sums[2] - (sums[0] / sums[2]).square()
    return float(total.variance), float(naive)


@pytest.mark.parametrize("mean", [1e3, 1e4])
def test_a_large_mean_costs_no_variance_where_the_papers_formula_loses_all_of_it(
    pool: tuple[int, Pool], mean: float
) -> None:
    size, workers = pool
    torch.manual_seed(1)
    x = mean + 0.1 * torch.randn(4096, 1)
    true = float(x.double().var(correction=0))
    for ours, naive in workers.run(variances, mean):
        assert ours == pytest.approx(true, rel=1e-3 if mean == 1e3 else 0.05)
        assert naive != pytest.approx(true, rel=0.5)
    assert size
