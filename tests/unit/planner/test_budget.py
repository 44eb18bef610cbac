"""The default budget: free bytes, and those that the step's own tensors hold already."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.planner import budget

FREE = 1 << 24


class Flat(nn.Module):
    """Weights that are views of one storage, as cuDNN takes those of a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(3, 4, 4, dtype=torch.float64)
        self.first, self.second, self.third = map(nn.Parameter, flat)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.first @ self.second @ self.third


def test_a_storage_that_weights_share_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "available_memory", lambda _device, _share: (FREE, "free"))
    batch = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    found = anybatch.plan(Flat(), F.mse_loss, batch, timed=False).memory
    assert found is not None
    assert found.budget == FREE + 3 * 4 * 4 * 8
