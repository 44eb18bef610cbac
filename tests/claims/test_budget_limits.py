"""Ways to go over a budget that are known and not mended: each fails until it is mended.

They are told in docs/decisions.md. Everywhere the first batch is small, its plan is kept, and a
later one holds more without looking any different to the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from anybatch import Engine, LazyBatch
from anybatch.meter import Meter

CPU = torch.device("cpu")
WIDE = 64


class Grows(nn.Module):
    """Holds as much as a number that comes with the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, times: Any) -> Tensor:
        """[n, L], a number or [n] -> [n, 3]."""
        long = int(times.max()) if isinstance(times, Tensor) else times
        return self.last(self.first(x[:, :long, None]).tanh().mean(1))


class Lengths(nn.Module):
    """Holds as much as its rows are long."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[n, L] -> [n, 3]."""
        return self.last(self.first(x[..., None]).tanh().mean(1))


def by_number(n: int, long: int) -> tuple[Any, Any]:
    return {"x": torch.randn(n, WIDE), "times": long}, torch.randint(3, (n,))


def by_value(n: int, long: int) -> tuple[Any, Any]:
    times = torch.full((n,), long)
    return {"x": torch.randn(n, WIDE), "times": times}, torch.randint(3, (n,))


def lazy(n: int, long: int) -> tuple[Any, Any]:
    return LazyBatch(TensorDataset(torch.randn(n, long), torch.randint(3, (n,)))), None


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="not in the kind of a batch")
@pytest.mark.parametrize(
    ("make", "model"), [(by_number, Grows), (by_value, Grows), (lazy, Lengths)]
)
def test_a_later_batch_that_holds_more_keeps_to_the_budget(
    make: Callable[[int, int], tuple[Any, Any]], model: Callable[[], nn.Module]
) -> None:
    budget, trained = 40_000, model()
    engine = Engine(trained, F.cross_entropy, memory=budget)
    engine.backward(*make(32, 4))
    trained.zero_grad()
    with Meter(CPU, {"parameters": trained.parameters()}) as meter:
        engine.backward(*make(32, WIDE))
    assert meter.peak <= budget
