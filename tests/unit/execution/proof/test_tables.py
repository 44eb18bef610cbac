"""Tables that helpers keep by size hold no tensors without data after a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, copy_of, state_of
from tests.unit.execution.proof import tables
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine
from anybatch.errors import NotExactError


class Net(nn.Module):
    """A net that multiplies by a table."""

    def __init__(self, table: Callable[[int, int], Tensor]) -> None:
        super().__init__()
        self.table = table
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """[n, T, 6] -> [n, 4]."""
        return self.last((self.first(x).tanh() * self.table(len(x), x.shape[1])).mean(1))


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    tables.forget()
    yield
    tables.forget()


@pytest.mark.product
@pytest.mark.parametrize("options", [{"micro_batch": 2}, {"micro_batch": 1}, {"memory": "8KiB"}])
@pytest.mark.parametrize("table", tables.WAYS, ids=lambda way: getattr(way, "__name__", "cached"))
def test_tables_of_helpers_hold_no_fakes(
    table: Callable[[int, int], Tensor], options: dict[str, Any]
) -> None:
    """The loss and all gradients were tensors without data."""
    torch.manual_seed(0)
    net = Net(table).double()
    full, x, y = copy_of(net), torch.randn(8, 7, 6).double(), torch.randint(4, (8,))
    engine = Engine(net, F.cross_entropy, **options)
    found = engine.backward(x, y)
    tables.forget()
    expected = F.cross_entropy(full(x), y)
    expected.backward()  # type: ignore[no-untyped-call]
    assert_exact(state_of(net, found), state_of(full, expected))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_outputs_without_data_are_refused() -> None:
    net = Net(tables.hidden).double()
    x, y = torch.randn(8, 7, 6).double(), torch.randint(4, (8,))
    with pytest.raises(NotExactError, match="stored one in a place that no name"):
        Engine(net, F.cross_entropy, micro_batch=2).backward(x, y)
    assert all(parameter.grad is None for parameter in net.parameters())
