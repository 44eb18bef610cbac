"""Tracing: terms and weights of a loss that is computed inside; all else is not known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from anybatch.loss.model_trace import TracingMode

X, Y = torch.randn(6, 3, requires_grad=True), torch.tensor([0, 1, -100, 2, -100, 1])
W, K = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([1.0, 0.0, 1.0, 2.0, 0.0, 1.0])
Fn = Callable[[], Tensor]

CE, MSE, L1 = "cross_entropy", "mse_loss", "l1_loss"
RECOGNISED: list[tuple[Fn, dict[str, float]]] = [
    (lambda: F.cross_entropy(X, Y), {CE: 1.0}),
    (lambda: torch.nn.CrossEntropyLoss(weight=W)(X, Y) * 2, {CE: 2.0}),
    (lambda: F.cross_entropy(X, Y, reduction="sum") / 4, {CE: 0.25}),
    (lambda: F.cross_entropy(X, Y) + 0.5 * F.mse_loss(X, X * 2), {CE: 1.0, MSE: 0.5}),
    (lambda: (F.cross_entropy(X, Y) + F.l1_loss(X, -X)) / 2, {CE: 0.5, L1: 0.5}),
    (lambda: F.cross_entropy(X, Y).to(torch.float64).mean(), {CE: 1.0}),
    (lambda: X.square().mean() * 3, {"mean of its own": 3.0}),
    (lambda: F.cross_entropy(X, Y) * W[1].exp() + W[0], {CE: 1.0, "a constant": 1.0}),
    (lambda: F.cross_entropy(X, Y) + X.sum() / 6, {CE: 1.0, "sum of its own": 1 / 6}),
    (lambda: 1 - X.mean(), {"mean of its own": -1.0, "a constant": 1.0}),
    (lambda: (X[:, 0] * K).sum() / K.sum(), {"weighted mean of its own": 1.0}),
    (lambda: 2 * (X[:, 0] * K).sum() / (K > 0).sum(), {"weighted mean of its own": 2.0}),
]
UNKNOWN: list[tuple[Fn, str]] = [
    (lambda: F.cross_entropy(X, Y).exp(), "exp"),
    (lambda: F.cross_entropy(X, Y) * F.mse_loss(X, -X), "mul"),
    (lambda: F.cross_entropy(X, Y) + X.square().amax(0)[:1], "add"),
    (lambda: X.square().mean() * X.square().sum(), "mul"),
    (lambda: X.square().amax(), ""),
]


@pytest.mark.parametrize(("fn", "weights"), RECOGNISED)
def test_a_weighted_sum_is_traced_and_has_its_value(fn: Fn, weights: dict[str, float]) -> None:
    tracing_mode = TracingMode({"x": X, "y": Y})
    with tracing_mode:
        loss = fn()
    found = tracing_mode.combination(loss)
    assert found is not None
    assert {term.name: weight for weight, term in found} == weights
    torch.testing.assert_close(loss, fn())
    full = sum(weight * term.numerator / term.count for weight, term in found)
    torch.testing.assert_close(torch.as_tensor(full).to(loss.dtype), loss)


@pytest.mark.parametrize(("fn", "odd"), UNKNOWN)
def test_anything_else_is_not_recognised_and_keeps_its_value(fn: Fn, odd: str) -> None:
    tracing_mode = TracingMode({"x": X, "y": Y})
    with tracing_mode:
        loss = fn()
    assert tracing_mode.combination(loss) is None
    assert tracing_mode.odd == ([odd] if odd else [])
    torch.testing.assert_close(loss, fn())


def test_a_sum_in_place_is_followed() -> None:
    tracing_mode = TracingMode({"x": X, "y": Y})
    with tracing_mode:
        loss = F.cross_entropy(X, Y)
        loss += F.mse_loss(X, -X) * 3
    found = tracing_mode.combination(loss)
    assert found is not None
    assert [(weight, term.name) for weight, term in found] == [(1.0, CE), (3.0, MSE)]


def test_a_weight_that_belongs_to_samples_is_not_a_recognised_loss() -> None:
    weight = torch.rand(6, 3)
    tracing_mode = TracingMode({"x": X, "w": weight})
    with tracing_mode:
        loss = F.binary_cross_entropy_with_logits(X, X.detach().sigmoid(), weight=weight)
    assert tracing_mode.combination(loss) is None
