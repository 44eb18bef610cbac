"""What was tried to make a micro-batch draw something else than the full batch, and what came.

Either the gradient is that of the undivided batch, or the step is refused and nothing has changed.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.exactness.test_dice import (
    NOISE,
    WIDE,
    Fn,
    N,
    Noisy,
    Normed,
    Skips,
    assert_same,
    by_torch,
    coupled,
    in_parts,
    seeded,
    sequences,
    vectors,
)
from tests.faults import in_backward, unwalked
from tests.limits.test_out_of_memory import Fault, Fuse, above, at
from tests.oracle import assert_exact, same, snapshot, undivided
from tests.peaks import metered
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

import anybatch
from anybatch import Engine, LazyBatch, Loss
from anybatch.devices import RNGState
from anybatch.errors import NotExactError

pytestmark = pytest.mark.usefixtures("_double")


@pytest.fixture
def _double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def data() -> tuple[Tensor, Tensor]:
    return vectors(), torch.randint(3, (N,))


# -------------------------------------------------------------------------------- refused


class Own(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self, draw: Callable[[Any, Tensor], Any], make: Callable[[], Any]) -> None:
        super().__init__()
        self.own, self.draw = make(), draw

    def forward(self, x: Tensor) -> Tensor:
        return x * self.draw(self.own, x)


@torch.library.custom_op("test_dice::hidden", mutates_args=())
def hidden(x: Tensor) -> Tensor:
    return x * torch.rand(x.shape[0], 1)


@hidden.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


hidden.register_autograd(lambda ctx, gradient: gradient)


def once_a_sample(x: Tensor) -> Tensor:
    return torch.stack([F.dropout(row, 0.5) for row in x])


def a_coin_a_sample(x: Tensor) -> Tensor:
    return x * torch.tensor([random.random() for _ in x])[:, None]


def mixed_up(x: Tensor) -> Tensor:
    return x + 0.1 * x.detach()[torch.randperm(len(x))]


def mixed_by_order(x: Tensor) -> Tensor:
    return x + 0.1 * x.detach()[torch.rand(len(x)).argsort()]


def some_samples(x: Tensor) -> Tensor:
    return x + 0.1 * x.detach()[torch.multinomial(torch.ones(len(x)), len(x))]


def in_chunks(x: Tensor) -> Tensor:
    return torch.cat([F.dropout(part, 0.5) for part in x.split(2)])


def two_chunks(x: Tensor) -> Tensor:
    return torch.cat([F.dropout(part, 0.5) for part in x.chunk(2)])


def of_positive(x: Tensor) -> Tensor:
    out = x.clone()
    out[x > 0] = F.dropout(x[x > 0], 0.5)
    return out


def padded(x: Tensor) -> Tensor:
    padded_size = 1 << (len(x) - 1).bit_length()
    return x * torch.rand(padded_size, 1)[: len(x)]


def not_preserved(x: Tensor) -> Tensor:
    found = checkpoint(
        lambda x: F.dropout(x.sin(), 0.5), x, use_reentrant=False, preserve_rng_state=False
    )
    return found * 1.0


def by_values(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5) if x[:, 0].max() > 1e3 else x * torch.rand(len(x), 1)


class DrawsOnce(nn.Module):
    """Draws once, and never again."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.3)
        if self.mask is None:
            self.mask = torch.rand(WIDE)
        return x * self.mask


def compiled() -> nn.Module:
    model = Noisy(nn.Dropout(0.3))
    model.compile(backend="eager")
    return model


def views_by_comparison(x: Tensor) -> Tensor:
    both = torch.cat([x, -x])
    retained = torch.rand(len(both)) < 0.9
    one, other = torch.where(retained[:, None], both, 0.0).chunk(2)
    return one - 0.3 * other.sin()


