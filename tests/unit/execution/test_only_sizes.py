"""Models that take batches of one size alone: planned as they are, undivided, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_of, undivided
from torch import Tensor, nn

from anybatch import Engine
from anybatch.errors import BudgetError


class Stateful(nn.Module):
    """A hidden state that is made for so many sequences, a common pattern."""

    h0: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.r, self.o = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 1)
        self.register_buffer("h0", torch.zeros(1, size, 8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.o(self.r(x, self.h0)[0][:, -1])
        return out


class Viewed(Stateful):
    """The size of a batch stands in a view."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(self.h0.shape[1], -1, 4))


class Checked(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) != self.h0.shape[1]:
            raise ValueError("one size")
        return super().forward(x)


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("how", [{"micro_batch": 4}, {}, {"memory": "1MiB"}], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("variant", [Stateful, Viewed, Checked])
def test_a_batch_of_the_only_size_is_run_as_it_is(variant: Any, size: int, how: Any) -> None:
    torch.manual_seed(0)
    model = variant(size).double()
    x, y = torch.randn(size, 5, 4).double(), torch.randn(size, 1).double()
    want = undivided(model, nn.MSELoss(), x, y)
    engine = Engine(model, nn.MSELoss(), optimizer=torch.optim.SGD(model.parameters()), **how)
    for _ in range(2):
        model.zero_grad()
        loss = engine.backward(x, y)
        assert_exact(state_of(model, loss), want)
    assert engine.last is not None
    assert engine.last.micro_batches == 1
    if engine.last.predicted_bytes is not None and engine.last.peak_bytes is not None:
        assert engine.last.peak_bytes <= engine.last.predicted_bytes


@pytest.mark.parametrize("size", [1, 3])
def test_it_is_refused_where_it_does_not_fit(size: int) -> None:
    model = Stateful(size)
    engine = Engine(model, nn.MSELoss(), memory="3KiB")
    with pytest.raises(BudgetError):
        engine.backward(torch.randn(size, 5, 4), torch.randn(size, 1))
    assert all(p.grad is None for p in model.parameters())


def test_another_size_ends_in_the_models_own_error() -> None:
    model = Stateful(3)
    with pytest.raises(RuntimeError, match="Expected hidden size"):
        Engine(model, nn.MSELoss(), memory="1MiB").backward(torch.randn(4, 5, 4), torch.randn(4, 1))
