"""The workspace of convolutions in a plan: counted, chosen before a step, and obeyed to the bit."""

from __future__ import annotations

import copy
import json
from functools import partial
from typing import Any

import pytest
import torch
from tests.kernels import Measured, measured, measured_as
from tests.unit.conv.problems import distance
from torch import Tensor, nn

import anybatch
from anybatch import Plan
from anybatch.errors import BudgetError

__all__ = ["measured"]
LOSS = nn.CrossEntropyLoss()
KIB = 1 << 10


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv1d(2, 8, 31, padding=15), nn.ReLU(), nn.Conv1d(8, 8, 63, 2, 31, groups=8)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(16, 3))


def batch(size: int = 11) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(size, 2, 200), torch.randint(3, (size,))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def true(x: Tensor, y: Tensor) -> list[Tensor]:
    full = net().double()
    LOSS(full(x.double()), y).backward()
    return gradients(full)


def owners(plan: Plan | None) -> dict[str, int]:
    assert plan is not None
    assert plan.memory is not None
    return dict(plan.memory.owners)


@pytest.mark.large(few=1)
@pytest.mark.parametrize("how", ["its own", "of a context", "a given size"])
def test_a_step_keeps_within_its_budget_with_the_workspace_counted(
    how: str, measured: Measured
) -> None:
    x, y = batch()
    options: dict[str, Any] = {} if how == "of a context" else {"workspace": "200KiB"}
    size = {"micro_batch": 4} if how == "a given size" else {}
    wanted = true(x, y)

    def run() -> None:
        model = net()
        engine = anybatch.Engine(model, LOSS, memory="700KiB", **options, **size)
        for _ in range(3):
            model.zero_grad()
            engine.backward(x, y)
            for mine, its in zip(gradients(model), wanted, strict=True):
                assert distance(mine, its) < 1e-5
        last = engine.last
        assert last is not None
        assert engine.plan is not None
        assert engine.plan.convolutions is not None
        space = engine.plan.convolutions.used
        assert 0 < space <= 200 * KIB
        assert last.predicted_bytes is not None
        assert last.predicted_bytes <= 700 * KIB
        assert owners(engine.plan)["workspace"] == space
        memory = engine.plan.memory
        assert memory is not None
        rows = {c.micro_batch: c.peak_bytes for c in memory.candidates if not c.offloaded}
        assert rows.get(engine.plan.micro_batch, memory.predicted) == memory.predicted
        assert memory.floor <= memory.predicted

    if how == "of a context":
        with anybatch.convolutions("200KiB"):
            run()
    else:
        run()
    assert not measured.inside


@pytest.mark.usefixtures("measured")
def test_what_is_held_is_measured_with_what_kernels_allocate_inside() -> None:
    x, y = batch(16)
    held = {}
    for space in (None, "400KiB"):
        engine = anybatch.Engine(net(), LOSS, memory="1MiB", micro_batch=4, workspace=space)
        engine.backward(x, y)
        assert engine.last is not None
        assert engine.last.peak_bytes is not None
        assert engine.last.predicted_bytes is not None
        held[space] = engine.last.peak_bytes
        assert engine.last.peak_bytes <= engine.last.predicted_bytes
    assert held["400KiB"] > held[None] + 10 * KIB


@pytest.mark.usefixtures("measured")
def test_a_resumed_run_counts_workspace_for_batches_that_are_planned_later() -> None:
    options = {"memory": "1MiB", "workspace": "200KiB"}
    first, resumed = (anybatch.Engine(net(), LOSS, **options) for _ in range(2))
    first.backward(*batch(4))
    resumed.load_state_dict(first.state_dict())
    resumed.backward(*batch(4))
    x, y = batch(16)
    resumed.backward(torch.cat([x, x], 2), y)  # longer than those of the plan that is followed
    assert owners(resumed.plan)["workspace"] > 0


@pytest.mark.usefixtures("measured")
def test_a_plan_is_obeyed_to_the_bit_and_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = batch()
    model = net()
    plan = anybatch.plan(model, LOSS, (x, y), memory="700KiB", workspace="200KiB")
    assert not any(p.grad is not None for p in model.parameters())
    first = anybatch.Engine(model, LOSS, memory="700KiB", workspace="200KiB")
    first.backward(x, y)
    assert first.plan is not None
    text = first.plan.to_json()
    assert Plan.from_json(text) == first.plan
    assert "kernels not torch's own" in str(plan)

    def never(*_: Any) -> None:
        raise AssertionError("a plan that is obeyed measures nothing")

    measured_as(monkeypatch, never)
    again = copy.deepcopy(model)
    second = anybatch.Engine(again, LOSS, plan=Plan.from_json(text))
    for _ in range(2):
        again.zero_grad()
        second.backward(x, y)
        assert all(
            torch.equal(a, b) for a, b in zip(gradients(again), gradients(model), strict=True)
        )
    assert second.plan is not None
    assert second.plan.convolutions == first.plan.convolutions
    old = json.loads(text)
    del old["convolutions"]
    assert Plan.from_json(json.dumps(old)).convolutions is None
    again.zero_grad()
    second.backward(x[:3], y[:3])  # a size that the plan does not know: torch's own
    assert second.plan.convolutions == first.plan.convolutions
    for mine, its in zip(gradients(again), true(x[:3], y[:3]), strict=True):
        assert distance(mine, its) < 1e-5


