"""A loss inside a model whose options or functions change from step to step, and one of a mask."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_of, undivided
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine, Loss
from anybatch.errors import LossError

N = 12
NOW = SimpleNamespace(step=0)


def ended(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o, y) if NOW.step < 2 else F.multi_margin_loss(o, y)


HONEST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "an option": lambda o, y: F.cross_entropy(o, y, label_smoothing=NOW.step / 50),
    "an option of one of two": lambda o, y: (
        F.cross_entropy(o, y) + F.huber_loss(o, torch.zeros_like(o), delta=1.0 + NOW.step)
    ),
    "a weight": lambda o, y: F.cross_entropy(o, y) * (1 + NOW.step),
    "another loss": ended,
}


class Inside(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], *, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        norms = [nn.BatchNorm1d(8)] if norm else []
        self.inner = nn.Sequential(nn.Linear(5, 8), *norms, nn.Tanh(), nn.Linear(8, 3)).double()
        self._loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self._loss(self.inner(x), y)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(N, 5).double(), torch.randint(3, (N,))


def step(engine: Engine, model: nn.Module, number: int, inputs: Any) -> None:
    NOW.step = number
    model.zero_grad()
    want = undivided(model, lambda out: out, inputs, None)
    assert_exact(state_of(model, engine.backward(inputs)), want)


@pytest.mark.product
@pytest.mark.parametrize("norm", [False, True], ids=["apart", "lanes"])
@pytest.mark.parametrize("name", HONEST)
def test_what_the_loss_is_called_with_may_change_from_step_to_step(name: str, norm: bool) -> None:
    """The second step was once refused: "the rows do not grow with the samples"."""
    model = Inside(HONEST[name], norm=norm)
    engine = Engine(model, micro_batch=5)
    for number in range(4):
        step(engine, model, number, batch())
        assert engine.plan.exact


def test_an_option_that_changes_in_every_step_is_no_longer_looked_at_and_not_shown() -> None:
    model = Inside(HONEST["an option"])
    engine = Engine(model, micro_batch=5)
    for number in range(20):
        step(engine, model, number, batch())
    assert "other options from step to step" in str(engine.plan.exact)
    NOW.step = 3  # one that was looked at
    engine.backward(batch())
    assert engine.plan.exact


SIZED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of the size": lambda o, y: F.cross_entropy(o, y, label_smoothing=NOW.step / len(o) / 50),
    "of few": lambda o, y: F.cross_entropy(
        o, y, label_smoothing=0.1 if NOW.step and len(o) < 4 else 0.0
    ),
}


@pytest.mark.parametrize("name", SIZED)
def test_an_option_of_a_later_step_that_depends_on_the_size_is_refused(name: str) -> None:
    model = Inside(SIZED[name])
    engine = Engine(model, micro_batch=5)
    step(engine, model, 0, batch())
    NOW.step = 1
    with pytest.raises(LossError):
        engine.backward(batch())


def masked(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o[y >= 0], y[y >= 0])


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [2, 5])
@pytest.mark.parametrize("seed", range(6))
def test_a_mask_is_named_and_the_advice_is_exact(seed: int, micro_batch: int) -> None:
    """By chance as many rows were left as samples, and the refusal spoke of rows that move."""
    torch.manual_seed(seed)
    inputs, targets = batch()
    targets = targets.masked_fill(torch.rand(N) < 0.4, -100)
    model = Inside(masked)
    with pytest.raises(LossError, match=r"some are selected before \(x\[mask\]\).* ignore_index"):
        Engine(model, micro_batch=micro_batch).backward((inputs, targets))
    want = undivided(model, lambda out: out, (inputs, targets), None)
    advised = Inside(F.cross_entropy)
    advised.load_state_dict(model.state_dict())
    engine = Engine(advised, micro_batch=micro_batch)
    assert_exact(state_of(advised, engine.backward((inputs, targets))), want)
    assert engine.plan.exact
    declared = Loss.inside(count=lambda arguments, _: (arguments[1] >= 0).sum())
    engine = Engine(model, declared, micro_batch=micro_batch)
    assert_exact(state_of(model, engine.backward((inputs, targets))), want)
