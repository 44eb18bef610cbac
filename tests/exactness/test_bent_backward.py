"""A backward that clamps or rounds what it gets: it must begin from the weights of the batch.

A factor at its end, for a denominator that is known late or for weights of half precision, would be
another function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, copy_of, state_of, undivided
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine, LazyBatch, Loss

N = 23

BENT: dict[str, Callable[[Tensor], Tensor]] = {
    "clamped": lambda gradient: gradient.clamp(-1e-2, 1e-2),
    "signs": Tensor.sign,
    "rounded": lambda gradient: (gradient * 1024).round() / 1024,
    "cast": lambda gradient: gradient.bfloat16().to(gradient.dtype),
    "of length one": lambda gradient: F.normalize(gradient, dim=-1),
}


class Bent(torch.autograd.Function):
    """The identity, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bend: Callable[[Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        ctx.bend = bend
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.bend(gradient), None


class Net(nn.Module):
    def __init__(self, name: str, *, hook: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.bend, self.hook = BENT[name], hook

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        if not self.hook:
            z = Bent.apply(z, self.bend)  # type: ignore[no-untyped-call]
        elif z.requires_grad:
            z.register_hook(self.bend)
        return self.second(z)  # type: ignore[no-any-return]


class Inside(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(x), y)


def weighted(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o, y, weight=torch.tensor([1.0, 2.0, 5.0], dtype=o.dtype))


def masked(o: Tensor, y: Tensor) -> Tensor:
    known = (y >= 0).to(o.dtype)
    return (o.logsumexp(-1) * known).sum() / known.sum()


LOSSES = {"mean": F.cross_entropy, "weighted": weighted, "masked": masked}


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(N, 4, dtype=torch.float64), torch.randint(3, (N,))
    y[:5] = -100  # the first micro-batch counts none, so its estimate is far off
    return x, y


@pytest.mark.parametrize("hook", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", BENT)
def test_it_has_the_gradient_of_the_batch_where_a_denominator_is_known_late(
    name: str, loss: str, *, hook: bool
) -> None:
    model, (x, y) = Net(name, hook=hook).double(), batch()
    engine = Engine(model, LOSSES[loss], micro_batch=4)
    for _ in range(2):
        want = undivided(copy_of(model), LOSSES[loss], x, y)
        assert_exact(state_of(model, engine.backward(LazyBatch([*zip(x, y, strict=True)]))), want)
        assert engine.plan is not None
        assert engine.plan.exact
        model.zero_grad()


def test_a_declared_loss_has_it_too() -> None:
    model, (x, y) = Net("clamped", hook=True).double(), batch()

    def total(o: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(o, y, reduction="sum")

    engine = Engine(model, Loss.ratio(total, lambda y: (y >= 0).sum()), micro_batch=4)
    want = undivided(copy_of(model), F.cross_entropy, x, y)
    assert_exact(state_of(model, engine.backward(LazyBatch([*zip(x, y, strict=True)]))), want)


def test_it_is_not_shown_for_a_loss_inside_the_model() -> None:
    model, (x, y) = Inside("clamped", hook=True).double(), batch()
    engine = Engine(model, micro_batch=4)
    engine.backward(LazyBatch([{"x": one, "y": label} for one, label in zip(x, y, strict=True)]))
    assert engine.plan is not None
    assert "begins from an estimated denominator" in engine.plan.exact.by


@pytest.mark.parametrize("hook", [True, False])
def test_it_begins_from_the_weights_of_the_batch_in_half_precision(*, hook: bool) -> None:
    """Of whole numbers and signs each sum is exact in bfloat16."""
    torch.manual_seed(1)
    model = Net("signs", hook=hook).bfloat16()
    model.second.requires_grad_(requires_grad=False)
    x, y = torch.randint(-3, 4, (N, 4)).bfloat16(), torch.randint(3, (N,))
    want = undivided(model, F.cross_entropy, x, y)
    got = state_of(model, Engine(model, F.cross_entropy, micro_batch=8).backward(x, y))
    for name in ("first.weight.grad", "first.bias.grad"):
        assert torch.equal(got[name], want[name])
