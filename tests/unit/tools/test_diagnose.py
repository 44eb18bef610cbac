from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch.tools import diagnose

SHARED: Any = None


def mlp(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), *layers, nn.Linear(6, 3))


class Centre(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_the_first_meeting_is_the_module_and_not_what_follows() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Sequential(nn.ReLU(), Centre()), nn.Linear(6, 3))
    x = torch.randn(10, 5)
    assert diagnose.first_meeting(model, diagnose.TensorBatch.of(x, None)) == "1.1"
    assert diagnose.first_meeting(mlp(), diagnose.TensorBatch.of(x, None)) is None


def inner() -> Tensor:
    return SHARED[0].weight.sum()


def outer(out: Tensor, y: Any) -> Tensor:
    return inner() + out.sum() + (outer(out, y) if y else 0.0)


def test_a_copied_loss_reads_the_copied_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp(nn.Tanh())
    weights = [model[0].weight]

    def penalty(out: Tensor, y: Tensor, *, factor: float = 0.5) -> Tensor:
        return F.cross_entropy(out, y) + factor * weights[0].square().sum() + model[2].bias.sum()

    monkeypatch.setitem(globals(), "SHARED", model)
    _, fn = diagnose.copied(model, outer)
    fn(torch.zeros(1), None).backward()
    assert model[0].weight.grad is None
    copied, fn = diagnose.copied(model, penalty)
    out, y = copied(torch.randn(10, 5)), torch.randint(0, 3, (10,))
    fn(out, y).backward()
    assert copied[0].weight.grad is not None
    assert float(copied[2].bias.grad.sum()) == pytest.approx(3.0, abs=1e-5)
    assert model[0].weight.grad is None


def test_cloned_arrays_are_other_ones() -> None:
    inputs = torch.arange(4.0), np.arange(4)
    own = diagnose.cloned(inputs)
    own[1][0] = 9
    assert inputs[1][0] == 0
