"""A sample that fits neither in chunks and tiles nor offloaded: saved tensors leave beside them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_of, undivided
from tests.peaks import metered
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine, Plan
from anybatch.errors import BudgetError

D, WIDE, LONG, V = 32, 128, 512, 600


class Block(nn.Module):
    """A wide map of each token, and a sum over those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Sequential(nn.Linear(D, WIDE), nn.Tanh(), nn.Linear(WIDE, D), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        z = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + self.tokens(torch.sin(z)) * torch.cos(z)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Three blocks and a head with a wide vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.blocks = nn.Sequential(Block(), Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(x)))  # type: ignore[no-any-return]


def loss(z: Tensor, y: Tensor) -> Tensor:
    """The mean cross-entropy of tokens."""
    return F.cross_entropy(z.flatten(0, 1), y.flatten())


def made(rows: int = 1) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return Decoder().double(), torch.randint(V, (rows, LONG)), torch.randint(V, (rows, LONG))


@cache
def needed(rungs: Any, rows: int = 1) -> int:
    """The least budget of a step."""
    net, x, y = made(rows)
    with pytest.raises(BudgetError) as refused:
        Engine(net, loss, memory=1, rungs=rungs, cache=None).foresee(x, y, timed=False)
    return refused.value.needed


@pytest.mark.parametrize(
    ("parts", "share"), [(("chunks",), 0.6), (("chunks", "tiles"), 0.02)], ids=str
)
def test_saved_tensors_are_offloaded_where_parts_do_not_suffice(
    parts: tuple[str, ...], share: float, tmp_path: Path
) -> None:
    both, others = needed((*parts, "offload")), min(needed(parts), needed(("offload",)))
    assert both < 0.8 * others
    budget = both + int(share * (others - both))
    net, x, y = made()
    want = undivided(net, loss, x, y)
    options: dict[str, Any] = {"memory": budget, "rungs": (*parts, "offload")}
    engine = Engine(net, loss, **options, cache=tmp_path / "plans")
    for _ in range(4):
        net.zero_grad()
        with metered({"there": net.parameters()}) as meter:
            found = engine.backward(x, y)
        assert_exact(state_of(net, found), want)
        assert meter.peak <= budget
        plan = engine.plan
        assert plan is not None
        assert plan.memory is not None
        assert plan.memory.chunked
        assert bool(plan.memory.tile) <= ("tiles" in parts)
        assert plan.offload is not None
        assert engine.last is not None
        assert engine.last.moved_bytes
    again = Plan.from_json(plan.to_json())
    assert again == plan
    for more in ({"plan": again}, {**options, "cache": tmp_path / "plans"}):
        net.zero_grad()
        other = Engine(net, loss, **more)
        with metered({"there": net.parameters()}) as meter:
            found = other.backward(x, y)
        assert_exact(state_of(net, found), want)
        assert meter.peak <= budget


def test_of_several_samples_parts_are_resident() -> None:
    assert needed(("chunks", "offload"), 2) == min(needed(("chunks",), 2), needed(("offload",), 2))


def test_parts_that_suffice_offload_nothing() -> None:
    net, x, y = made()
    memory = needed(("chunks", "tiles")) + 4096
    engine = Engine(net, loss, memory=memory, rungs=("chunks", "tiles", "offload"), cache=None)
    want = undivided(net, loss, x, y)
    assert_exact(state_of(net, engine.backward(x, y)), want)
    assert engine.plan is not None
    assert engine.plan.memory is not None
    if memory < needed(("offload",)):
        assert engine.plan.memory.chunked
        assert engine.plan.offload is None


def test_longer_samples_after_short_ones_are_planned_so() -> None:
    budget = needed(("chunks", "tiles", "offload")) + 8192
    net, x, y = made()
    engine = Engine(net, loss, memory=budget, cache=None)
    for length in (LONG // 4, LONG, LONG // 2, LONG):
        net.zero_grad()
        want = undivided(net, loss, x[:, :length], y[:, :length])
        with metered({"there": net.parameters()}) as meter:
            found = engine.backward(x[:, :length], y[:, :length])
        assert_exact(state_of(net, found), want)
        assert meter.peak <= budget
