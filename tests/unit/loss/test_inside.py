"""A loss inside a model: what it divides by, weights that samples make, and rows by number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_of, undivided
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine
from anybatch.errors import LossError, NotExactError

N, CLASSES = 14, 3
SIZES = (1, 4, 5, 7)

LossFunction = Callable[[Tensor, Tensor], Tensor]


class Inside(nn.Module):
    """A model that returns its loss; `weights` are of no batch."""

    weights: Tensor

    def __init__(self, loss: Callable[[Any, Tensor, Tensor], Tensor], *, norm: bool) -> None:
        super().__init__()
        norms = [nn.BatchNorm1d(8)] if norm else []
        self.inner = nn.Sequential(nn.Linear(5, 8), *norms, nn.Tanh(), nn.Linear(8, CLASSES))
        self.register_buffer("weights", torch.tensor([0.3, 1.0, 2.0]))
        self._loss = loss
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self._loss(self, self.inner(x), y)


def batch(count: int = N) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(count, 5).double(), torch.arange(count) % CLASSES


def hot(y: Tensor) -> Tensor:
    return F.one_hot(y, CLASSES).double()


def total(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o, y, reduction="sum")


HONEST: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "a sum / len(y)": lambda _, o, y: total(o, y) / len(y),
    "a sum / shape": lambda _, o, y: total(o, y) / o.shape[0],
    "a part of it": lambda _, o, y: 0.3 * total(o, y) / (2 * len(y)),
    "squares": lambda _, o, y: F.mse_loss(o, hot(y), reduction="sum") / len(o),
    "beside a mean": lambda _, o, y: F.mse_loss(o, hot(y)) + total(o, y) / len(y),
    "beside a sum": lambda _, o, y: F.mse_loss(o, hot(y), reduction="sum") + total(o, y) / len(y),
    "numbered rows": lambda _, o, y: F.cross_entropy(o[:, None][torch.arange(len(o)), -1], y),
    "weights of a buffer": lambda m, o, y: F.cross_entropy(o, y, weight=m.weights),
    "weights that are made": lambda _, o, y: F.cross_entropy(
        o, y, weight=torch.tensor([0.3, 1.0, 2.0], dtype=o.dtype)
    ),
    "weights that are computed": lambda m, o, y: F.cross_entropy(
        o, y, weight=1 / (1 + m.weights.square())
    ),
}


@pytest.mark.product
@pytest.mark.parametrize("norm", [False, True], ids=["apart", "lanes"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", HONEST)
def test_what_is_honest_is_exact_and_shown(name: str, size: int, norm: bool) -> None:
    if norm and size == 1 and name != "a sum / len(y)":
        pytest.skip("lanes of one sample are slow, and one of them is enough")
    model = Inside(HONEST[name], norm=norm)
    engine = Engine(model, micro_batch=size)
    for count in (N, N, 9):
        inputs = batch(count)
        model.zero_grad()
        want = undivided(model, lambda out: out, inputs, None)
        assert_exact(state_of(model, engine.backward(inputs)), want)
        assert engine.plan is not None
        assert engine.plan.exact, engine.plan.exact


OTHERWISE: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "one more": lambda _, o, y: total(o, y) / (len(y) + 1),
    "its square": lambda _, o, y: total(o, y) / len(y) ** 2,
    "its root": lambda _, o, y: total(o, y) / len(y) ** 0.5,
    "times": lambda _, o, y: total(o, y) * len(y),
    "a mean times": lambda _, o, y: F.cross_entropy(o, y) * len(y),
}


@pytest.mark.product
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", OTHERWISE)
def test_a_weight_of_another_number_of_samples_is_named(name: str, size: int) -> None:
    engine = Engine(Inside(OTHERWISE[name], norm=False), micro_batch=size)
    with pytest.raises(LossError, match=r"weight of a loss .* cross_entropy is .* for . samples"):
        engine.backward(batch())


AT_A_SIZE: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "the smaller": lambda _, o, y: total(o, y) / min(len(y), 8),
    "the larger": lambda _, o, y: total(o, y) / max(len(y), 10),
    "a branch": lambda _, o, y: total(o, y) / (len(y) if len(y) < 9 else 3),
}


@pytest.mark.product
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", AT_A_SIZE)
def test_a_sum_that_the_full_batch_divides_otherwise_is_not_shown(name: str, size: int) -> None:
    engine = Engine(Inside(AT_A_SIZE[name], norm=False), micro_batch=size)
    try:
        engine.backward(batch())
    except (LossError, NotExactError):
        return
    assert engine.plan is not None
    assert not engine.plan.exact


class Switches(nn.Module):
    """Divides its sum by the samples, or does not."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.mean = nn.Linear(5, CLASSES).double(), False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return total(self.last(x), y) / (len(y) if self.mean else 1)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("size", [4, 5, 7])
def test_a_sum_that_is_divided_later_or_no_longer(size: int, first: bool) -> None:
    model = Switches()
    engine = Engine(model, micro_batch=size)
    for mean in (first, first, not first, first, not first):
        model.mean = mean
        model.zero_grad()
        want = undivided(model, lambda out: out, batch(), None)
        assert_exact(state_of(model, engine.backward(batch())), want)


def test_of_single_samples_a_sum_that_is_divided_in_some_steps_is_not_shown() -> None:
    model = Switches()
    engine = Engine(model, micro_batch=1)
    for mean in (False, True, False):
        model.mean = mean
        engine.backward(batch())
    assert engine.plan is not None
    assert "for one it does not show" in str(engine.plan.exact)


MADE: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "one_hot": lambda _, o, y: F.cross_entropy(o, y, weight=1 / (1 + hot(y).sum(0))),
    "bincount": lambda _, o, y: F.cross_entropy(
        o, y, weight=1.0 / (1 + y.bincount(minlength=CLASSES).double())
    ),
    "pos_weight": lambda _, o, y: F.binary_cross_entropy_with_logits(
        o, hot(y), pos_weight=(1 - hot(y)).sum(0) / (hot(y).sum(0) + 1)
    ),
    "of outputs": lambda _, o, y: F.cross_entropy(o, y, weight=o.detach().softmax(1).mean(0)),
    "of the inputs' labels in a sum": lambda _, o, y: F.cross_entropy(
        o, y, weight=1 / (1 + hot(y).sum(0)), reduction="sum"
    ),
}


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("norm", [False, True], ids=["apart", "lanes"])
@pytest.mark.parametrize("size", [3, 6])
@pytest.mark.parametrize("name", MADE)
def test_weights_that_samples_make_are_refused(name: str, size: int, norm: bool) -> None:
    """Micro-batches of the same classes give the same weights, and the full batch others."""
    engine = Engine(Inside(MADE[name], norm=norm), micro_batch=size)
    with pytest.raises(NotExactError, match="class weights.* from the samples"):
        engine.backward(batch(12))


def test_what_differs_between_micro_batches_is_named() -> None:
    def varies(_: Any, o: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(o, y, label_smoothing=0.1 if float(o.sum()) > 0 else 0.2)

    engine = Engine(Inside(varies, norm=False), micro_batch=2)
    with pytest.raises(LossError, match="cross_entropy is called with other options in another"):
        engine.backward(batch())
