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

import anybatch
from anybatch import Engine, Plan
from anybatch.errors import BudgetError

WIDE, LONG, V = 128, 512, 600


class Block(nn.Module):
    """A wide map of each token, and a sum over those before it."""

    def __init__(self, features: int) -> None:
        super().__init__()
        up, down = nn.Linear(features, WIDE), nn.Linear(WIDE, features)
        self.tokens = nn.Sequential(up, nn.Tanh(), down, nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        z = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + self.tokens(torch.sin(z)) * torch.cos(z)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Three blocks and a head with a wide vocabulary."""

    def __init__(self, features: int, columns: int = V) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(V, features), nn.Linear(features, columns)
        self.blocks = nn.Sequential(*(Block(features) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(x)))  # type: ignore[no-any-return]


def loss(z: Tensor, y: Tensor) -> Tensor:
    """The mean cross-entropy of tokens."""
    return F.cross_entropy(z.flatten(0, 1), y.flatten())


def made(rows: int = 1, features: int = 32) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return (
        Decoder(features).double(),
        torch.randint(V, (rows, LONG)),
        torch.randint(V, (rows, LONG)),
    )


@cache
def needed(rungs: Any, rows: int = 1, features: int = 32) -> int:
    """The least budget of a step."""
    net, x, y = made(rows, features)
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
        assert bool(plan.memory.tile) == ("tiles" in parts)
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


def test_parts_offload_nothing_inside() -> None:
    """What one chunk saves is needed at once: all of them would move as much as all logits."""
    columns, (_, x, y) = 8 * V, made()
    net = Decoder(32, columns).double()
    options: dict[str, Any] = {"rungs": ("chunks", "offload"), "cache": None}
    with pytest.raises(BudgetError) as refused:
        Engine(net, loss, memory=1, **options).foresee(x, y, timed=False)
    engine = Engine(net, loss, memory=refused.value.needed + 1024, **options)
    for _ in range(3):
        net.zero_grad()
        engine.backward(x, y)
        assert engine.last is not None
        assert 0 < engine.last.moved_bytes < 8 * LONG * columns


def test_logits_that_are_there_may_be_offloaded() -> None:
    """A function of all rows gets them whole, and they leave as any saved tensor does."""
    h, w = torch.randn(256, 16, requires_grad=True), torch.randn(4000, 16, requires_grad=True)
    logits, off = 4 * len(h) * len(w), anybatch.offload(memory="24MiB", device="cpu")
    with off, anybatch.chunked_losses():
        z = torch.tanh(F.linear(torch.sin(h), w)) * 3
        (z.std() + z.square().mean()).backward()
    assert off.last is not None
    assert off.last.out_bytes >= 2 * logits
    off.close()


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
    assert memory < needed(("offload",))
    assert engine.plan.memory.chunked
    assert engine.plan.offload is None


def steps(features: int, lengths: list[int]) -> None:
    """Assert that steps on samples of these lengths are exact, and within the least budget."""
    budget = needed(("chunks", "tiles", "offload"), 1, features) + 8192
    net, x, y = made(1, features)
    engine = Engine(net, loss, memory=budget, cache=None)
    for length in lengths:
        net.zero_grad()
        want = undivided(net, loss, x[:, :length], y[:, :length])
        with metered({"there": net.parameters()}) as meter:
            found = engine.backward(x[:, :length], y[:, :length])
        assert_exact(state_of(net, found), want)
        assert meter.peak <= budget


def test_longer_samples_after_short_ones_are_planned_so() -> None:
    steps(32, [LONG // 4, LONG, LONG // 2, LONG])


def test_shorter_samples_whose_tensors_are_too_small_to_leave_are_refused() -> None:
    """A saved tensor of 64 KiB leaves, and half of it stays: the longer one's plan is no bound."""
    steps(16, [LONG // 4, LONG])
    with pytest.raises(BudgetError):
        steps(16, [LONG, LONG // 2])
