"""Gradients over ranks of every form: large, sparse, half precision, missing, added to, late."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_after, state_of
from tests.pool import Pool, ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from anybatch import Engine, LazyBatch, coupled
from anybatch.distributed.buckets import SMALL
from anybatch.errors import LockstepError

N = 12
SHARDS = {2: (8, 4), 3: (5, 0, 7)}


@pytest.fixture(scope="module", params=[2, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[int, Pool]]:
    with ranks(request.param) as found:
        yield request.param, found


class Words(nn.Module):
    """An embedding whose gradient is sparse, beside a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[n] -> [n, 3]."""
        return self.head(self.table(x))


class Branches(nn.Module):
    """The first rank takes one branch, the others another one; a third is never taken."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(5, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """[n, 5] -> [n, 3]."""
        first = x[:, :1] > 0
        if bool(first.all()):
            return self.one(x)
        return (
            self.two(x) if not bool(first.any()) else torch.where(first, self.one(x), self.two(x))
        )


class Waves(nn.Module):
    """A complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        """[n, 5] -> [n, 3]."""
        return (x.to(torch.complex128) @ self.weight).abs()


def make(variant: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(4)
    x, y = torch.randn(N, 5).double(), torch.randint(3, (N,))
    if variant == "sparse":
        return Words().double(), torch.randint(9, (N,)), y
    if variant == "missing":
        x[:5, 0], x[5:, 0] = 1.0, -1.0
        return Branches().double(), x, y
    if variant == "complex":
        return Waves(), x, y
    wide = SMALL // 5 + 1 if variant == "large" else 7
    return nn.Sequential(nn.Linear(5, wide), nn.Tanh(), nn.Linear(wide, 3)).double(), x, y


def ignoring(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, ignore_index=1)


def sliced(rank: int, size: int, tensor: Tensor) -> Tensor:
    begin = sum(SHARDS[size][:rank])
    return tensor[begin : begin + SHARDS[size][rank]]


def on_rank(rank: int, size: int, variant: str) -> dict[str, Tensor]:
    model, x, y = make(variant)
    x, y = sliced(rank, size, x), sliced(rank, size, y)

    def run(copied: nn.Module) -> Tensor:
        engine = Engine(copied, ignoring, micro_batch=3)
        if variant == "late" and len(x):
            return engine.backward(LazyBatch(TensorDataset(x, y)))
        found = engine.backward(x, y)
        return engine.backward(x, y) if variant == "added" else found

    return {name: t.to_dense() for name, t in state_after(model, run).items()}


def truth(variant: str) -> dict[str, Tensor]:
    model, x, y = make(variant)

    def run(copied: nn.Module) -> Tensor:
        for _ in range(2 if variant == "added" else 1):
            loss = ignoring(copied(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return {name: t.to_dense() for name, t in state_after(model, run).items()}


@pytest.mark.product
@pytest.mark.parametrize("variant", ["large", "sparse", "missing", "complex", "late", "added"])
def test_gradients_of_every_form_are_those_of_all_ranks(
    pool: tuple[int, Pool], variant: str
) -> None:
    _, workers = pool
    found, want = workers.run(on_rank, variant), truth(variant)
    for got in found:
        assert got.keys() == want.keys()
        assert_exact(got, want)
        assert all(torch.equal(got[name], found[0][name]) for name in got)


def in_half(rank: int, size: int) -> list[Any]:
    model, x, y = make("plain")
    model, x = model.bfloat16(), x.bfloat16()
    engine = Engine(model, F.cross_entropy, micro_batch=1)
    engine.backward(sliced(rank, size, x), sliced(rank, size, y))
    return [p.grad for p in model.parameters()]


def test_half_precision_is_summed_in_float32_and_rounded_once(pool: tuple[int, Pool]) -> None:
    _, workers = pool
    model, x, y = make("plain")
    model, x = model.bfloat16(), x.bfloat16()
    Engine(model, F.cross_entropy, micro_batch=1).backward(x, y)
    eps = torch.finfo(torch.bfloat16).eps
    for found in workers.run(in_half):
        for got, p in zip(found, model.parameters(), strict=True):
            assert p.grad is not None
            assert got.dtype == torch.bfloat16
            difference = (got.float() - p.grad.float()).abs()
            assert bool((difference <= eps * p.grad.float().abs().clamp(min=1e-6)).all())


def scaled(rank: int, size: int, with_optimizer: bool) -> Any:
    """Train with a loss that holds a parameter of its own; only the first rank has samples."""
    torch.manual_seed(4)
    model, scale = nn.Linear(5, 3).double(), nn.Parameter(torch.ones(3).double())
    x, y = torch.randn(N, 5).double(), torch.randint(3, (N,))
    F.cross_entropy(model(x) * scale, y).backward()
    assert scale.grad is not None
    want, scale.grad = scale.grad, None
    model.zero_grad()
    n = 0 if rank else N
    trained = torch.optim.SGD([*model.parameters(), scale]) if with_optimizer else None
    engine = Engine(
        model, lambda out, y: F.cross_entropy(out * scale, y), micro_batch=4, optimizer=trained
    )
    try:
        engine.backward(x[:n], y[:n])
    except LockstepError as error:
        return str(error)
    return {"": want}, {"": scale.grad}


def test_a_rank_without_samples_must_receive_what_the_loss_holds(pool: tuple[int, Pool]) -> None:
    for said in pool[1].run(scaled, False):
        assert "every rank must find the same parameters, and rank 0 is at the sum of 3" in said
    for want, got in pool[1].run(scaled, True):
        assert_exact(got, want)


class Scaled(nn.Module):
    """Divides by a number of each row, which is 0 in rows that are made up."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 5] -> [n, 3]."""
        out: Tensor = self.inner(x)
        return out + spread(out) / x.norm(dim=1, keepdim=True)


@coupled
def spread(out: Tensor) -> Tensor:
    return out.std(0).sum()


TEMPERATURE = "temperature"


def total(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="sum")


def of_loss(rank: int, size: int, variant: str, without: int | None) -> Any:
    """Train on a rank, of which one may be without samples; on one of one it is torch."""
    torch.manual_seed(4)
    x, y = torch.randn(N, 5).double(), torch.randint(3, (N,))
    temperature = nn.Parameter(torch.tensor(2.0).double())

    def contrast(out: Tensor, _y: Tensor) -> Tensor:
        return F.cross_entropy(temperature * out @ out.T, torch.arange(len(out)))

    losses = {"coupled": F.cross_entropy, "a sum": total, TEMPERATURE: contrast}
    loss, model = losses[variant], (Scaled() if variant == "coupled" else nn.Linear(5, 3)).double()
    optimizer = torch.optim.SGD([*model.parameters(), temperature])
    if size == 1:
        value = loss(model(x), y)
        value.backward()
    else:
        shares = [k + 1 for k in range(size)]
        if without is not None:
            shares[without] = 0
        sizes = [N * sum(shares[:k]) // sum(shares) for k in range(size + 1)]
        rows = slice(sizes[rank], sizes[rank + 1])
        engine = Engine(model, loss, micro_batch=2, optimizer=optimizer)
        value = engine.backward(x[rows], y[rows])
    found = state_of(model, value)
    if temperature.grad is not None:
        found[TEMPERATURE] = temperature.grad
    return found


@pytest.mark.product
@pytest.mark.parametrize("without", [None, 0, -1])
@pytest.mark.parametrize("variant", ["coupled", "a sum", TEMPERATURE])
def test_what_belongs_to_no_rank_counts_once(
    pool: tuple[int, Pool], variant: str, without: int | None
) -> None:
    want = of_loss(0, 1, variant, None)
    for got in pool[1].run(of_loss, variant, without):
        assert_exact(got, want)


def cancelling(rank: int, size: int) -> Tensor:
    """Train on rows whose gradients nearly cancel over ranks, in every order of them."""
    own = [256.0, 1.0, -256.0, 1.0]
    orders = [(0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2)]
    here = range(rank, len(own), size)
    x = torch.tensor([[own[order[at]] for order in orders] for at in here]).bfloat16()
    model = nn.Linear(3, 1, bias=False).bfloat16()
    Engine(model, lambda out, _y: out.sum(), micro_batch=1).backward(x, torch.zeros(len(x)))
    assert model.weight.grad is not None
    return model.weight.grad


def test_half_precision_that_cancels_over_ranks_loses_nothing(pool: tuple[int, Pool]) -> None:
    for found in pool[1].run(cancelling):
        assert found.tolist() == [[2.0, 2.0, 2.0]]