def rows_by_integers(x: Tensor) -> Tensor:
    chosen = torch.randint(2, (2 * len(x),)).unflatten(0, (len(x), 2))
    return x * chosen.sum(1, keepdim=True)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "own generator": (
        lambda: Own(
            lambda g, x: torch.rand(len(x), 1, generator=g),
            lambda: torch.Generator().manual_seed(1),
        ),
        r"global generators, and rand has one of its own \(generator=\)",
    ),
    "own generator, in place": (
        lambda: Own(lambda g, x: torch.empty_like(x).normal_(generator=g), torch.Generator),
        "normal_ has one of its own",
    ),
    "own generator of numpy": (
        lambda: Own(
            lambda g, x: torch.from_numpy(g.random((len(x), 1))) * F.dropout(x, 0.5),
            partial(np.random.default_rng, 1),
        ),
        "must give the same outputs as in it|forward must return the same when it is called again",
    ),
    "poisson": (
        lambda: Fn(lambda x: x * torch.poisson(x.detach().exp())),
        "poisson at test_dice_attacked.py, line .*values of others",
    ),
    "gamma": (
        lambda: Fn(lambda x: x * torch.distributions.Gamma(x.detach().exp(), 1.0).sample()),
        "_standard_gamma at a module of torch cannot be|_standard_gamma at .*values of others",
    ),
    "binomial": (
        lambda: Fn(lambda x: x * torch.binomial(torch.full_like(x, 3), x.detach().sigmoid())),
        "binomial at .*values of others",
    ),
    "rrelu": (lambda: nn.RReLU(), "rrelu_with_noise at .*values of others"),
    "a permutation": (lambda: Fn(mixed_up), "samples|randperm at .* chooses among the samples"),
    "an order": (lambda: Fn(mixed_by_order), "must give the same outputs as in it|must not meet"),
    "a choice of samples": (lambda: Fn(some_samples), "chooses among the samples|must not meet"),
    "a draw a sample": (
        lambda: Fn(once_a_sample),
        "how often forward draws depends on the samples",
    ),
    "a coin a sample": (
        lambda: Fn(a_coin_a_sample),
        "must draw as often for any number of samples, and it draws from random or numpy",
    ),
    "chunks of two": (lambda: Fn(in_chunks), "how often forward draws depends on the samples"),
    "two chunks": (lambda: Fn(two_chunks), "its shape does not grow with the samples"),
    "positive entries": (lambda: Fn(of_positive), "does not grow with the samples"),
    "padded to a power of two": (
        lambda: Fn(padded),
        "its shape does not grow with the samples|the place of a row among the samples",
    ),
    "not the same in backward": (
        lambda: Fn(not_preserved),
        "draws in backward must repeat those of forward.*preserve_rng_state=False",
    ),
    "two views by comparison": (
        lambda: Fn(views_by_comparison),
        r"rand at .*no sample's outputs show which .* draw \[samples, entries\], and flatten",
    ),
    "two integers a sample": (
        lambda: Fn(rows_by_integers),
        r"randint at .*no sample's outputs show which .* draw \[samples, entries\]",
    ),
    "a custom kernel": (lambda: Fn(hidden), "test_dice.hidden.* draws inside its kernel"),
    "a draw that is kept for later": (
        lambda: DrawsOnce(),
        "how often forward draws depends on the samples",
    ),
    "another path for other samples": (
        lambda: Fn(by_values),
        "every micro-batch must draw the same, and one draws .*where another draws",
    ),
}


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [2, 5, WIDE])
@pytest.mark.parametrize("row", REFUSED)
def test_what_cannot_be_drawn_for_the_full_batch_is_refused(row: str, micro_batch: int) -> None:
    make, message = REFUSED[row]
    model, (x, y) = Noisy(make()), data()
    x[-1, 0] = 1e6
    with torch.no_grad():
        model.first.weight[0] = torch.eye(WIDE)[0]
    if row == "another path for other samples":
        model.first, model.forward = nn.Identity(), lambda x: model.head(model.noise(x))
    before = snapshot(model)
    with pytest.raises(NotExactError, match=message):
        Engine(model, F.cross_entropy, micro_batch=micro_batch, rng="batch").backward(x, y)
    assert same(before, snapshot(model))