def test_what_cannot_be_recorded_is_chosen_after_the_first_step(measured: Measured) -> None:
    class Peeks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Tensor) -> Any:
            assert float(x.flatten()[0]) < 100  # no fake tells its value
            return self.inner(x)

    x, y = batch()
    model = Peeks()
    engine = anybatch.Engine(model, LOSS, memory="1MiB", micro_batch=4, workspace="200KiB")
    found = []
    for _ in range(2):
        model.zero_grad()
        engine.backward(x, y)
        assert engine.plan is not None
        assert engine.plan.convolutions is not None
        found.append(len(engine.plan.convolutions.kernels))
        for mine, its in zip(gradients(model), true(x, y), strict=True):
            assert distance(mine, its) < 1e-5
    assert found[1] > found[0]
    assert not measured.inside


@pytest.mark.usefixtures("measured")
def test_a_model_without_convolutions_needs_no_workspace() -> None:
    model, x, y = nn.Linear(50, 3), torch.randn(20, 50), torch.randint(3, (20,))
    with anybatch.convolutions("1GiB"):
        plan = anybatch.plan(model, LOSS, (x, y), memory="40KiB")
    assert "workspace" not in owners(plan)


def test_what_means_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="workspace must be a number of bytes"):
        anybatch.Engine(net(), LOSS, workspace="lots")
    with pytest.raises(ValueError, match='or "1.5GB", or "auto", and it is'):
        anybatch.plan(net(), LOSS, batch(), workspace="aut")
    plan = anybatch.plan(net(), LOSS, batch(), micro_batch=4, timed=False)
    with pytest.raises(ValueError, match="workspace, and one of them was given"):
        anybatch.Engine(net(), LOSS, plan=plan, workspace="1MiB")
    with pytest.raises(anybatch.errors.NotYetError, match="convolutions are divided on cpu"):
        anybatch.Engine(net().to("meta"), LOSS, workspace="1MiB")


@pytest.mark.usefixtures("measured")
def test_a_network_that_shares_its_workspace_has_all_of_it_counted() -> None:
    x, y = batch()
    with anybatch.convolutions(workspace_total="100KiB"):
        engine = anybatch.Engine(net(), LOSS, memory="700KiB", micro_batch=4)
        for _ in range(3):
            engine.model.zero_grad()
            engine.backward(x, y)
        assert engine.last is not None
        assert owners(engine.plan)["workspace"] == 100 * KIB
        for mine, its in zip(gradients(engine.model), true(x, y), strict=True):
            assert distance(mine, its) < 1e-5


@pytest.mark.large(few=1)
@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("memory", ["250KiB", "2MiB"])
def test_lanes_compute_with_a_workspace_too(memory: str) -> None:
    torch.manual_seed(0)
    layers = nn.Conv1d(2, 8, 31, padding=15), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 4, 5)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 196, 3))
    x, y = batch()
    exact = copy.deepcopy(model).double()
    LOSS(exact(x.double()), y).backward()
    engine = anybatch.Engine(model, LOSS, memory=memory, micro_batch=4, workspace="100KiB")
    for _ in range(2):
        model.zero_grad()
        engine.backward(x, y)
    for mine, its in zip(model.parameters(), exact.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        if float(its.grad.norm()) > 1e-6:  # a bias before BatchNorm has none
            assert distance(mine.grad, its.grad) < 1e-4
    assert engine.plan is not None
    assert engine.plan.mechanism == "lockstep"
    assert engine.plan.convolutions is not None


def needs(workspace: str | None, size: int = 1) -> int:
    """Return what a step needs with so much workspace for its kernels."""
    plan = anybatch.plan(
        net(), LOSS, batch(), memory="1GiB", workspace=workspace, micro_batch=size, timed=False
    )
    assert plan.memory is not None
    return plan.memory.predicted


@pytest.mark.parametrize("available", ["some of it", "none of it"])
def test_a_workspace_that_leaves_too_little_for_a_step_is_lowered(
    available: str, measured: Measured
) -> None:
    x, y = batch()
    plain = needs(None)
    memory = plain + (60 * KIB if available == "some of it" else 0)
    engine = anybatch.Engine(model := net(), LOSS, memory=memory, workspace="4MiB")
    engine.backward(x, y)
    for mine, its in zip(gradients(model), true(x, y), strict=True):
        assert distance(mine, its) < 1e-5
    plan, last = engine.plan, engine.last
    assert plan is not None
    assert plan.convolutions is not None
    assert last is not None
    assert last.peak_bytes is not None
    assert last.peak_bytes <= (last.predicted_bytes or 0) <= memory
    assert plan.convolutions.requested == 4 << 20
    assert plan.convolutions.used <= plan.convolutions.workspace <= memory - plain
    assert "(4.0 MiB would leave too little for a step)" in str(plan)
    assert Plan.from_json(plan.to_json()) == plan
    assert (plan.convolutions.other > 0) == (available == "some of it")
    assert not measured.inside


@pytest.mark.usefixtures("measured")
def test_what_does_not_fit_without_any_workspace_is_refused_with_what_that_needs() -> None:
    plain = needs(None)
    plan = partial(anybatch.plan, net(), LOSS, batch(), workspace="4MiB", offload="off")
    with pytest.raises(BudgetError, match="a step must fit in memory") as refused:
        plan(memory=plain - 1)
    assert refused.value.needed == plain
    found = plan(memory=plain)
    assert found.memory is not None
    assert found.memory.predicted <= plain
    theirs = pytest.raises(BudgetError, match="or more, a smaller workspace, a smaller model")
    with anybatch.convolutions("4MiB"), theirs as refused:
        anybatch.plan(net(), LOSS, batch(), memory=2 * plain, offload="off")
    assert refused.value.needed >= 4 << 20
