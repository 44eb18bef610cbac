"""A sample that does not fit otherwise: the engine computes modules of single tokens in tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_of, undivided
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Engine, Plan
from anybatch.errors import BudgetError
from anybatch.execution.tiles import Tiles

D, WIDE, LONG, KIB = 8, 256, 600, 1 << 10


class Net(nn.Module):
    """Two wide blocks on tokens, and a mean over these; tokens may meet in the blocks."""

    def __init__(self, *, meet: bool = False) -> None:
        super().__init__()
        self.embedding, self.head, self.meet = nn.Embedding(50, D), nn.Linear(D, 2), meet
        self.blocks = nn.ModuleList(Block(meet=meet) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        z = self.embedding(x)
        for block in self.blocks:
            z = z + block(z)
        return self.head(z.mean(1))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, *, meet: bool) -> None:
        super().__init__()
        self.up, self.inner, self.down = (
            nn.Linear(D, WIDE),
            nn.Linear(WIDE, WIDE),
            nn.Linear(WIDE, D),
        )
        self.meet = meet

    def forward(self, x: Tensor) -> Tensor:
        z = self.inner(torch.tanh(self.up(x)))
        z = z.cumsum(1) if self.meet else z
        return self.down(torch.tanh(torch.tanh(z)))  # type: ignore[no-any-return]


def made(length: int = LONG, **more: bool) -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    return Net(**more).double(), torch.randint(50, (3, length)), torch.randint(2, (3,))


def engine_of(net: Net, memory: str, rungs: Any = ("tiles", "offload"), **more: Any) -> Engine:
    return Engine(net, F.cross_entropy, memory=memory, rungs=rungs, cache=None, tune="off", **more)


def planned(plan: Plan | None) -> tuple[int, bool]:
    assert plan is not None
    assert plan.memory is not None
    return plan.memory.tile, plan.offload is not None


@pytest.mark.parametrize(
    ("memory", "rungs", "tile", "offloads"),
    [
        ("4MiB", ("tiles", "offload"), 32, False),
        ("5MiB", ("tiles", "offload"), 128, False),
        ("9MiB", ("tiles",), 512, False),
        ("9MiB", ("tiles", "offload"), 0, True),
        ("16MiB", ("tiles", "offload"), 0, False),
    ],
)
def test_tiles_are_planned_where_no_sample_fits_otherwise(
    memory: str, rungs: Any, tile: int, *, offloads: bool
) -> None:
    net, x, y = made()
    engine = engine_of(net, memory, rungs)
    for length in (LONG, LONG, 400):
        net.zero_grad()
        want = undivided(net, F.cross_entropy, x[:, :length], y)
        assert_exact(state_of(net, engine.backward(x[:, :length], y)), want)
        assert engine.last is not None
        assert engine.last.predicted_bytes is not None
        assert (engine.last.peak_bytes or 0) <= engine.last.predicted_bytes
        assert engine.last.predicted_bytes <= int(memory[:-3]) << 20
        if length == LONG:
            assert planned(engine.plan) == (tile, offloads)


def test_a_plan_without_offloading_among_its_rungs_offloads_nothing() -> None:
    net, x, y = made()
    plan = engine_of(net, "9MiB", ("tiles",)).foresee(x, y, timed=False)
    assert planned(plan) == (512, False)
    with pytest.raises(BudgetError):
        engine_of(net, "5MiB", ()).foresee(x, y, timed=False)


def test_a_plan_in_tiles_says_so_and_is_obeyed_when_it_is_loaded() -> None:
    net, x, y = made()
    plan = anybatch.plan(net, F.cross_entropy, (x, y), memory="5MiB", timed=False)
    assert "modules of single tokens, 128 tokens at a time" in str(plan)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    engine = Engine(net, F.cross_entropy, plan=again)
    want = undivided(net, F.cross_entropy, x, y)
    assert_exact(state_of(net, engine.backward(x, y)), want)
    assert engine.last is not None
    assert engine.last.peak_bytes is not None
    assert engine.last.peak_bytes <= 5 * KIB * KIB
    with pytest.raises(ValueError, match="it uses tiles, and rungs"):
        Engine(net, F.cross_entropy, plan=again, rungs=("chunks", "offload"))


def test_tokens_that_meet_leave_the_least_budget_as_it_is() -> None:
    needed = []
    for rungs in (("offload",), ("tiles", "offload")):
        net, x, y = made(meet=True)
        with pytest.raises(BudgetError) as caught:
            engine_of(net, "1MiB", rungs).backward(x, y)
        needed.append(caught.value.needed)
    assert needed[0] == needed[1]


def test_a_step_of_a_budget_without_tiles_tries_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(Tiles, "run", run)
    net, x, y = made()
    engine_of(net, "16MiB").backward(x, y)


def test_evaluation_is_planned_in_tiles_too() -> None:
    net, x, y = made()
    engine = engine_of(net, "3MiB", ("tiles",))
    want = F.cross_entropy(net(x), y).detach()
    assert_exact({"loss": engine.evaluate(x, y)}, {"loss": want})
