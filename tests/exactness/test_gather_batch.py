"""`anybatch.gather_batch`: a model that compares its samples with those of the full batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_after, state_of, undivided
from tests.peaks import assert_a_budget_is_respected
from tests.pool import Pool, ranks
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Engine, Loss
from anybatch.errors import LockstepError, NotExactError

N = 22
SHARDS = {2: (13, 9), 3: (15, 0, 7)}


class Contrastive(nn.Module):
    """InfoNCE inside the model; `norm` makes samples meet in BatchNorm too."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 8), nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[n, 6], [n, 5] -> the mean loss of these rows."""
        z, w = self.norm(self.one(x).tanh()), self.norm(self.other(y))
        others, begin = anybatch.gather_batch(F.normalize(w, dim=1))
        own = torch.arange(len(z)) + begin
        return F.cross_entropy(z @ others.T, own)


class Negatives(Contrastive):
    """Returns similarities; the loss is outside, and needs no other rows."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[n, 6], [n, 5] -> how much nearer the own partner is than all, [n]."""
        z, w = self.norm(self.one(x).tanh()), self.norm(self.other(y))
        others, _ = anybatch.gather_batch(w)
        return (z * w).sum(1) - (z @ others.T).logsumexp(1)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(N, 6).double(), torch.randn(N, 5).double()


def make(variant: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(1)
    norm = variant.endswith("BatchNorm")
    if variant.startswith("outside"):
        return Negatives(norm=norm).double(), lambda out: -out.mean()
    return Contrastive(norm=norm).double(), Loss.inside(count=lambda inputs, _: len(inputs[0]))


def truth(variant: str) -> dict[str, Tensor]:
    """The undivided batch by torch alone: two steps."""
    model, loss = make(variant)
    x, y = batch()

    def run(copied: nn.Module) -> Tensor:
        for _ in range(2):
            copied.zero_grad()
            out = copied(x, y)
            full: Tensor = out if isinstance(loss, Loss) else loss(out)
            full.backward()
            descend(copied)
        return full

    return state_after(model, run)


def descend(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(0.1 * p.grad)


KINDS = ["inside", "outside", "inside with BatchNorm", "outside with BatchNorm"]


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 3, 8, 11, 22])
@pytest.mark.parametrize("variant", KINDS)
def test_rows_of_all_micro_batches_are_there_and_get_their_gradient(
    variant: str, micro_batch: int
) -> None:
    model, loss = make(variant)

    def run(copied: nn.Module) -> Tensor:
        engine = Engine(copied, loss, micro_batch=micro_batch)
        for _ in range(2):
            copied.zero_grad()
            found = engine.backward(batch())
            descend(copied)
        assert engine.plan is not None
        assert engine.plan.mechanism == ("lockstep" if micro_batch < N else "undivided")
        return found

    assert_exact(state_after(model, run), truth(variant))


