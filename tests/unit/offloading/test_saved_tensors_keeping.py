"""The engine's micro-batches compute again what is cheap, within their rooms, bit for bit."""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from tests.offloads import file_store, slow_link, small_leave
from tests.peaks import metered
from tests.unit.offloading.steps import CPU, LOTS, TELLS, equal, states
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Engine, Plan
from anybatch.offloading.saved_tensors import Keeping, Mover, Saved, StepHooks

pytestmark = pytest.mark.skipif(
    not TELLS, reason="this torch does not say what hooks have given a node"
)
Batch = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_leave(monkeypatch)
    slow_link(monkeypatch)


def images(*, trained: bool) -> nn.Module:
    """Convolution, BatchNorm and ReLU, some times over; `trained`: BatchNorm has its statistics.

    A ReLU after such a norm is made of nothing that is saved, and SiLU still is of its operand.
    """
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1)]
    for activation in (nn.ReLU, nn.SiLU, nn.ReLU, nn.SiLU, nn.ReLU):
        norm = nn.BatchNorm2d(8).train(mode=not trained)
        layers += [norm, activation(), nn.Conv2d(8, 8, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Block(nn.Module):
    """A transformer's block with dropout, GELU and LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(
            8, 2, 32, dropout=0.1, activation="gelu", batch_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).mean(1)


def shifted(out: Tensor, y: Tensor) -> Tensor:
    """Couples the samples, so that it takes two passes."""
    return F.cross_entropy(out - out.mean(0), y)


def case(name: str) -> tuple[nn.Module, Batch]:
    y = torch.randint(0, 8, (10,))
    if name == "block":
        return Block(), (torch.randn(10, 24, 8), y)
    return images(trained=name == "trained"), (torch.randn(10, 3, 12, 12), y)


def within(model: nn.Module, loss: Any, batch: Batch, size: int) -> Plan:
    """A plan halfway between everything away and nothing away."""
    options: dict[str, Any] = {"micro_batch": size, "timed": False, "offload": "file"}
    full = anybatch.plan(model, loss, batch, memory="1GiB", **options).memory
    assert full is not None
    middle = (full.floor + full.predicted) // 2
    found = anybatch.plan(model, loss, batch, memory=middle, **options)
    model.zero_grad()
    return found


def run(engine: Engine, batch: Batch, seed: int = 1) -> tuple[list[Tensor], int]:
    """Return gradients and buffers after a step, and the most bytes that were live in it."""
    model = engine.model
    model.zero_grad()
    torch.manual_seed(seed)
    with metered({"there": [*model.parameters(), *model.buffers()]}) as meter:
        engine.backward(*batch)
    return states(model), meter.peak


@pytest.mark.large(few=1)
@pytest.mark.parametrize(
    ("name", "loss", "size"),
    [
        ("trained", F.cross_entropy, 4),  # 4, 4, 2
        ("trained", shifted, 4),
        ("block", F.cross_entropy, 4),
        ("whole", F.cross_entropy, 10),  # BatchNorm meets all samples in one micro-batch
    ],
    ids=["ragged", "two passes", "dropout", "undivided"],
)
def test_gradients_are_those_without_it_and_every_byte_is_foreseen(
    name: str, loss: Callable[[Tensor, Tensor], Tensor], size: int
) -> None:
    model, batch = case(name)
    plan = within(model, loss, batch, size)
    assert plan.memory is not None
    assert plan.offload is not None
    assert plan.offload.remade > 0
    assert "are recomputed in a step" in str(plan)
    everything = replace(plan.offload, capacity=(1 << 30, 1 << 30))
    plain = Engine(copy.deepcopy(model), loss, plan=replace(plan, offload=everything))
    if loss is not shifted:  # there sums are in another order with a graph kept between passes
        plain = Engine(copy.deepcopy(model), loss, micro_batch=size)
    engine = Engine(model, loss, plan=Plan.from_json(plan.to_json()))
    for seed in range(3):  # recorded, planned, planned
        wanted, _ = run(plain, batch, seed)
        found, most = run(engine, batch, seed)
        assert equal(found, wanted)
        assert most <= plan.memory.predicted <= plan.memory.budget
    assert engine.last is not None
    assert engine.last.remade_bytes > 0
    counts = [b for path, b in model.named_buffers() if path.endswith("batches_tracked")]
    assert all(int(count) == (3 if name == "whole" else 0) for count in counts)


def test_a_plan_of_before_there_was_recomputation_is_still_read() -> None:
    model, batch = case("trained")
    plan = within(model, F.cross_entropy, batch, 10)
    assert Plan.from_json(plan.to_json()) == plan
    written = json.loads(plan.to_json())
    del written["offload"]["remade"]
    old = Plan.from_json(json.dumps(written))
    assert old.offload is not None
    assert old.offload.remade == 0
    assert "computed again" not in str(old)


@pytest.fixture
def work() -> Callable[[], None]:
    """Forward and backward of few rows through weights that are far more than all they save."""
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(128, 128).requires_grad_(requires_grad=False)]
        layers += [nn.LayerNorm(128), nn.GELU()]
    model, x = nn.Sequential(*layers), torch.randn(32, 128)

    def once() -> None:
        model.zero_grad()
        model(x).square().sum().backward()

    return once


def most(keeping: Keeping, work: Callable[[], None]) -> int:
    """The most bytes that a micro-batch makes."""
    with metered() as meter:
        keeping.run(work, 32, first=False)
    return meter.peak


def test_a_budget_is_for_what_a_micro_batch_makes_itself(work: Callable[[], None]) -> None:
    """Whatever is there beside it, weights above all, neither forbids a trial nor allows one."""
    with metered() as meter:
        work()
    high, found = meter.peak, []
    keeping = Keeping(file_store, CPU)
    keeping.begin((0, 0))
    low = most(keeping, work)
    keeping.close()
    assert low < high
    assert keeping.remade == 0
    for available in (low, (3 * low + high) // 4, (low + high) // 2, high):
        keeping = Keeping(file_store, CPU)
        keeping.begin((0, available))
        for _ in range(3):  # recorded, planned, planned
            assert most(keeping, work) <= available
        assert keeping.recorded == 1
        found.append(keeping.remade)
        keeping.close()
    assert max(found[1:3]) > 0
    assert found[3] == 0  # all of it may stay


class Scaled(nn.Module):
    """What a ReLU makes is saved twice, by it and by the pooling after it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(3)
        )
        self.head = nn.Linear(54, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5 + 0.1
        out: Tensor = self.head(self.body(x).flatten(1))
        return out


@pytest.mark.parametrize("speeds", [(4.5e6, 3.7e4), (1e5, 1e5)])
def test_what_is_saved_twice_is_dropped_once_and_not_sent_between(
    speeds: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan began to copy what had been dropped when it was saved first."""
    slow_link(monkeypatch, *speeds)
    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(60, 1, 8, 8)

    def once() -> None:
        model.zero_grad()
        model(x).square().sum().backward()

    def gradients() -> list[Tensor]:
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    once()
    want = gradients()
    keeping = Keeping(file_store, CPU)
    keeping.begin((LOTS, LOTS))
    keeping.run(once, 60, first=False)  # recorded, and tried what is cheap to make again
    (recorded_step,) = keeping._caches[False, 60].recorded.values()
    found = recorded_step.recording
    for share in range(24):
        available = found.peak + share * sum(found.sizes) // 24
        keeping.begin((available, available))
        with metered() as meter:
            keeping.run(once, 60, first=False)
        assert meter.peak <= available
        assert all(map(torch.equal, gradients(), want))
    keeping.close()


def test_what_was_dropped_is_neither_sent_nor_called() -> None:
    """Whatever a schedule says of it: nothing here holds it any more."""
    step = StepHooks(Mover(file_store, CPU), CPU, None, {})
    retained, dropped = (Saved(n, n, torch.ones(9), deque()) for n in range(2))
    dropped.storage, dropped.recipe = None, object()
    step._saved = [ref(retained), ref(dropped)]
    course: Any = SimpleNamespace(step=SimpleNamespace(of={0: 0, 1: 1, 7: 1}))
    assert list(step._moving(course, (0, 1, 7))) == [retained]