def test_a_compiled_model_that_draws_is_refused() -> None:
    with pytest.raises(NotExactError, match="random draws of a compiled model cannot be those"):
        Engine(compiled(), F.cross_entropy, micro_batch=4, rng="batch").backward(*data())


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_model_is_refused() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(WIDE, 3), nn.Dropout(0.3)))
    with pytest.raises(NotExactError, match="a part of the model is a torch.jit.ScriptModule"):
        Engine(scripted, F.cross_entropy, micro_batch=4, rng="batch").backward(*data())


def test_a_compiled_function_that_draws_is_refused() -> None:
    drop = torch.compile(lambda x: F.dropout(x.sin(), 0.3), backend="eager")
    with pytest.raises(NotExactError, match="random draws of a compiled model cannot be those"):
        Engine(Noisy(Fn(drop)), F.cross_entropy, micro_batch=4, rng="batch").backward(*data())


def test_a_hook_that_adds_noise_to_what_flows_back_is_refused() -> None:
    """One on a parameter fires once: tests/exactness/test_parameter_hooks.py."""
    model = Noisy(nn.Dropout(0.3))
    in_backward(model.head, lambda gradient: gradient + torch.randn_like(gradient))
    x, y = data()
    before = snapshot(model)
    with pytest.raises(NotExactError, match=r"and randn_like draws anew \(a hook on a gradient"):
        Engine(model, F.cross_entropy, micro_batch=4, rng="batch").backward(x, y)
    assert same(before, snapshot(model))


