"""Models and losses that differentiate, normalise inside vmap or write to a weight in forward.

Each is exact, or refused in one sentence that leaves no trace (Law 5).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, same, snapshot, state_after, state_of, undivided
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Engine
from anybatch.errors import AnybatchError, LossError, NotExactError

N = 11
BUDGETS: list[dict[str, Any]] = [{"micro_batch": n} for n in (1, 4, N)] + [{"memory": "1MiB"}]


class Slope(nn.Module):
    """A network and its derivative by the input, as a PINN or forces have it."""

    def __init__(self, *, enabled: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        self.enabled = enabled

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad() if self.enabled else nullcontext():
            x = x.detach().requires_grad_()
            found: Tensor = self.layers(x)
            (slope,) = torch.autograd.grad(found.sum(), x, create_graph=True)
        return torch.cat([found, slope], 1)


class ReturnsInput(nn.Module):
    """Returns its input, by which the loss differentiates."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        return self.layers(x), x


class Many(nn.Module):
    """Normalises the batch for each of several weights at once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        def one(weight: Tensor) -> Tensor:
            return F.batch_norm(x @ weight, None, None, training=True)

        found: Tensor = torch.vmap(one)(self.weight)
        return found.mean(0)


def bare() -> nn.Module:
    return Slope(enabled=False)


def rows() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(N, 2).double()


def coupled(out: Tensor) -> Tensor:
    return out.square().mean().sqrt()


def recognised(out: Tensor) -> Tensor:
    return F.mse_loss(out, torch.zeros_like(out))


def by_input(out: tuple[Tensor, Tensor]) -> Tensor:
    return torch.autograd.grad(out[0].sum(), out[1], create_graph=True)[0].square()


def mean_by_input(out: tuple[Tensor, Tensor]) -> Tensor:
    return by_input(out).mean()


def of(variant: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return variant().double()


def check(model: nn.Module, loss: Any, written: Any, budget: dict[str, Any]) -> None:
    def divided(copied: nn.Module) -> Tensor:
        return Engine(copied, loss, **budget).backward(rows())

    assert_exact(state_after(model, divided), undivided(model, written, rows(), None))


@pytest.mark.product
@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("loss", [coupled, recognised])
def test_a_model_may_differentiate(loss: Any, budget: dict[str, Any]) -> None:
    check(of(lambda: Slope(enabled=True)), loss, loss, budget)


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_a_loss_of_samples_may_differentiate_outputs(budget: dict[str, Any]) -> None:
    loss = anybatch.Loss.per_sample(lambda out, _=None: by_input(out).mean(1))
    check(of(ReturnsInput), loss, mean_by_input, budget)


@pytest.mark.parametrize(
    ("variant", "loss"),
    [(bare, coupled), (ReturnsInput, mean_by_input), (Many, coupled)],
)
def test_undivided_any_of_them_is_what_torch_does(variant: Any, loss: Any) -> None:
    check(of(variant), loss, loss, {"micro_batch": N})


REFUSED: list[tuple[Any, Any, type[AnybatchError], str]] = [
    (bare, coupled, NotExactError, r"write `with torch.enable_grad\(\):`"),
    (
        ReturnsInput,
        mean_by_input,
        LossError,
        r"must not differentiate what the model returns.*per_sample",
    ),
    (Many, coupled, NotExactError, r"outside torch.func.vmap.*loop instead of vmap"),
]


@pytest.mark.parametrize(("variant", "loss", "error", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_divided_is_said_in_one_sentence(
    variant: Any, loss: Any, error: type[AnybatchError], words: str
) -> None:
    """They were torch's own errors, an internal assertion among them."""
    x, model = rows(), of(variant)
    before = snapshot(model)
    with pytest.raises(error, match=words):
        Engine(model, loss, micro_batch=4).backward(x)
    assert same(before, snapshot(model))


def test_a_declared_loss_that_differentiates_by_targets_is_advised_what_to_return() -> None:
    """It was torch's own error: rows of the inputs and of the targets are two tensors."""
    x, model = rows().requires_grad_(), nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

    def of_points(out: Tensor, points: Tensor) -> Tensor:
        slope = torch.autograd.grad(out.sum(), points, create_graph=True)[0]
        return slope.square().mean(1)

    with pytest.raises(LossError, match=r"let forward return these inputs, too"):
        Engine(model.double(), anybatch.Loss.per_sample(of_points), micro_batch=4).backward(x, x)


@pytest.mark.parametrize(("variant", "loss", "error", "words"), REFUSED, ids=range(len(REFUSED)))
def test_a_check_says_the_same(
    variant: Any, loss: Any, error: type[AnybatchError], words: str
) -> None:
    """It ended in an error of torch's, where its own explanation ran forward without gradients."""
    report = anybatch.check(of(variant), loss, (rows(), None))
    assert not report.exact
    assert re.search(words, str(report))


