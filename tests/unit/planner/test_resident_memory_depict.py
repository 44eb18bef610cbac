"""The picture of a plan is the plan: its peak, and its owners at the peak."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine, Plan
from anybatch.planner.resident_memory import DIVIDED, WAITING
from anybatch.reports import StepTimeline


def shifted(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out - out.mean(0), y)


def planned(
    loss: Any = F.cross_entropy, size: int = 300, **options: Any
) -> tuple[Plan, StepTimeline]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    engine = Engine(model, loss, optimizer=optimizer, **options)
    plan = engine.foresee(torch.randn(size, 8), torch.randint(0, 3, (size,)), timed=False)
    found = engine.timeline()
    assert found is not None
    return plan, found


def owners(plan: Plan) -> dict[str, int]:
    assert plan.memory is not None
    return {name: size for name, size in plan.memory.owners if size}


@pytest.mark.parametrize(
    ("loss", "options", "title"),
    [
        (F.cross_entropy, {"memory": "100KiB"}, "300 samples in 3 micro-batches of "),
        (F.cross_entropy, {"memory": "40KiB"}, ", the first of them"),
        (F.cross_entropy, {"memory": "64MiB"}, "the batch of 300 undivided"),
        (F.cross_entropy, {"memory": "64MiB", "micro_batch": 70}, "5 micro-batches of 70"),
        (shifted, {"memory": "100KiB"}, " micro-batches of "),
    ],
    ids=["divided", "many", "undivided", "fixed", "coupled"],
)
def test_the_peak_is_the_plans_and_so_are_its_owners(
    loss: Any, options: dict[str, Any], title: str
) -> None:
    plan, step = planned(loss, **options)
    assert plan.memory is not None
    assert (step.peak, step.budget) == (plan.memory.predicted, plan.memory.budget)
    assert step.ledger.at_peak() == owners(plan)
    assert title in step.title
    names = [phase.name for phase in step.phases]
    divided = plan.mechanism != "undivided"
    assert names == (
        ["first inspection", DIVIDED, "update"] if divided else ["the full batch", "update"]
    )
    firsts = [phase.first for phase in step.phases]
    assert firsts == sorted({*firsts})
    assert firsts[-1] < len(step.ledger.events)
    assert step.seconds is None


def test_every_phase_of_a_forecast_has_the_peak_it_is_planned_with() -> None:
    """Beside the sum of all phases: each way in which a peak is told has the same bytes."""
    engine = Engine(nn.Linear(8, 3), F.cross_entropy, memory="64MiB")
    for size in (1, 2, 7, 40):
        engine.foresee(torch.randn(size, 8), torch.randint(0, 3, (size,)), timed=False)
        assert engine._planner is not None
        for _, forecast in engine._planner._foreseen._stored:
            for n in (1, 2, 3, size):
                parts = forecast.phases(n, size)
                assert max(part.peak for part in parts.values()) == forecast.peak(n, size)


@pytest.mark.parametrize("memory", ["70KiB", "4MiB"])
def test_memory_for_micro_batches_that_wait_is_theirs_as_long_as_there_are_any(memory: str) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 3))
    x, y = torch.randn(300, 8), torch.randint(0, 3, (300,))
    engine = Engine(model, F.cross_entropy, memory=memory, micro_batch=70)
    plan, step = engine.foresee(x, y, timed=False), engine.timeline()
    assert step is not None
    assert plan.memory is not None
    assert step.peak == plan.memory.predicted <= step.budget
    waits = step.ledger.live[:, step.ledger.owners.index(WAITING)]
    firsts = {phase.name: phase.first for phase in step.phases}
    assert (waits[firsts[DIVIDED] :] > 0).all()
    assert not waits[: firsts[DIVIDED]].any()
    available = plan.memory.waiting_capacity
    assert available is None or (isinstance(available, tuple) and waits.max() <= max(available))
    assert step.ledger.at_peak() == owners(plan)
    assert sum(owners(plan).values()) == plan.memory.predicted


class Reads(nn.Linear):
    """Reads a value, so that it cannot be rehearsed on fakes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.detach().sum()) != 123.0 else -x)


class Masks(nn.Linear):
    """Keeps as many rows as it likes, so that no two sizes have the same events."""

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), self.out_features)
        retained = x.sum(1) > 0
        out[retained] = super().forward(x[retained])
        return out


@pytest.mark.parametrize(
    ("model", "options", "how"),
    [
        (nn.Sequential(Reads(8, 3)), {}, "two steps on a few real rows"),
        (nn.Sequential(Masks(8, 3)), {}, "in proportion, and a tenth"),
        (nn.Sequential(nn.Linear(8, 16), nn.Dropout()), {"rng": "batch"}, "on fake tensors"),
        (nn.Linear(8, 3).double(), {}, "on fake tensors"),
        (nn.Linear(8, 3).bfloat16(), {}, "on fake tensors"),
    ],
    ids=["real rows", "peaks", "draws", "double", "half"],
)
def test_in_any_mode_of_foresight_a_picture_has_the_peak_of_its_plan(
    model: nn.Module, options: dict[str, Any], how: str
) -> None:
    dtype = next(model.parameters()).dtype
    x, y = torch.randn(60, 8, dtype=dtype), torch.randint(0, 3, (60,))
    engine = Engine(model, F.cross_entropy, memory="1MiB", micro_batch=17, **options)
    plan, step = engine.foresee(x, y, timed=False), engine.timeline()
    assert step is not None
    assert plan.memory is not None
    assert plan.memory.how.endswith(how)
    assert step.peak == plan.memory.predicted


def test_gradients_that_were_there_count_in_the_picture_too() -> None:
    model = nn.Linear(8, 3)
    engine = Engine(model, F.cross_entropy, memory="9KiB")
    x, y = torch.randn(64, 8), torch.randint(0, 3, (64,))
    model(x).sum().backward()
    plan, step = engine.foresee(x, y, timed=False), engine.timeline()
    assert step is not None
    assert plan.memory is not None
    assert step.peak == plan.memory.predicted


def test_where_nothing_was_foreseen_there_is_none() -> None:
    x, y = torch.randn(9, 8), torch.randint(0, 3, (9,))
    engine = Engine(nn.Linear(8, 3), F.cross_entropy, memory="1MiB")
    assert engine.timeline() is None
    plan = engine.foresee(x, y, timed=False)
    obeying = Engine(nn.Linear(8, 3), F.cross_entropy, plan=plan)
    obeying.backward(x, y)
    assert obeying.timeline() is None
    plain = Engine(nn.Linear(8, 3), F.cross_entropy, micro_batch=4)
    plain.backward(x, y)
    assert plain.timeline() is None