def test_a_budget_counts_what_is_gathered() -> None:
    model, loss = make("outside")
    memory = anybatch.plan(model, loss, (batch(), None), memory="1GiB", timed=False).memory
    assert memory is not None
    engine = Engine(model, loss, memory=memory.floor + (memory.undivided - memory.floor) // 2)
    found = [engine.evaluate(batch()), engine.backward(batch())]
    assert engine.last is not None
    assert engine.last.peak_bytes is None or engine.last.peak_bytes <= memory.undivided
    x, y = batch()
    assert torch.allclose(found[0], loss(model(x, y)), rtol=1e-12)
    assert torch.allclose(found[1], loss(model(x, y)), rtol=1e-12)


@pytest.mark.large(few=2, part=30)
@pytest.mark.parametrize("seed", range(60))
def test_any_budget_is_kept(seed: int) -> None:
    """Also one in which the rows of the full batch are a large part."""
    draw = random.Random(seed)
    model, loss = make(draw.choice(KINDS))
    rows = torch.randn((size := draw.choice([30, 64, 150])), 6), torch.randn(size, 5)
    model, share = model.float(), draw.random() * draw.choice([1, 0.1])
    assert_a_budget_is_respected(model, loss, rows, share)


class Centred(nn.Module):
    """Adds a mean over all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 6] -> [n, 3]."""
        h = self.body(x)
        others, _ = anybatch.gather_batch(h)
        return self.head(h + others.square().mean(0))


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_lanes_that_gather_wait_without_a_gradient_of_all_rows(micro_batch: int) -> None:
    """One each was beyond the forecast, and more of them held more."""
    x, y = torch.randn(80, 6), torch.randint(3, (80,))
    peaks = []
    for n in (micro_batch, 40):
        engine = Engine(Centred(), F.cross_entropy, memory="16MiB", micro_batch=n)
        engine.backward(x, y)
        assert engine.last is not None
        assert engine.plan is not None
        assert engine.plan.memory is not None
        assert engine.last.peak_bytes is not None
        assert engine.last.peak_bytes <= engine.plan.memory.predicted
        peaks.append(engine.last.peak_bytes)
    assert peaks[0] <= 1.1 * peaks[1]


class _Dropped(torch.autograd.Function):
    """The value of its input, and no gradient for it."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, _gradient: Tensor) -> None:
        return None


class Progress(Centred):
    """The same, where the gathered rows get no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """[n, 6] -> [n, 3]."""
        h = self.body(x)
        others, _ = anybatch.gather_batch(h)
        return self.head(h + _Dropped.apply(others).square().mean(0))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("micro_batch", [1, 8, N])
def test_gathered_rows_to_which_no_gradient_comes_get_zeros(micro_batch: int) -> None:
    model, x, y = Progress().double(), batch()[0], torch.randint(3, (N,))
    want = undivided(model, F.cross_entropy, x, y)
    engine = Engine(model, F.cross_entropy, micro_batch=micro_batch)
    assert_exact(state_of(model, engine.backward(x, y)), want)


def test_without_an_engine_it_is_its_input() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    full, begin = anybatch.gather_batch(x)
    assert torch.equal(full, x)
    assert begin == 0


def own_rows_are_written(h: Tensor) -> Tensor:
    others, _ = anybatch.gather_batch(h)
    h.tanh_()
    return h + others.mean(0)


def no_gradient_flows(h: Tensor) -> Tensor:
    with torch.no_grad():
        others, _ = anybatch.gather_batch(h)
    return h - others.mean(0)


def all_rows_are_written(h: Tensor) -> Tensor:
    others, _ = anybatch.gather_batch(h)
    return h + others.mul_(2).mean(0)


def detached_rows_are_written(h: Tensor) -> Tensor:
    others, _ = anybatch.gather_batch(h.detach())
    return h + others.exp_().mean(0)


def a_view_is_written_without_gradients(h: Tensor) -> Tensor:
    others, _ = anybatch.gather_batch(h)
    with torch.no_grad():
        others[1:].zero_()
    return h + others.mean(0)


class Gathers(nn.Module):
    def __init__(self, combine: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head, self.combine = nn.Linear(6, 8), nn.Linear(8, 3), combine

    def forward(self, x: Tensor) -> Tensor:
        """[n, 6] -> [n, 3]."""
        return self.head(self.combine(self.body(x)))


@pytest.mark.parametrize("micro_batch", [1, 8, N])
@pytest.mark.parametrize("combine", [own_rows_are_written, no_gradient_flows])
def test_rows_are_gathered_as_in_a_divided_batch(
    combine: Callable[[Tensor], Tensor], micro_batch: int
) -> None:
    model, x, y = Gathers(combine).double(), batch()[0], torch.randint(3, (N,))
    want = undivided(model, F.cross_entropy, x, y)
    engine = Engine(model, F.cross_entropy, micro_batch=micro_batch)
    assert_exact(state_of(model, engine.backward(x, y)), want)


@pytest.mark.parametrize("loss", [F.cross_entropy, lambda o, y: F.cross_entropy(o - o.mean(0), y)])
@pytest.mark.parametrize(
    "combine",
    [all_rows_are_written, detached_rows_are_written, a_view_is_written_without_gradients],
)
def test_a_write_to_rows_that_all_micro_batches_share_is_refused(
    combine: Callable[[Tensor], Tensor], loss: Any
) -> None:
    model, x, y = Gathers(combine).double(), batch()[0], torch.randint(3, (N,))
    with pytest.raises(NotExactError, match="rows of the full batch must not be written to"):
        Engine(model, loss, micro_batch=8).backward(x, y)
    want = undivided(model, loss, x, y)
    assert_exact(state_of(model, Engine(model, loss, micro_batch=N).backward(x, y)), want)


def test_local_batchnorm_and_other_shapes_are_refused() -> None:
    model, loss = make("outside with BatchNorm")
    with pytest.raises(NotExactError, match="they meet in gather_batch called in forward"):
        Engine(model, loss, micro_batch=4, batchnorm="local").backward(batch())

    class Chooses(Negatives):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            full, _ = anybatch.gather_batch(x if bool(x[0, 0] > 1e3) else y)
            return self.one(x).sum(1) + full.sum()

    x, y = batch()
    x[4, 0] = 1e6
    with pytest.raises(LockstepError, match=r"gather_batch of \[n, 6\]"):
        Engine(Chooses().double(), loss, micro_batch=4).backward((x, y))


def on_rank(rank: int, size: int, variant: str, micro_batch: int) -> dict[str, Tensor]:
    model, loss = make(variant)
    begin = sum(SHARDS[size][:rank])
    own = slice(begin, begin + SHARDS[size][rank])
    x, y = batch()

    def run(copied: nn.Module) -> Tensor:
        engine = Engine(copied, loss, micro_batch=micro_batch)
        for _ in range(2):
            copied.zero_grad()
            found = engine.backward((x[own], y[own]))
            descend(copied)
        return found

    return state_after(model, run)


@pytest.fixture(scope="module", params=[2, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with ranks(request.param) as found:
        yield found


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [3, 22])
@pytest.mark.parametrize("variant", KINDS)
def test_rows_of_all_ranks_are_there(pool: Pool, variant: str, micro_batch: int) -> None:
    want = truth(variant)
    found = pool.run(on_rank, variant, micro_batch)
    for got in found:
        assert_exact(got, want)
        assert all(torch.equal(got[name], found[0][name]) for name in got)
