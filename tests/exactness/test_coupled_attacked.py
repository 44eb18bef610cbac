"""What has broken `anybatch.coupled` once, or might: each is exact now, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.exactness.test_coupled import (
    BY_SAMPLES,
    CLASSES,
    OverlapModel,
    batch,
    dice,
    info_nce,
    traced_engine,
)
from tests.oracle import assert_exact, state_after, state_of, undivided
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import anybatch
from anybatch import Engine, Loss
from anybatch.errors import LossError

Forward = Callable[[Any, Tensor, Tensor], Tensor]


class Model(OverlapModel):
    """A model whose forward is given."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.of = forward
        self.proto = nn.Parameter(torch.randn(5, CLASSES))
        self.switched = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[n, 6], [n] -> the loss."""
        return self.of(self, x, y)


def made(forward: Forward) -> Model:
    torch.manual_seed(1)
    return Model(forward).double()


def plain(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = F.cross_entropy(model.head(model.body(x)), y)
    return loss


def boxes(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Rows that only some samples have."""
    z = model.body(x)
    some = model.head(z)[y > 1] if bool((y > 1).any()) else torch.zeros(0, CLASSES).double()
    return anybatch.coupled(norms)(z, some, y[y > 1])


def norms(z: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return z.mean(0).norm() + (w * labels[:, None]).sum(0).norm()


def late(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Only where some sample is of a certain class."""
    loss = plain(model, x, y)
    return loss + model.dice(model.head(model.body(x)).softmax(1), y) if model.switched else loss


def nested(model: Any, x: Tensor, y: Tensor) -> Tensor:
    inner = anybatch.coupled(info_nce)
    scale = torch.ones(()).double()
    outer = anybatch.coupled(lambda a, b: inner({"one": a, "other": b}, scale=scale) + a.std())
    return outer(model.body(x), model.body(x * x)) + plain(model, x, y)


def anew(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """A function that is made in each forward."""
    return anybatch.coupled(lambda p, y: dice(p, y))(
        model.head(model.body(x)).softmax(1), y
    ) + plain(model, x, y)


def expanded(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """One row for all samples is as many rows."""
    rows = model.proto[:1].expand(len(x), CLASSES)
    return anybatch.coupled(lambda z, w: (z * w).sum(1).exp().sum().log())(
        model.head(model.body(x)), rows
    )


def ones(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """A mask that is alike for all."""
    mask = torch.ones(len(x))
    return anybatch.coupled(lambda p, y, m: dice(p * m[:, None], y))(
        model.head(model.body(x)).softmax(1), y, mask
    )


EXACT: dict[str, Forward] = {
    "boxes": boxes,
    "nested": nested,
    "anew": anew,
    "expanded": expanded,
    "ones": ones,
}


CLASS = {"first": [2] * 11 + [0] * 11, "few": [0, 0, 2, 3] * 3 + [0] * 10}
"""Classes of the samples; of "few" the first look finds as many boxes in half of its rows."""


@pytest.mark.product
@pytest.mark.parametrize("hears", [False, True])
@pytest.mark.parametrize("micro_batch", [1, 3, 4, 8, 21])
@pytest.mark.parametrize(("name", "classes"), [*((n, "first") for n in EXACT), ("boxes", "few")])
def test_it_is_exact(name: str, classes: str, micro_batch: int, hears: bool) -> None:
    x, _ = batch()
    y = torch.tensor(CLASS[classes])
    model = made(EXACT[name])

    def run(copied: nn.Module) -> Tensor:
        options = {"micro_batch": micro_batch}
        engine = (
            traced_engine(copied, **options) if hears else Engine(copied, BY_SAMPLES, **options)
        )
        return engine.backward((x, y))

    assert_exact(state_after(model, run), undivided(model, lambda loss: loss, (x, y), None))


def test_a_term_that_comes_later_is_that_of_the_full_batch() -> None:
    model, rows = made(late), batch()
    engine = Engine(model, BY_SAMPLES, micro_batch=4)
    engine.backward(rows)
    assert engine.plan is not None
    assert engine.plan.mechanism == "streaming"
    for at in range(3):
        model.switched = at != 1
        model.zero_grad()
        want = undivided(model, lambda loss: loss, rows, None)
        assert_exact(state_of(model, engine.backward(rows)), want)
        assert engine.plan.mechanism == "lockstep"


def test_a_term_that_comes_with_the_third_micro_batch_is_too() -> None:
    x, _ = batch()
    y = torch.tensor([0, 1] * 4 + [2, 3] * 7)

    def some(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = plain(model, x, y)
        if bool((y >= 2).any()):
            loss = loss + model.dice(model.head(model.body(x)).softmax(1), y)
        return loss

    model, observed = made(some), []
    engine = Engine(model, BY_SAMPLES, micro_batch=4)
    with pytest.raises(anybatch.errors.LockstepError):  # some of them meet, and others do not
        engine.backward((x, y), observe=lambda *_: observed.append(1))
    assert all(p.grad is None for p in model.parameters())


class ExtraOutputs(nn.Module):
    """Returns a coupled value, and what it makes of it, beside its logits."""

    def __init__(self, *, normalises: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6) if normalises else nn.Tanh()
        self.last, self.scale = nn.Linear(6, CLASSES), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = self.last(self.norm(self.first(x)))
        spread = anybatch.coupled(lambda rows: rows.var(0).sum())(out)
        return out, spread, self.scale * spread + self.last.weight.square().sum()


EXTRA_OUTPUTS: dict[str, Callable[..., Tensor]] = {
    "sum": lambda out, y: F.cross_entropy(out[0], y) + 0.1 * out[1],
    "product": lambda out, y: F.cross_entropy(out[0], y) * out[1].exp() + out[2],
    "unused": lambda out, y: F.cross_entropy(out[0], y) + out[2],
}


@pytest.mark.product
@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize("micro_batch", [1, 5])
@pytest.mark.parametrize("way", EXTRA_OUTPUTS)
def test_a_value_next_to_the_outputs_goes_into_the_loss_outside(
    way: str, micro_batch: int, normalises: bool
) -> None:
    x, y = batch()
    model, loss = ExtraOutputs(normalises=normalises).double(), EXTRA_OUTPUTS[way]
    want = undivided(model, loss, x, y)
    engine: list[Engine] = []

    def run(copied: nn.Module) -> Tensor:
        engine.append(Engine(copied, loss, micro_batch=micro_batch))
        return engine[0].backward(x, y)

    assert_exact(state_after(model, run), want)
    assert engine[0].plan is not None
    assert engine[0].plan.exact


@pytest.mark.parametrize("declare", ["per sample", "ratio"])
def test_a_declared_loss_outside_may_call_it(declare: str) -> None:
    marked = anybatch.coupled(dice)

    def each(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y, reduction="none") + marked(out.softmax(1), y)

    loss = Loss.per_sample(each)
    if declare == "ratio":
        loss = Loss.ratio(lambda out, y: each(out, y).sum(), len)
    x, y = batch()
    model = nn.Linear(6, CLASSES).double()
    want = undivided(model, lambda out, y: F.cross_entropy(out, y) + dice(out.softmax(1), y), x, y)
    got = state_after(model, lambda m: Engine(m, loss, micro_batch=5).backward(x, y))
    assert_exact(got, want)


def test_the_gradient_of_a_half_precision_loss_does_not_vanish() -> None:
    """A gradient of a mean over many is less than float16 can hold, but for the scale."""
    torch.manual_seed(0)
    body = nn.Linear(16, 4096)

    def soft(p: Tensor) -> Tensor:
        wide = p.float().sigmoid()
        return 1 - wide.sum() / (wide.sum() + p.numel() * 0.5)

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = body

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.float16):
                p = self.body(x)
            return anybatch.coupled(soft)(p)

    x, found = torch.randn(1024, 16), []
    inside = Loss.inside(count=lambda inputs, _: len(inputs))
    for micro_batch in (1024, 256):
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        body.weight.grad = None
        Engine(Half(), inside, micro_batch=micro_batch).backward(x, scaler=scaler)
        assert body.weight.grad is not None
        found.append(body.weight.grad / 65536.0)
    body.weight.grad = None
    soft(body(x)).backward()
    assert body.weight.grad is not None
    errors = [float((one - body.weight.grad).norm() / body.weight.grad.norm()) for one in found]
    assert errors[1] < 2 * errors[0], errors


def closes_over(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return anybatch.coupled(lambda x, y: plain(model, x, y))(x, y)


def counts_rows(model: Any, x: Tensor, y: Tensor) -> Tensor:
    z = model.body(x)
    return anybatch.coupled(lambda z, n: z.square().sum() / n)(z, len(z))


def own_scale(model: Any, x: Tensor, y: Tensor) -> Tensor:
    z = model.body(x)
    return anybatch.coupled(lambda z, t: (z / t).exp().mean())(z, z.std())


class Holder:
    """Something that is no tree."""

    def __init__(self, held: Any) -> None:
        self.held = held


def own_object(model: Any, x: Tensor, y: Tensor) -> Tensor:
    held = Holder(y.double().mean())
    return anybatch.coupled(lambda z, h: z.square().mean() * h.held)(model.body(x), held)


def own_order(model: Any, x: Tensor, y: Tensor) -> Tensor:
    z = model.body(x)
    pair = {"a": z, "b": 2 * z} if bool(y[0] > 1) else {"b": 2 * z, "a": z}
    return anybatch.coupled(lambda pair: pair["a"].sum().square() + pair["b"].norm())(pair)


def prototypes(model: Any, x: Tensor, y: Tensor) -> Tensor:
    proto = F.normalize(model.proto, dim=1)
    return anybatch.coupled(lambda z, p: (z @ p.T).logsumexp(1).mean())(
        model.head(model.body(x)), proto
    )


def queue(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return anybatch.coupled(lambda z, p: (z @ p.T).logsumexp(1).mean())(
        model.head(model.body(x)), model.proto.detach().clone()
    )


def adversarial(model: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.enable_grad():
        moved = x.detach().requires_grad_()
        value = model.dice(model.head(model.body(moved)).softmax(1), y)
        (slope,) = torch.autograd.grad(value, moved)
    return plain(model, x + slope, y)


def writes(model: Any, x: Tensor, y: Tensor) -> Tensor:
    def fn(p: Tensor, y: Tensor) -> Tensor:
        y[y == 3] = 0
        return dice(p, y)

    out = model.head(model.body(x))
    return anybatch.coupled(fn)(out.softmax(1), y) + F.cross_entropy(out, y)


REFUSED: dict[str, tuple[Forward, str]] = {
    "closes over": (closes_over, "must have every tensor that it trains"),
    "counts rows": (counts_rows, "must be the same in all micro-batches, and <lambda>"),
    "own scale": (own_scale, "must be the same in all micro-batches"),
    "own object": (own_object, r"reads a tensor of shape \(\) which forward has made of some"),
    "own order": (own_order, "must be the same in all micro-batches"),
    "prototypes": (prototypes, r"of shape \(5, 4\), belongs to no sample"),
    "queue": (queue, r"of shape \(5, 4\), belongs to no sample"),
    "adversarial": (adversarial, "coupled dice must be differentiated after forward"),
    "writes": (writes, "must not change its arguments, and fn writes to one"),
}


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 3, 8, 11, 21])
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str, micro_batch: int) -> None:
    forward, match = REFUSED[name]
    model, (x, y) = made(forward), batch()
    y[0], y[-1] = 3, 0
    with pytest.raises(LossError, match=match):
        Engine(model, BY_SAMPLES, micro_batch=micro_batch).backward((x, y))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("marked", [False, True])
def test_a_term_without_a_graph_is_not_traced(marked: bool) -> None:
    """A reentrant checkpoint runs its body without one, and the loss gets it later."""

    def again(model: Any, x: Tensor, y: Tensor) -> Tensor:
        fn = model.dice if marked else lambda p, y: F.mse_loss(p, F.one_hot(y, CLASSES).double())
        z = model.body(x)
        inside = partial(checkpoint, use_reentrant=True)
        aux: Tensor = inside(lambda z: fn(model.head(z).softmax(1), y), z)
        return plain(model, x, y) + aux

    model = made(again)
    with pytest.raises(
        LossError, match=r"something else \(add, checkpoint, with use_reentrant=True\)"
    ):
        traced_engine(model, micro_batch=4).backward(batch())
    model, rows = made(again), batch()
    if marked:
        want = undivided(model, lambda loss: loss, rows, None)
        got = state_after(model, lambda m: Engine(m, BY_SAMPLES, micro_batch=4).backward(rows))
        assert_exact(got, want)


def test_rows_that_stand_in_for_others_are_no_singular_matrix() -> None:
    def volume(model: Any, x: Tensor, y: Tensor) -> Tensor:
        def fn(z: Tensor) -> Tensor:
            return torch.linalg.cholesky(z.T @ z / len(z)).diagonal().log().sum()

        return anybatch.coupled(fn)(model.head(model.body(x)))

    model = made(volume)
    rows = torch.randn(300, 6).double(), torch.randint(CLASSES, (300,))
    got = state_after(model, lambda m: Engine(m, BY_SAMPLES, micro_batch=64).backward(rows))
    assert_exact(got, undivided(model, lambda loss: loss, rows, None))


def test_one_inside_another_is_foreseen_as_one() -> None:
    rows = torch.randn(200, 6).double(), torch.randint(CLASSES, (200,))
    memory = anybatch.plan(made(nested), BY_SAMPLES, (rows, None), memory="1GiB", timed=False)
    assert memory.memory is not None
    assert memory.memory.floor < 2 * memory.memory.undivided


HOW_MANY: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a tensor": lambda x, y: torch.tensor(float(len(x))),
    "a filled tensor": lambda x, y: x.new_full((), len(x)),
    "a sum of ones": lambda x, y: torch.ones_like(y).sum(),
    "a number": lambda x, y: len(x),
    "its inverse": lambda x, y: 1 / len(x),
}


@pytest.mark.product
@pytest.mark.parametrize("how", HOW_MANY)
@pytest.mark.parametrize(("n", "micro_batch"), [(8, 2), (16, 4), (5, 1), (7, 3)])
def test_how_many_samples_there_are_is_refused_next_to_rows(
    how: str, n: int, micro_batch: int
) -> None:
    """As a tensor without dimensions it was the same in all micro-batches, shown, and wrong."""

    def forward(model: Any, x: Tensor, y: Tensor) -> Tensor:
        out = model.head(model.body(x))
        spread = anybatch.coupled(lambda z, k: z.var(0).sum() * k)
        loss: Tensor = F.cross_entropy(out, y) + spread(out, HOW_MANY[how](x, y))
        return loss

    x, y = batch()
    with pytest.raises(LossError, match="other numbers, names or objects"):
        Engine(made(forward), micro_batch=micro_batch).backward((x[:n], y[:n]))
