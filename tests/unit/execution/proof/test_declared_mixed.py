"""Outputs without rows in which samples have met: a loss may leave them out, and not train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_after, undivided
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine, Loss
from anybatch.errors import NotExactError

ExtraOutput = Callable[[Tensor, Tensor], Tensor]


class Aside(nn.Module):
    """Gives rows, and something without rows beside them."""

    def __init__(self, extra: ExtraOutput, *, norm: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.gate, self.extra = nn.Parameter(torch.zeros(8)), extra

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(self.first(x)).tanh()
        return self.last(h), self.extra(h, self.gate)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(11, 6, dtype=torch.float64), torch.randn(11, 3, dtype=torch.float64)


def coupled(o: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return (o[0] - y).square().sum().sqrt() + (o[1] - 1).square().sum()


def recognised(o: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return F.mse_loss(o[0], y) + F.mse_loss(o[1], torch.ones_like(o[1]))


def by_samples(o: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return (o[0] - y).square().mean(1) + (o[1] - 1).square().sum()


def without(o: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return (o[0] - y).square().sum().sqrt()


MIXED: dict[str, ExtraOutput] = {
    "a mean": lambda h, gate: gate * h.mean(0),
    "a number": lambda h, gate: (gate * h.mean(0)).sum(),
    "a first row": lambda h, gate: gate * h[0],
    "a product": lambda h, gate: gate.diag() @ h.mT @ h,
    "a straight-through mean": lambda h, gate: gate + h.mean(0) - h.mean(0).detach(),
}
LOSSES: dict[str, Any] = {
    "coupled": coupled,
    "known": recognised,
    "by samples": Loss.per_sample(by_samples),
}


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", MIXED)
def test_what_has_no_rows_and_is_of_samples_is_not_trained(
    name: str, loss: str, micro_batch: int
) -> None:
    net, (x, y) = Aside(MIXED[name]).double(), batch()
    with pytest.raises(NotExactError, match=r"the loss trains outputs\[1\]"):
        Engine(net, LOSSES[loss], micro_batch=micro_batch).backward(x, y)
    assert all(p.grad is None for p in net.parameters())


def test_lanes_do_not_train_it_either() -> None:
    net, (x, y) = Aside(MIXED["a mean"], norm=True).double(), batch()
    with pytest.raises(NotExactError, match=r"the loss trains outputs\[1\]"):
        Engine(net, coupled, micro_batch=4).backward(x, y)


def test_it_is_not_trained_in_a_later_step() -> None:
    net, (x, y) = Aside(MIXED["a mean"]).double(), batch()
    weight = {"of": 0.0}

    def loss(o: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        return without(o, y) + (coupled(o, y) if weight["of"] else 0)

    engine = Engine(net, loss, micro_batch=4)
    engine.backward(x, y)
    weight["of"] = 1.0
    with pytest.raises(NotExactError, match=r"the loss trains outputs\[1\]"):
        engine.backward(x, y)


HONEST: dict[str, tuple[ExtraOutput, Any]] = {
    "left out": (MIXED["a mean"], without),
    "left out of a known loss": (MIXED["a mean"], lambda o, y: F.mse_loss(o[0], y)),
    "parameters": (lambda _, gate: gate.exp(), coupled),
    "detached": (lambda h, gate: (gate * h.mean(0)).detach(), coupled),
}


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("name", HONEST)
def test_what_is_left_out_or_of_no_sample_is_shown(name: str, micro_batch: int) -> None:
    extra, loss = HONEST[name]
    net, (x, y) = Aside(extra).double(), batch()
    engines: list[Engine] = []

    def run(model: nn.Module) -> Tensor:
        engines.append(Engine(model, loss, micro_batch=micro_batch))
        return engines[0].backward(x, y)

    assert_exact(state_after(net, run), undivided(net, loss, x, y))
    assert engines[0].plan is not None
    assert engines[0].plan.exact, str(engines[0].plan.exact)
