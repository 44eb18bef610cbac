"""README: half-precision gradients are summed in float32, and AdamW steps on them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine

SIZE, COUNT = 5, 2048
N = SIZE * COUNT


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    """Labels of a teacher and inputs with a common mean: gradients that add up, as in training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).bfloat16()
    x = (torch.randn(N, 16) + 0.5).bfloat16()
    return model, x, (x.float() @ torch.randn(16, 4)).argmax(1)


def truth(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The gradient in float64 of the same bfloat16 weights and inputs."""
    exact = copy.deepcopy(model).double()
    F.cross_entropy(exact(x.double()), y).backward()
    return torch.cat([p.grad.flatten() for p in exact.parameters()])


def error(model: nn.Module, want: Tensor) -> float:
    got = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    return float((got - want).norm() / want.norm())


def naive(model: nn.Module, x: Tensor, y: Tensor) -> None:
    for i in range(0, N, SIZE):
        (F.cross_entropy(model(x[i : i + SIZE]), y[i : i + SIZE]) / COUNT).backward()


def exact_sum(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The same bfloat16 gradients of the micro-batches, added up in float64."""
    total: Tensor | float = 0.0
    for i in range(0, N, SIZE):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + SIZE]), y[i : i + SIZE], reduction="sum").backward()
        total = total + torch.cat([p.grad.double().flatten() for p in model.parameters()])
    model.zero_grad()
    assert isinstance(total, Tensor)
    return total / N


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch has no grad_dtype")
def test_2048_micro_batches_are_summed_to_5e_4_where_bfloat16_loses_percents() -> None:
    model, x, y = problem()
    want = truth(model, x, y)
    summed_in_half = copy.deepcopy(model)
    naive(summed_in_half, x, y)
    for p in model.parameters():
        p.grad_dtype = torch.float32
    Engine(model, F.cross_entropy, micro_batch=SIZE).backward(x, y)
    assert error(model, want) <= 5e-4
    assert error(model, exact_sum(copy.deepcopy(model), x, y)) <= 1e-6, "adding up loses nothing"
    assert error(summed_in_half, want) >= 1e-2
    before = [p.detach().clone() for p in model.parameters()]
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_by_default_the_sum_is_rounded_once_and_adamw_steps() -> None:
    model, x, y = problem()
    want = truth(model, x, y)
    Engine(model, F.cross_entropy, micro_batch=SIZE).backward(x, y)
    rounded = float((want.bfloat16().double() - want).norm() / want.norm())
    assert error(model, want) <= 1.2 * rounded
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
    before = [p.detach().clone() for p in model.parameters()]
    torch.optim.AdamW(model.parameters(), lr=0.01).step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
