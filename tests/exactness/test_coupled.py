"""`anybatch.coupled`: a loss in which samples meet, inside a model, is that of the full batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tests.cases import own_loss
from tests.oracle import assert_exact, state_after, undivided
from tests.peaks import assert_a_budget_is_respected
from tests.pool import Pool, ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import anybatch
from anybatch import Engine, Loss
from anybatch.errors import LockstepError, LossError, NotExactError

N, CLASSES = 22, 4
SHARDS = {2: (13, 9), 3: (15, 0, 7)}
BY_SAMPLES = Loss.inside(count=lambda inputs, _: len(inputs[0]))


def dice(found: Tensor, wanted: Tensor) -> Tensor:
    """Of probabilities and classes, [n, c] and [n]."""
    one = F.one_hot(wanted, found.shape[1])
    return 1 - (2 * (found * one).sum(0) / (found.sum(0) + one.sum(0) + 1)).mean()


def info_nce(pair: dict[str, Tensor], *, scale: Tensor) -> Tensor:
    """Of two views, [n, d] each, and a learned scale."""
    own = torch.arange(len(pair["one"]))
    return F.cross_entropy(scale * pair["one"] @ pair["other"].T, own)


def evenly(gates: tuple[Tensor, ...], used: Tensor | None, experts: int) -> Tensor:
    """Of experts, of several layers: [tokens, experts] each, and [tokens] which of them count."""
    gate = torch.cat(gates)
    mask = torch.ones(len(gate)) if used is None else used.repeat(len(gates)).to(gate.dtype)
    odds = gate.softmax(1)
    chosen = F.one_hot(odds.argmax(1), experts).to(odds.dtype)
    means = [(part * mask[:, None]).sum(0) / mask.sum() for part in (chosen, odds)]
    return (means[0] * means[1]).sum() * experts


class OverlapModel(nn.Module):
    """Samples meet in its loss; with `norm` in BatchNorm, too."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.dice = anybatch.coupled(dice)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[n, 6], [n] -> the loss."""
        out = self.head(self.norm(self.body(x).tanh()))
        return 0.3 * self.dice(out.softmax(1), y) + F.cross_entropy(out, y)


class Views(OverlapModel):
    """Two views that are to find each other, and a scale that is learned."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__(norm=norm)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nce = anybatch.coupled(info_nce)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[n, 6], [n] -> the loss."""
        z = self.norm(self.body(x).tanh())
        pair = {"one": F.normalize(z, dim=1), "other": F.normalize(self.norm(z * z), dim=1)}
        return self.nce(pair, scale=self.scale.exp()) - 0.1 * self.dice(self.head(z).softmax(1), y)


class Tokens(OverlapModel):
    """Rows are five tokens a sample, of which some do not count; forward is computed twice."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__(norm=norm)
        self.evenly = anybatch.coupled(evenly)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[n, 6], [n] -> the loss."""
        tokens = torch.stack([x * k for k in range(1, 6)], 1).flatten(0, 1)
        used = (torch.arange(5) <= y[:, None]).flatten()
        z = self.norm(self.body(tokens).tanh())
        gates = (self.head(z), self.head(z.roll(1, 1)))
        again = partial(checkpoint, use_reentrant=False)
        aux = again(self.evenly, gates, used, CLASSES) + self.evenly(gates, None, experts=CLASSES)
        out = self.head(z).view(len(y), 5, CLASSES).mean(1)
        return F.cross_entropy(out, y) + aux / 4


KINDS = {"Dice": OverlapModel, "views": Views, "tokens": Tokens}
EVERY = [*KINDS, *(f"{variant}, BatchNorm" for variant in KINDS)]


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(N, 6, generator=draw).double()
    return x, torch.randint(CLASSES, (N,), generator=draw)


def make(variant: str) -> nn.Module:
    torch.manual_seed(1)
    name, _, norm = variant.partition(", ")
    return KINDS[name](norm=bool(norm)).double()


def truth(variant: str) -> dict[str, Tensor]:
    """The undivided batch by torch alone: two steps."""
    return state_after(make(variant), lambda model: trained(model, lambda: plain_step(model)))