def test_entries_that_nothing_distinguishes_are_refused() -> None:
    class Unused(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            F.dropout(torch.cat([x, x]), 0.5)
            return x

    with pytest.raises(NotExactError, match="no sample's outputs show which of its entries"):
        Engine(Noisy(Unused()), F.cross_entropy, micro_batch=4, rng="batch").backward(*data())


# ---------------------------------------------------------------------------- still exact


@pytest.mark.parametrize("mechanism", ["streaming", "two-pass", "lockstep"])
def test_a_loss_that_draws_is_computed_on_the_full_batch(mechanism: str) -> None:
    def smoothed(out: Tensor, y: Tensor) -> Tensor:
        noise = 0.1 * torch.rand(out.shape)
        return F.cross_entropy(out + noise, y) + 0.1 * torch.rand(())

    x, y = data()
    model = (Normed if mechanism == "lockstep" else Noisy)(nn.Dropout(0.3))
    want = by_torch(model, smoothed, x, y)
    for micro_batch in (1, 5, WIDE):
        found = "two-pass" if mechanism == "streaming" else mechanism
        assert_same(in_parts(model, smoothed, x, y, micro_batch, found), want)


def test_a_declared_loss_that_draws_is_computed_on_the_full_batch() -> None:
    def each(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.dropout(out, 0.2), y, reduction="none")

    x, y = data()
    model = Noisy(nn.Dropout(0.3))
    want = by_torch(model, lambda out, y: each(out, y).mean(), x, y)
    assert_same(in_parts(model, Loss.per_sample(each), x, y, 4, "two-pass"), want)


@pytest.mark.large(few=2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("row", ["heads", "flat, time first", "drop path", "coin of torch"])
def test_what_is_checkpointed_draws_the_same_again(row: str, *, reentrant: bool) -> None:
    make, inputs = NOISE[row]

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = make(), make()

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.one, x, use_reentrant=reentrant)
            return checkpoint(lambda x: F.dropout(self.two(x), 0.3), x, use_reentrant=reentrant)

    for variant, mechanism in ((Noisy, "streaming"), (Normed, "lockstep")):
        model, x, y = variant(Again()), inputs(), torch.randint(3, (N,))
        want = by_torch(model, F.cross_entropy, x, y)
        assert_same(in_parts(model, F.cross_entropy, x, y, 5, mechanism), want)


def test_lengths_may_change_from_step_to_step() -> None:
    make, _ = NOISE["transformer layer, samples second"]
    model, y = Noisy(make()), torch.randint(3, (N,))
    engine = Engine(model, F.cross_entropy, micro_batch=WIDE, rng="batch")
    for length in (5, WIDE, 3, 1, 5):
        x, plain = sequences(length)(), copy.deepcopy(model)
        seeded()
        want = undivided(plain, F.cross_entropy, x, y)
        rng_state = RNGState.now()
        model.zero_grad()
        seeded()
        loss = engine.backward(x, y)
        got = {"loss": loss} | {f"{n}.grad": p.grad for n, p in model.named_parameters()}
        assert_exact(got, want)
        assert rng_state.same_as(RNGState.now())


def test_layers_left_out_by_a_coin_are_learnt_when_they_are_reached() -> None:
    model, (x, y) = Noisy(Skips(lambda: float(torch.rand(())))), data()
    engine = Engine(model, F.cross_entropy, micro_batch=5, rng="batch")
    for seed in range(12):
        plain = copy.deepcopy(model)
        torch.manual_seed(seed)
        want = undivided(plain, F.cross_entropy, x, y)
        rng_state = RNGState.now()
        model.zero_grad()
        torch.manual_seed(seed)
        loss = engine.backward(x, y)
        named = ((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)
        got = {"loss": loss} | {f"{name}.grad": gradient for name, gradient in named}
        assert_exact(got, want)
        assert rng_state.same_as(RNGState.now())


@pytest.mark.product
@pytest.mark.parametrize("variant", [Noisy, Normed])
@pytest.mark.parametrize("loss", [F.cross_entropy, coupled])
def test_evaluation_in_train_mode_draws_as_the_full_batch(variant: Any, loss: Any) -> None:
    model, (x, y) = variant(nn.Dropout(0.3)), data()
    for micro_batch in (1, 3, WIDE, 11):
        seeded()
        plain = copy.deepcopy(model)
        with torch.no_grad():
            want = loss(plain(x), y)
        rng_state, parts = RNGState.now(), copy.deepcopy(model)
        seeded()
        found = Engine(parts, loss, micro_batch=micro_batch, rng="batch").evaluate(x, y)
        assert abs(float(found - want)) <= 1e-12 * abs(float(want))
        assert rng_state.same_as(RNGState.now())


def test_an_observer_may_draw() -> None:
    model, (x, y) = Noisy(nn.Dropout(0.3)), data()
    observed: list[int] = []

    def observe(out: Tensor, y: Tensor) -> None:
        torch.rand(3)
        observed.append(len(out))

    seeded()
    want = undivided(model, F.cross_entropy, x, y)
    seeded()
    engine = Engine(model, F.cross_entropy, micro_batch=WIDE, rng="batch")
    loss = engine.backward(x, y, observe=observe)
    assert_exact({"loss": loss, **{f"{n}.grad": p.grad for n, p in model.named_parameters()}}, want)
    assert observed == [WIDE, WIDE, 6]


FAULTS = unwalked(dict[tuple[int, str], Fault]())


def of_all_copies(name: str) -> Any:
    """Return a property that holds a fault where a change of it is no change of the model."""

    def find(net: Any) -> Fault:
        return FAULTS().setdefault((net.number, name), Fault())

    return property(find, lambda net, fault: FAULTS().update({(net.number, name): fault}))


class Weak(nn.Module):
    """Draws, and runs out of memory in forward or in backward."""

    forward_fault, backward_fault = of_all_copies("forward"), of_all_copies("backward")

    def __init__(self) -> None:
        super().__init__()
        self.number = len(FAULTS())

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.3)
        self.forward_fault(len(x))
        return F.dropout(Fuse.apply(x, self.backward_fault), 0.2)


@pytest.mark.large(few=3)
@pytest.mark.parametrize("loss", [F.cross_entropy, coupled], ids=["one pass", "two passes"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("when", [at(3), at(4), at(7), at(9), above(5), above(2)])
def test_a_micro_batch_that_is_done_again_in_halves_draws_its_rows(
    when: Any, where: str, loss: Any
) -> None:
    x, y = data()
    model = Noisy(Weak())
    want = by_torch(model, loss, x, y)
    setattr(model.noise, f"{where}_fault", Fault(when))
    mechanism = "streaming" if loss is F.cross_entropy else "two-pass"
    assert_same(in_parts(model, loss, x, y, WIDE, mechanism), want)
    model = Normed(Weak())
    want = by_torch(model, loss, x, y)
    setattr(model.noise, f"{where}_fault", Fault(when))
    assert_same(in_parts(model, loss, x, y, WIDE, "lockstep"), want)


class Samples(Dataset[Any]):
    """Pairs, drawn upon as they are loaded or not."""

    def __init__(self, x: Tensor, y: Tensor, *, draws: bool) -> None:
        self.x, self.y, self.draws = x, y, draws

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i] + (torch.rand(()) if self.draws else 0), self.y[i]


def test_a_lazy_batch_draws_as_the_full_batch() -> None:
    x, y = data()
    model = Noisy(nn.Dropout(0.3))
    for loss in (F.cross_entropy, coupled):
        full, parts = copy.deepcopy(model), copy.deepcopy(model)
        found = []
        for copied, size in ((full, N), (parts, 5)):
            seeded()
            engine = Engine(copied, loss, micro_batch=size, rng="batch")
            value = engine.backward(LazyBatch(TensorDataset(x, y)))
            grads = {f"{n}.grad": p.grad for n, p in copied.named_parameters()}
            found.append(({"loss": value, **grads}, [RNGState.now()]))
        assert_same(found[1], found[0])


def test_a_lazy_batch_whose_samples_draw_is_refused() -> None:
    model = Noisy(nn.Dropout(0.3))
    batch = LazyBatch(Samples(*data(), draws=True))
    with pytest.raises(NotExactError, match="loaded without the global random generators"):
        Engine(model, F.cross_entropy, micro_batch=5, rng="batch").backward(batch)
    Engine(model, F.cross_entropy, micro_batch=5).backward(batch)


def test_only_what_draws_is_looked_at() -> None:
    calls: list[int] = []

    def count(x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor):
            calls.append(len(x))
        return x

    model, (x, y) = Noisy(Fn(count)), data()
    Engine(model, F.cross_entropy, micro_batch=11, rng="batch").backward(x, y)
    assert calls == [11, 11]  # a look leaves nothing in a list


# -------------------------------------------------------------------------------- memory


@pytest.mark.large(few=1)
@pytest.mark.parametrize("row", ["dropout of sequences", "heads", "native dropout", "checkpoint"])
@pytest.mark.parametrize("variant", [Noisy, Normed])
def test_a_draw_of_the_whole_batch_is_in_the_plan(row: str, variant: Any) -> None:
    make, _ = NOISE[row]
    model, y = variant(make()), torch.randint(3, (32,))
    x = torch.randn(32, 16, WIDE)
    plan = anybatch.plan(model, F.cross_entropy, (x, y), memory="1GiB", timed=False, rng="batch")
    assert plan.memory is not None
    for share in (0.05, 0.9):
        floor, full = plan.memory.floor, plan.memory.undivided
        budget = int(floor + share * (full - floor)) + 64
        copied = copy.deepcopy(model)
        engine = Engine(copied, F.cross_entropy, memory=budget, rng="batch")
        assert engine._planner is not None
        engine._planner.timed = False
        owners = {"parameters": copied.parameters(), "buffers": copied.buffers()}
        for _ in range(2):
            with metered(owners) as meter:
                engine.backward(x, y)
            copied.zero_grad()
            assert meter.peak <= budget, (share, meter.peak, budget)