def embedded() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Embedding(9, 4, max_norm=1.0), nn.Flatten(), nn.Linear(12, 3)
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("budget", [{"micro_batch": N}, {"memory": "1MiB"}], ids=str)
def test_an_embedding_that_normalises_itself_is_that_of_torch_undivided(
    budget: dict[str, Any],
) -> None:
    """It was refused after it had been written to, as if by a hook."""
    x, y = torch.randint(0, 9, (N, 3)), torch.randint(0, 3, (N,))
    found, want = embedded(), embedded()
    for _ in range(2):
        F.cross_entropy(want(x), y).backward()  # type: ignore[no-untyped-call]
        Engine(found, F.cross_entropy, **budget).backward(x, y)
    assert_exact(
        {name: p.grad for name, p in found.named_parameters()},
        {name: p.grad for name, p in want.named_parameters()},
    )
    assert torch.equal(found[0].weight, want[0].weight)


@pytest.mark.parametrize("budget", [{"micro_batch": 4}, {"memory": "12KiB"}], ids=str)
def test_divided_it_is_refused_before_it_is_written_to(budget: dict[str, Any]) -> None:
    model = embedded()
    x, y = torch.randint(0, 9, (200, 3)), torch.randint(0, 3, (200,))
    before = snapshot(model)
    with pytest.raises(
        NotExactError, match=r"forward writes to 0.weight \(max_norm=1.0\): .*torch.renorm"
    ):
        Engine(model, F.cross_entropy, **budget).backward(x, y)
    assert same(before, snapshot(model))


class Cache:
    """Keys of earlier tokens, in an object, as transformers' models return them."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


class Cached(Slope):
    """Returns its loss, and the cache beside it."""

    def __init__(self) -> None:
        super().__init__(enabled=True)
        self.key = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Any:
        keys = self.key(x)
        return {"loss": super().forward(keys).square().mean(), "cache": Cache(keys.tanh())}


def test_a_cache_of_keys_among_the_outputs_holds_no_samples() -> None:
    """Its graph did, of a model that also differentiates: it was never shown to be exact."""
    torch.manual_seed(0)
    model = Cached().double()
    engine = Engine(model, micro_batch=4)
    for _ in range(2):
        x = torch.randn(N, 2, dtype=torch.float64)
        model.zero_grad()
        want = undivided(model, lambda out: out["loss"], x, None)
        assert_exact(state_of(model, engine.backward(x)), want)
    assert engine.plan is not None
    assert str(engine.plan.exact).startswith("shown")


Derived = Callable[[Tensor, list[Tensor]], Tensor]
"""A value of a loss, and what it differentiates by -> a term of the loss."""


def norm(value: Tensor, by: list[Tensor], **options: Any) -> Tensor:
    found = torch.autograd.grad(value, by, create_graph=True, **options)
    return sum((g.square().sum() for g in found if g is not None), torch.zeros(()))


def unused(value: Tensor, by: list[Tensor]) -> Tensor:
    return norm(value, by, allow_unused=True)


def zeros(value: Tensor, by: list[Tensor]) -> Tensor:
    return norm(value, by, materialize_grads=True)


def decayed(value: Tensor, by: list[Tensor]) -> Tensor:
    """Some of the derivative is there: each parameter is a part of the value."""
    return norm(value + sum(p.square().sum() for p in by), by)


def caught(value: Tensor, by: list[Tensor]) -> Tensor:
    try:
        return norm(value, by)
    except Exception:
        return torch.zeros(())


def of_edges(value: Tensor, by: list[Tensor]) -> Tensor:
    edges = [torch.autograd.graph.get_gradient_edge(p) for p in by]
    return norm(value, edges, allow_unused=True)  # type: ignore[arg-type]


def backward(value: Tensor, _: list[Tensor]) -> Tensor:
    value.backward(retain_graph=True)
    return torch.zeros(())


def backward_of(value: Tensor, by: list[Tensor]) -> Tensor:
    torch.autograd.backward([value], inputs=by, retain_graph=True)
    return torch.zeros(())


DERIVED: list[Derived] = [unused, zeros, decayed, caught, of_edges, backward, backward_of]


def normed(*, lanes: bool) -> nn.Module:
    torch.manual_seed(1)
    norm_of = nn.BatchNorm1d(4) if lanes else nn.Identity()
    return nn.Sequential(nn.Linear(2, 4), norm_of, nn.Tanh(), nn.Linear(4, 1)).double()


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("derived", DERIVED)
def test_a_loss_that_differentiates_by_parameters_is_refused(
    derived: Derived, lanes: bool, declared: bool
) -> None:
    """torch gave None or a part, without an error: the gradient was wrong and called exact."""
    x, model = rows(), normed(lanes=lanes)

    def loss(out: Tensor, _: Any = None) -> Tensor:
        each = out.square().mean(1)
        return each + derived(each.sum(), list(model.parameters()))

    own = anybatch.Loss.per_sample(loss) if declared else lambda out: loss(out).mean()
    before = snapshot(model)
    with pytest.raises(LossError, match="must not differentiate by parameters"):
        Engine(model, own, micro_batch=4).backward(x)
    assert same(before, snapshot(model))


@pytest.mark.parametrize("lanes", [False, True])
def test_a_loss_that_differentiates_by_inputs_is_refused(lanes: bool) -> None:
    x, model = rows().requires_grad_(), normed(lanes=lanes)
    with pytest.raises(LossError, match="must not differentiate by parameters of the model or by"):
        Engine(model, lambda out: out.mean() + unused(out.sum(), [x]), micro_batch=4).backward(x)


@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_a_loss_may_differentiate_by_outputs_and_what_it_makes(
    budget: dict[str, Any], lanes: bool
) -> None:
    model, points = normed(lanes=lanes), torch.ones(3, 2).double()

    def loss(out: Tensor, own: nn.Module) -> Tensor:
        scale = torch.ones((), requires_grad=True, dtype=out.dtype)
        value = (out * scale).square().mean().sqrt()
        return (
            value + norm(value, [scale, out]) + norm(own[0](points).square().sum(), [own[0].weight])
        )

    def divided(copied: nn.Module) -> Tensor:
        return Engine(copied, lambda out: loss(out, copied), **budget).backward(rows())

    def full(copied: nn.Module) -> Tensor:
        found = loss(copied(rows()), copied)
        found.backward()
        return found

    assert_exact(state_after(model, divided), state_after(model, full))


def runs_backward(own: nn.Sequential, h: Tensor) -> None:
    h.square().sum().backward(retain_graph=True)


def runs_backward_of_one(own: nn.Sequential, h: Tensor) -> None:
    torch.autograd.backward([h.square().sum()], inputs=[own[0].weight])


def adds_to_grad(own: nn.Sequential, h: Tensor) -> None:
    (found,) = torch.autograd.grad(h.sum(), own[0].weight, retain_graph=True)
    before = own[0].weight.grad
    own[0].weight.grad = found if before is None else before + found


def clears_grad(own: nn.Sequential, h: Tensor) -> None:
    if own[0].weight.grad is not None:
        own[0].weight.grad.zero_()


class Local(nn.Module):
    """Trains its first layer by a loss of its own, inside forward."""

    def __init__(self, own: nn.Module, train: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.layers, self.train_first = own, train

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layers[0](x)
        if h.requires_grad:
            self.train_first(self.layers, h)
        return self.layers[1:](h.detach())


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("train", [runs_backward, runs_backward_of_one, adds_to_grad])
def test_a_forward_that_changes_gradients_is_refused(train: Any, lanes: bool, there: bool) -> None:
    """Inspections had added to the sums, too, and the gradient was called exact."""
    model, x = Local(normed(lanes=lanes), train), rows()
    for parameter in model.parameters() if there else ():
        parameter.grad = torch.ones_like(parameter)
    before = snapshot(model)
    with pytest.raises(NotExactError, match=r"micro-batches run, and forward changes \.grad"):
        Engine(model, coupled, micro_batch=4).backward(x)
    assert same(before, snapshot(model))


def test_a_function_of_the_model_that_reads_gradients_is_no_proof() -> None:
    """Only methods of modules were read."""
    engine = Engine(Local(normed(lanes=False), clears_grad), coupled, micro_batch=4)
    engine.backward(rows())
    assert engine.plan is not None
    assert str(engine.plan.exact).startswith("not shown: code of the model reads .grad")


def scale(own: nn.Sequential, h: Tensor) -> None:
    """It has the name of an attribute that forward reads."""
    clears_grad(own, h)


class Attribute:
    scale = 1.0


def calls_nothing(own: nn.Sequential, h: Tensor) -> None:
    pass


def calls_scale(own: nn.Sequential, h: Tensor) -> None:
    scale(own, h)


class Scaled(Local):
    """Reads the attribute in forward, which is followed before what it calls."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * Attribute.scale)