def plain_step(model: nn.Module) -> Tensor:
    loss: Tensor = model(*batch())
    loss.backward()
    return loss


def trained(model: nn.Module, step: Any) -> Tensor:
    for _ in range(2):
        model.zero_grad()
        loss: Tensor = step()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
    return loss


def traced_engine(model: nn.Module, **options: Any) -> Engine:
    """An engine that traces what the model's loss is divided by."""
    return Engine(*own_loss(model), **options)


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 3, 8, 11, 22])
@pytest.mark.parametrize("hears", [False, True])
@pytest.mark.parametrize("variant", EVERY)
def test_it_is_that_of_the_full_batch(variant: str, hears: bool, micro_batch: int) -> None:
    def run(model: nn.Module) -> Tensor:
        options = {"micro_batch": micro_batch}
        engine = traced_engine(model, **options) if hears else Engine(model, BY_SAMPLES, **options)
        loss = trained(model, lambda: engine.backward(batch()))
        assert engine.plan is not None
        assert engine.plan.mechanism == ("lockstep" if micro_batch < N else "undivided")
        assert engine.plan.exact
        return loss

    assert_exact(state_after(make(variant), run), truth(variant))


@pytest.mark.parametrize("variant", ["Dice", "tokens"])
def test_the_weights_of_micro_batches_may_be_any(variant: str) -> None:
    """A count of something else than samples: they are those of one whole all the same."""
    by_class = Loss.inside(count=lambda inputs, _: (inputs[1] + 1).sum())

    class OwnCoupled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make(variant)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            out = self.inner.head(self.inner.body(x).tanh())
            return anybatch.coupled(dice)(out.softmax(1), y)

    def run(model: nn.Module) -> Tensor:
        return Engine(model, by_class, micro_batch=5).backward(batch())

    model = OwnCoupled()
    want = undivided(model, lambda loss: loss, batch(), None)
    assert_exact(state_after(model, run), want)


@pytest.mark.large(few=2, part=30)
@pytest.mark.parametrize("seed", range(60))
def test_any_budget_is_kept(seed: int) -> None:
    """Also one in which the rows of the full batch are a large part."""
    draw = random.Random(seed)
    model, size = make(draw.choice(EVERY)).float(), draw.choice([30, 64, 150])
    rows = torch.randn(size, 6), torch.randint(CLASSES, (size,))
    subject, loss = own_loss(model) if draw.random() < 0.5 else (model, BY_SAMPLES)
    assert_a_budget_is_respected(subject, loss, rows, draw.random() * 0.9)


def test_evaluation_takes_it_of_the_full_batch() -> None:
    model = make("views").eval()
    want = model(*batch()).detach()
    for engine in (Engine(model, BY_SAMPLES, micro_batch=4), traced_engine(model, micro_batch=4)):
        assert torch.allclose(engine.evaluate(batch()), want, rtol=1e-13)


def test_without_an_engine_it_is_the_function() -> None:
    x, y = batch()
    found = x[:, :CLASSES].softmax(1).requires_grad_()
    value = anybatch.coupled(dice)(found, y)
    assert torch.equal(value, dice(found, y))
    (gradient,) = torch.autograd.grad(value, found)
    assert torch.equal(gradient, torch.autograd.grad(dice(found, y), found)[0])
    assert anybatch.coupled(dice).__doc__ == dice.__doc__


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(LossError, match="a function of rows, and it was called with int"):
        anybatch.coupled(3)  # type: ignore[arg-type]


def test_a_module_can_be_coupled() -> None:
    class Module(nn.Module):
        def forward(self, found: Tensor, wanted: Tensor) -> Tensor:
            return dice(found, wanted)

    model = make("Dice")
    model.dice = anybatch.coupled(Module())
    assert_exact(
        state_after(model, lambda m: traced_engine(m, micro_batch=4).backward(batch())),
        undivided(model, lambda loss: loss, batch(), None),
    )


class Hidden(OverlapModel):
    """Its coupled function trains what it was not given."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[n, 6], [n] -> the loss."""
        return anybatch.coupled(lambda z, y: dice(self.head(z).softmax(1), y))(self.body(x), y)


