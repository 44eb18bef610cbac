"""A model that holds more from a later step on: the step is stopped, and the next ones planned."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import product
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, error_of, state_of, tolerance, undivided
from tests.peaks import metered
from tests.pool import ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from anybatch import Engine

KIB = 1024


class Growing(nn.Module):
    """Blocks that are checkpointed, or few, until a switch is set."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 3)
        self.norm = nn.BatchNorm1d(64) if norm else nn.Identity()
        self.checkpointed, self.depth = True, 4
        self.switch = Path("no such file")

    def block(self, hidden: Tensor) -> Tensor:
        for _ in range(4):
            hidden = self.middle(hidden).tanh()
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x))
        kept = not self.checkpointed or self.switch.exists()
        for _ in range(self.depth):
            hidden = (
                self.block(hidden) if kept else checkpoint(self.block, hidden, use_reentrant=False)
            )
        out: Tensor = self.last(hidden)
        return out


def begins(net: Growing, way: str) -> None:
    if way == "deeper":
        net.checkpointed, net.depth = False, 1


def grows(net: Growing, way: str) -> None:
    if way == "deeper":
        net.depth = 4
    elif way == "kept":
        net.checkpointed = False
    else:  # nothing of the model tells
        net.switch.touch()


WAYS = "deeper", "kept", "outside"


def step_bytes(net: Growing, engine: Engine, x: Tensor, y: Tensor) -> int:
    """Return the bytes of a step, which is exact."""
    net.zero_grad()
    wanted = undivided(net, F.cross_entropy, x, y)
    with metered({"parameters": net.parameters()}) as meter:
        loss = engine.backward(x, y)
    assert_exact(state_of(net, loss), wanted)
    return int(meter.peak)


def peaks(net: Growing, engine: Engine, way: str, folder: Path) -> list[int]:
    """Return the bytes of exact steps; the model grows before the third one."""
    held, net.switch = [], folder / "switch"
    begins(net, way)
    for number in range(6):
        if number == 2:
            grows(net, way)
        torch.manual_seed(number)
        x, y = torch.randn(256, 8, dtype=torch.float64), torch.randint(3, (256,))
        held.append(step_bytes(net, engine, x, y))
    return held