@pytest.mark.parametrize(("train", "shown"), [(calls_nothing, True), (calls_scale, False)])
def test_an_attribute_with_the_name_of_a_function_does_not_call_it(train: Any, shown: bool) -> None:
    engine = Engine(Scaled(normed(lanes=False), train), coupled, micro_batch=4)
    engine.backward(rows())
    assert engine.plan is not None
    assert bool(engine.plan.exact) is shown


def penalised(out: Tensor) -> Tensor:
    value = out.square().mean().sqrt()
    return value + norm(value, [out])


def penalised_if_it_trains(out: Tensor) -> Tensor:
    value = out.square().mean().sqrt()
    return value + norm(value, [out]) if out.requires_grad else value


class Penalised(nn.Module):
    def __init__(self, own: nn.Module, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.loss = own, loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.layers(x))


@pytest.mark.parametrize("lanes", [False, True])
def test_a_coupled_function_that_differentiates_is_exact_or_refused(lanes: bool) -> None:
    """It was torch's own error, from an inspection without gradients."""
    model = Penalised(normed(lanes=lanes), anybatch.coupled(penalised))
    with pytest.raises(NotExactError, match=r"write `with torch.enable_grad\(\):`"):
        Engine(model, micro_batch=4).backward(rows())
    model.loss = anybatch.coupled(penalised_if_it_trains)
    want = state_after(model, lambda copied: backed(copied(rows())))
    assert_exact(state_after(model, lambda one: Engine(one, micro_batch=4).backward(rows())), want)


def backed(loss: Tensor) -> Tensor:
    loss.backward()
    return loss
