"""A loss that is computed in place has the gradient of the full batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.oracle import assert_exact, state_of, undivided
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine

N = 11


def added(out: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(out, y)
    loss += 3 * F.mse_loss(out, torch.zeros_like(out))
    return loss


def added_to_zero(out: Tensor, y: Tensor) -> Tensor:
    loss = torch.zeros((), dtype=out.dtype)
    loss += F.cross_entropy(out, y)
    loss += F.l1_loss(out, torch.zeros_like(out))
    return loss


def accumulated(out: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(out, y)
    for scale in (0.5, 2.0):
        loss += scale * F.cross_entropy(out * scale, y)
    return loss


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "multiplied": lambda out, y: F.cross_entropy(out, y).mul_(3.0),
    "divided by the samples": lambda out, y: F.cross_entropy(out, y, reduction="sum").div_(len(y)),
    "added": added,
    "added to zero": added_to_zero,
    "accumulated": accumulated,
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_writes_to_its_terms_is_exact(name: str) -> None:
    """Its gradient was up to four times that of the full batch, and called exact."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    inputs, targets = torch.randn(N, 4).double(), torch.randint(3, (N,))
    engine = Engine(model, LOSSES[name], micro_batch=4)
    for _ in range(2):
        model.zero_grad()
        want = undivided(model, LOSSES[name], inputs, targets)
        assert_exact(state_of(model, engine.backward(inputs, targets)), want)