@pytest.mark.large(few=2)
@pytest.mark.parametrize(
    ("way", "norm", "budget"),
    # Where no attribute tells, a step that holds little more, or in lockstep, shows it afterwards.
    [
        *product(("deeper", "kept"), (False, True), (550 * KIB, 900 * KIB)),
        ("outside", False, 900 * KIB),
    ],
)
def test_a_divided_step_that_would_hold_more_is_stopped_at_its_budget(
    way: str, norm: bool, budget: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net = Growing(norm=norm).double()
    engine = Engine(net, F.cross_entropy, memory=budget, cache=None)
    held = peaks(net, engine, way, tmp_path)
    one = 2 * 128 * KIB  # the result of a kernel, after which a step is stopped, and its gradient
    assert max(held[:2]) <= budget
    assert max(held[2:4]) <= budget + one
    assert max(held[4:]) <= budget
    assert engine.plan is not None
    assert engine.plan.memory is not None
    assert held[-1] <= engine.plan.memory.predicted, "it was planned again"


@pytest.mark.large(few=1)
@pytest.mark.parametrize("way", WAYS)
def test_an_undivided_step_that_holds_more_is_noticed_and_the_next_ones_fit(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    net = Growing().double()
    budget = 1400 * KIB
    engine = Engine(net, F.cross_entropy, memory=budget, cache=None)
    with caplog.at_level(logging.INFO, logger="anybatch"):
        held = peaks(net, engine, way, tmp_path)
    assert held[2] > 1.5 * budget, "else there is nothing to notice"
    assert held[3] <= budget + 128 * KIB
    assert max(held[4:]) <= budget
    assert [r.message for r in caplog.records if "the model is another one" in r.message]


def start(folder: Path, way: str) -> tuple[list[int], dict[str, Tensor]]:
    """Return the micro-batches of a start, and the gradient of its last step."""
    torch.manual_seed(0)
    net = Growing()
    net.switch = folder / "switch"
    net.switch.unlink(missing_ok=True)
    engine, sizes = Engine(net, F.cross_entropy, memory=350 * KIB, cache=folder / "plans"), []
    begins(net, way)
    for number in range(16):
        if number == 2:
            grows(net, way)
        torch.manual_seed(number)
        net.zero_grad()
        engine.backward(torch.randn(256, 8), torch.randint(3, (256,)))
        assert engine.last is not None
        sizes.append(engine.last.micro_batch)
    return sizes, {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


SECONDS: dict[str, Callable[[int], float]] = {
    "small": lambda n: n,
    "between": lambda n: 1 + abs(n - 43),
    "large": lambda n: 1 / n,
    "any": lambda _: 1,
}
"""The fastest micro-batches -> samples of a micro-batch -> seconds of a step."""


@pytest.mark.large(few=2)
@pytest.mark.parametrize(("way", "fast"), [*product(WAYS, SECONDS)])
def test_two_starts_of_a_model_that_grows_are_planned_alike(
    way: str, fast: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clocked(run: Callable[[Any], Tensor], step: Any) -> Tensor:
        step.seconds = SECONDS[fast](step.limit) if step.clocked else None
        return run(step)

    monkeypatch.setattr("anybatch.engine.executor.clocked", clocked)
    sizes, gradients = start(tmp_path, way)
    others, same = start(tmp_path, way)
    assert sizes == others
    assert all(torch.equal(gradients[name], same[name]) for name in gradients)


def on_rank(rank: int, size: int) -> tuple[list[int], list[float]]:
    """Return what each step held and its error; the model grows on all ranks."""
    torch.manual_seed(0)
    net = Growing().double()
    net.checkpointed, net.depth = False, 1
    engine, held, errors = Engine(net, F.cross_entropy, memory=400 * KIB, cache=None), [], []
    for number in range(6):
        if number == 2:
            net.depth = 4
        torch.manual_seed(number)
        x, y = torch.randn(256, 8, dtype=torch.float64), torch.randint(3, (256,))
        wanted = undivided(net, F.cross_entropy, x, y)
        mine = slice(rank * 256 // size, (rank + 1) * 256 // size)
        with metered({"parameters": net.parameters()}) as meter:
            loss = engine.backward(x[mine], y[mine])
        errors.append(max(error_of(state_of(net, loss), wanted).values()))
        held.append(int(meter.peak))
        net.zero_grad()
    return held, errors


def test_ranks_plan_again_for_a_model_that_grows() -> None:
    with ranks(2, fresh=True) as pool:
        found = pool.run(on_rank)
    for held, errors in found:
        assert max(errors) <= tolerance()
        assert held[2] > 400 * KIB, "else there is nothing to notice"
        assert max(held[3:]) <= 400 * KIB


class Rows(Growing):
    """The same for rows of tokens [n, T, 8], which mean one output."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(1)


def held_by(net: Growing, engine: Engine, lengths: list[int], changes: dict[int, int]) -> list[int]:
    """Return the bytes of exact steps on rows of these lengths; step -> depth from then on."""
    held = []
    for number, length in enumerate(lengths):
        net.depth = changes.get(number, net.depth)
        torch.manual_seed(number)
        x, y = torch.randn(64, length, 8, dtype=torch.float64), torch.randint(3, (64,))
        held.append(step_bytes(net, engine, x, y))
    return held


@pytest.mark.large(few=1)
@pytest.mark.parametrize("length", [2, 8, 32])
def test_a_model_that_grows_in_a_step_of_short_rows_is_measured_with_long_ones(length: int) -> None:
    torch.manual_seed(0)
    net = Rows().double()
    net.checkpointed, net.depth = False, 1
    engine = Engine(net, F.cross_entropy, memory=4 << 20, micro_batch=16, cache=None)
    held = held_by(net, engine, [64, 64, length, 64, 64, 64, 64], {2: 4})
    one = 2 * 512 * KIB  # the result of a kernel, and its gradient
    assert max(held[:2]) <= 4 << 20
    assert max(held[2:4]) <= (4 << 20) + one
    assert max(held[4:]) <= 4 << 20


def test_evaluation_says_nothing_of_a_model_that_has_grown() -> None:
    torch.manual_seed(0)
    net = Rows().double()
    net.checkpointed, net.depth = False, 1
    engine = Engine(net, F.cross_entropy, memory=4 << 20, micro_batch=16, cache=None)
    held_by(net, engine, [64, 64, 4], {2: 4})
    for _ in range(6):
        engine.evaluate(torch.randn(64, 64, 8).double(), torch.randint(3, (64,)))
    held = held_by(net, engine, [64] * 3, {})
    assert held[0] <= (4 << 20) + 2 * 512 * KIB
    assert max(held[1:]) <= 4 << 20


def test_two_models_that_take_turns_are_planned_by_the_larger_one() -> None:
    torch.manual_seed(0)
    net = Rows().double()
    net.checkpointed, net.depth = False, 1
    engine = Engine(net, F.cross_entropy, memory=4 << 20, cache=None)
    turns = {number: 1 + 3 * (number % 2) for number in range(12)}
    held = held_by(net, engine, [32] * 12, turns)
    assert max(held[6:]) <= 4 << 20


class Unrolled(nn.Module):
    """A cell of few numbers, many times: the nodes of its graph are more bytes than its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(9, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 8)
        for at in range(600):
            h = torch.tanh(self.cell(torch.cat([h, x[:, at % 8, None]], 1)))
        found: Tensor = self.head(h)
        return found


def test_a_long_graph_is_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step is metered: nodes of autograd are no tensors, and are there in every step."""
    metered_steps = list[Any]()
    place = "anybatch.engine.measurement.Measurement._metered"
    real = resolve_name(place)

    def noted(self: Any, *args: Any, **more: Any) -> Any:
        metered_steps.append(args)
        return real(self, *args, **more)

    monkeypatch.setattr(place, noted)
    torch.manual_seed(0)
    net = Unrolled()
    engine = Engine(net, F.cross_entropy, memory="1MiB", micro_batch=4, cache=None)
    for _ in range(4):
        engine.backward(torch.randn(16, 8), torch.randint(3, (16,)))
    assert len(metered_steps) == 1
