"""The loss that takes its last layer as an argument divides as cross-entropy does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.cases import own_loss
from tests.oracle import assert_exact, state_after
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Engine
from anybatch.errors import AnybatchError

pytestmark = pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="torch before 2.13 has no such loss"
)

N, C, WIDTH = 11, 4, 6
WEIGHT = torch.tensor([0.3, 2.0, 0.0, 1.1]).double()

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ignored": {"ignore_index": 1},
    "weighted": {"weight": WEIGHT, "ignore_index": 3},
    "smooth": {"label_smoothing": 0.2, "weight": WEIGHT},
    "sum": {"reduction": "sum", "ignore_index": 0},
    "chunks": {"options": {"batch_chunk_size": 2}, "ignore_index": 1},
    "chunks, weighted": {"options": {"batch_chunk_size": 3}, "weight": WEIGHT},
}


def options_of(name: str) -> dict[str, Any]:
    found = dict(OPTIONS[name])
    if "options" in found:
        found["options"] = nn.LinearCrossEntropyOptions(**found["options"])
    return found


class Both(nn.Module):
    """A net, and a head that the net does not call itself but where it `loses`."""

    def __init__(self, loss: nn.Module | None = None, *, tokens: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, C)
        self.loss, self.tokens = loss, tokens


def batch(*, tokens: bool) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    shape = (N, 3) if tokens else (N,)
    y = torch.randint(0, C, shape)
    y.view(-1)[:4] = 1  # a micro-batch in which all may be ignored
    return torch.randn(*shape, 5).double(), y


def flat(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return out.reshape(-1, out.shape[-1]), y.reshape(-1)


def functional(both: Both, options: dict[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        rows, labels = flat(out, y)
        head = both.head
        return F.linear_cross_entropy(rows, head.weight, labels, linear_bias=head.bias, **options)

    return loss


def module(both: Both, _options: dict[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    assert both.loss is not None
    return both.loss


def check(both: Both, loss_of: Any, options: Any, n: int | None, *, tokens: bool) -> None:
    x, y = batch(tokens=tokens)

    def undivided_loss(copied: Any) -> Tensor:
        loss: Tensor = loss_of(copied, options)(copied.net(x), y)
        loss.backward()
        return loss

    engines = []

    def divided(copied: Any) -> Tensor:
        budget: Any = {"memory": "64KiB"} if n is None else {"micro_batch": n}
        engines.append(Engine(copied.net, loss_of(copied, options), **budget))
        return engines[0].backward(x, y)

    assert_exact(state_after(both, divided), state_after(both, undivided_loss))
    plan = engines[0].plan
    assert plan is not None
    if n not in (None, N):
        assert plan.mechanism == "streaming"


@pytest.mark.product
@pytest.mark.parametrize("n", [1, 3, 4, N, None])
@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_loss_with_the_layer_of_the_model(name: str, tokens: bool, n: int | None) -> None:
    """It was taken for one in which samples meet."""
    torch.manual_seed(1)
    check(Both().double(), functional, options_of(name), n, tokens=tokens)


@pytest.mark.product
@pytest.mark.parametrize("n", [1, 4, N, None])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_module_whose_layer_is_its_own(name: str, bias: bool, n: int | None) -> None:
    torch.manual_seed(1)
    loss = nn.LinearCrossEntropyLoss(WIDTH, C, bias=bias, **options_of(name))
    check(Both(loss).double(), module, None, n, tokens=False)


class Model(nn.Module):
    """A language model that returns its loss."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.both, self.options = Both(tokens=True), options

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional(self.both, self.options)(self.both.net(x), labels)


@pytest.mark.product
@pytest.mark.parametrize("n", [1, 4, N, None])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_model_that_calls_it(name: str, n: int | None) -> None:
    torch.manual_seed(1)
    x, y = batch(tokens=True)

    def divided(copied: nn.Module) -> Tensor:
        budget: Any = {"memory": "64KiB"} if n is None else {"micro_batch": n}
        return Engine(*own_loss(copied), **budget).backward({"x": x, "labels": y})

    def undivided_loss(copied: nn.Module) -> Tensor:
        loss: Tensor = copied(x, y)
        loss.backward()
        return loss

    model = Model(options_of(name)).double()
    assert_exact(state_after(model, divided), state_after(model, undivided_loss))


def test_a_model_whose_layer_is_its_other_samples_is_refused() -> None:
    """A head made of activations, by detach() too, may be the batch."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(5, C)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            z: Tensor = self.f(x)
            return F.linear_cross_entropy(z, z.detach(), labels)

    torch.manual_seed(1)
    x, labels = torch.randn(N, 5).double(), torch.arange(N)
    with pytest.raises(AnybatchError):
        Engine(*own_loss(Two().double()), micro_batch=4).backward({"x": x, "labels": labels})


def test_where_the_layer_is_the_other_samples_they_meet() -> None:
    """InfoNCE is written so."""
    torch.manual_seed(1)
    x, _ = batch(tokens=False)

    def two(f: nn.Module, g: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        return f(x), g(x)

    model = anybatch.joint(two, nn.Linear(5, 4), nn.Linear(5, 4)).double()

    def loss(out: Any) -> Tensor:
        return F.linear_cross_entropy(out[0], out[1], torch.arange(len(out[0])))

    def undivided_loss(copied: nn.Module) -> Tensor:
        value = loss(copied(x))
        value.backward()
        return value

    want = state_after(model, undivided_loss)
    for n in (1, 4):
        engine_of = partial(Engine, loss_fn=loss, micro_batch=n)
        assert_exact(state_after(model, lambda copied, of=engine_of: of(copied).backward(x)), want)
