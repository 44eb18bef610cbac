"""A plain step under a budget is inspected as rarely as one without, and shows as much."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.faults import unwalked
from tests.peaks import held
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from anybatch import Engine, plan

CALLS = unwalked([0])


class Aliased(nn.Module):
    """Its ``reshape`` is a node of another name under a dispatch mode, as a meter is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        CALLS()[0] += 1
        parts = self.first(x).tanh().unflatten(1, (4, 3)).transpose(1, 2)
        return self.last(parts.reshape(parts.shape).flatten(1))


def forwards_of(
    model: nn.Module, steps: int, loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
) -> tuple[list[int], Engine]:
    """Return the calls of forward in each step under a budget for a part of the batch."""
    engine = Engine(model, loss, memory="16KiB", tune="off", rungs=())
    x, y = torch.randn(128, 8), torch.randint(3, (128,))
    counts = []
    for _ in range(steps):
        before = CALLS()[0]
        engine.backward(x, y)
        counts.append(CALLS()[0] - before)
    return counts, engine


def speech(out: Tensor, y: Tensor) -> Tensor:
    """Return a loss of four steps of time, which under a meter gets its lengths as tensors."""
    steps = out[:, None].expand(-1, 4, -1).log_softmax(-1).transpose(0, 1)
    lengths = torch.full((len(out),), 4), torch.full((len(out),), 1)
    return F.ctc_loss(steps, 1 + y[:, None] % 2, *lengths)


@pytest.mark.parametrize("loss", [F.cross_entropy, speech])
def test_a_metered_step_and_the_next_one_have_one_outline(
    loss: Callable[[Tensor, Tensor], Tensor],
) -> None:
    counts, engine = forwards_of(Aliased(), 9, loss)
    assert engine.plan is not None
    assert set(counts[1:]) == {-(-128 // engine.plan.micro_batch)}


class Unmetered(Aliased):
    """It builds another graph where no mode is on: an inspection, which is metered, has none."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return found if _get_current_dispatch_mode_stack() else found + 0  # type: ignore[no-untyped-call]


def test_graphs_that_no_inspection_meets_are_looked_for_a_while() -> None:
    counts, engine = forwards_of(Unmetered(), 100)
    assert engine.plan is not None
    assert sum(count > -(-128 // engine.plan.micro_batch) for count in counts) <= 18


class Attention(nn.Module):
    """Its kernel makes numbers that are as long as there are samples: these are followed again."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 24), nn.Linear(8, wide)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.first(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        return self.last(found.flatten(2))


@pytest.mark.parametrize("wide", [3, 500])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.5])
def test_all_forwards_of_an_inspection_are_foreseen(wide: int, share: float) -> None:
    model, rows = Attention(wide), (torch.randn(24, 16, 8), torch.randn(24, 16, wide))
    memory = plan(model, F.mse_loss, rows, memory="1GiB", timed=False).memory
    assert memory is not None
    assert memory.floor is not None
    budget = memory.floor + int((memory.undivided - memory.floor) * share)
    engine = Engine(model, F.mse_loss, memory=budget, rungs=(), tune="off")
    assert held(engine, rows) <= budget
    assert engine.plan is not None
    assert engine.plan.micro_batch < 24
    if share:
        assert engine.plan.exact