class InPlace(OverlapModel):
    """What it marks overwrites what its gradient needs."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[n, 6], [n] -> the loss."""
        return anybatch.coupled(lambda z: (e := z.exp()).sum() + e.zero_().sum())(self.body(x))


class Vector(OverlapModel):
    """What it marks returns no single number."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[n, 6], [n] -> the loss."""
        return anybatch.coupled(F.cross_entropy)(self.body(x), y, reduction="none").mean()


class Weighs(OverlapModel):
    """Hands over what belongs to no sample: class weights of the model."""

    def __init__(self, *, trained: bool = False) -> None:
        super().__init__()
        weight = torch.ones(CLASSES)
        self.weight = nn.Parameter(weight) if trained else weight.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[n, 6], [n] -> the loss."""
        out = self.head(self.body(x))
        return anybatch.coupled(lambda a, b, w: dice(a * w.mean(), b))(out, y, self.weight)


class Squared(OverlapModel):
    """Its loss is no sum of what it marks."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[n, 6], [n] -> the loss."""
        return self.dice(self.head(self.body(x)).softmax(1), y) ** 2


class Chooses(OverlapModel):
    """Other rows meet elsewhere."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[n, 6], [n] -> the loss."""
        out = self.body(x)
        return anybatch.coupled(dice)((out if bool(x[0, 0] > 1e3) else out[:, :4]).softmax(1), y)


def test_what_cannot_be_is_refused_and_leaves_no_trace() -> None:
    x, y = batch()
    x[4, 0] = 1e6
    wrong = [
        (
            Hidden,
            LossError,
            "must have every tensor that it trains as an argument, and <lambda> uses a parameter",
        ),
        (InPlace, RuntimeError, r"changed a tensor of shape \(22, 8\) in place: write"),
        (Weighs, LossError, "one of <lambda>, with 4 rows for any number of samples, belongs to"),
        (partial(Weighs, trained=True), LossError, "with 4 rows for any .* belongs to no sample"),
        (Vector, LossError, r"cross_entropy must return one number .* shape \(\d+,\)"),
        (Chooses, LockstepError, r"coupled dice, with \[n, 8\] of torch.float64"),
    ]
    for variant, error, match in wrong:
        model = variant().double()
        with pytest.raises(error, match=match):
            Engine(model, BY_SAMPLES, micro_batch=4).backward((x, y))
        assert all(p.grad is None for p in model.parameters())
    with pytest.raises(LossError, match=r"weighted sum of torch's own losses.*\(pow\)"):
        traced_engine(Squared().double(), micro_batch=4).backward((x, y))
    with pytest.raises(NotExactError, match="they meet in coupled dice called in forward"):
        Engine(make("Dice"), BY_SAMPLES, micro_batch=4, batchnorm="local").backward((x, y))


def on_rank(rank: int, size: int, variant: str, micro_batch: int, hears: bool) -> dict[str, Tensor]:
    begin = sum(SHARDS[size][:rank])
    own = slice(begin, begin + SHARDS[size][rank])
    x, y = batch()

    def run(model: nn.Module) -> Tensor:
        options = {"micro_batch": micro_batch}
        engine = traced_engine(model, **options) if hears else Engine(model, BY_SAMPLES, **options)
        return trained(model, lambda: engine.backward((x[own], y[own])))

    return state_after(make(variant), run)


@pytest.fixture(scope="module", params=[2, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with ranks(request.param) as found:
        yield found


@pytest.mark.large(few=3)
@pytest.mark.parametrize("micro_batch", [3, 22])
@pytest.mark.parametrize("hears", [False, True])
@pytest.mark.parametrize("variant", EVERY)
def test_it_is_that_of_all_ranks(pool: Pool, variant: str, hears: bool, micro_batch: int) -> None:
    want = truth(variant)
    found = pool.run(on_rank, variant, micro_batch, hears)
    for got in found:
        assert_exact(got, want)
        assert all(torch.equal(got[name], found[0][name]) for name in got)
