from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, same, snapshot, state_after, undivided
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import anybatch
from anybatch import Engine, LazyBatch, Plan
from anybatch.core.units import parse_bytes
from anybatch.errors import BudgetError


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.0), nn.Linear(16, 3)).double()


def rows(n: int = 40) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 8, dtype=torch.float64), torch.randint(0, 3, (n,))


def shifted(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out - out.mean(0), y)


@pytest.mark.parametrize(
    ("loss", "memory", "mechanism"),
    [
        (F.cross_entropy, "8KiB", "streaming"),
        (shifted, "12KiB", "two-pass"),
        (F.cross_entropy, "1MiB", "undivided"),
    ],
)
def test_a_plan_goes_through_json_and_is_obeyed(
    loss: Callable[..., Tensor], memory: str, mechanism: str
) -> None:
    model, (x, y) = mlp(), rows()
    plan = anybatch.plan(model, loss, (x, y), memory=memory, timed=False)
    assert plan.mechanism == mechanism
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert json.loads(plan.to_json())["memory"]["budget"] == plan.memory.budget
    engines: list[Engine] = []

    def run(model: nn.Module) -> Tensor:
        engines.append(Engine(model, loss, plan=again))
        assert engines[0].plan == plan
        return engines[0].backward(x, y)

    got = state_after(model, run)
    assert_exact(got, undivided(model, loss, x, y))
    (engine,) = engines
    assert engine.plan is not None
    assert engine.last is not None
    assert engine.last.micro_batch == plan.micro_batch
    for name in ("micro_batch", "mechanism", "accumulate", "loss", "memory", "reasons"):
        assert getattr(engine.plan, name) == getattr(plan, name), name
    assert engine._planner._foreseen.rehearsed == 0


def test_the_engine_makes_the_same_plan() -> None:
    model, (x, y) = mlp(), rows()
    plan = anybatch.plan(model, F.cross_entropy, (x, y), memory="8KiB", timed=False)
    engine = Engine(model, F.cross_entropy, memory="8KiB")
    engine._planner.timed = False
    engine.backward(x, y)
    assert engine.plan is not None
    assert engine.plan == replace(plan, exact=engine.plan.exact)
    assert (plan.exact.state, engine.plan.exact.state) == ("not shown", "shown")


class Counts(nn.Module):
    """Counts its calls in attributes, which no copy may move."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.observed = mlp(), {"rows": [0]}
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.observed["rows"].append(len(x))
        return self.body(x)


@pytest.mark.large(few=3)
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("loss", [F.cross_entropy, shifted])
def test_planning_leaves_no_trace(loss: Callable[..., Tensor], there: bool, lazy: bool) -> None:
    model, (x, y) = Counts().double(), rows()
    optimizer = torch.optim.AdamW(model.parameters())
    for p in list(model.parameters())[1:] if there else ():
        p.grad = torch.randn_like(p)
    model.register_forward_hook(lambda *_: None)
    before, attributes = snapshot(model, optimizer), set(vars(model))
    batch: Any = LazyBatch(TensorDataset(x, y)) if lazy else (x, y)
    plan = anybatch.plan(model, loss, batch, memory="16KiB", optimizer=optimizer)
    assert plan.memory is not None
    assert same(before, snapshot(model, optimizer))
    assert set(vars(model)) == attributes
    assert all(0 <= n <= 40 for n in model.observed["rows"])
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_a_parameter_that_the_loss_closes_over_is_not_changed() -> None:
    model, (x, y) = mlp(), rows()
    scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out * scale, y)

    for timed in (False, True):
        anybatch.plan(model, loss, (x, y), memory="16KiB", timed=timed)
        assert scale.grad is None
    want = copy.deepcopy(model)
    F.cross_entropy(want(x) * scale, y).backward()
    truth, scale.grad = scale.grad, None
    Engine(model, loss, memory="16KiB").backward(x, y)
    assert torch.allclose(scale.grad, truth, rtol=0, atol=1e-14)


def test_a_plan_explains_itself() -> None:
    model, (x, y) = mlp(), rows()
    optimizer = torch.optim.AdamW(model.parameters())
    plan = anybatch.plan(
        model, F.cross_entropy, (x, y), memory="12KiB", optimizer=optimizer, timed=True
    )
    text = str(plan)
    for word in ("parameters", "gradients", "optimizer", "activations", "floor", "undivided"):
        assert word in text
    assert "12.0 KiB (as given), predicted by two dry runs on fake tensors" in text
    assert "chosen: the fastest timed" in text
    assert "does not fit: " in text
    assert plan.memory is not None
    assert sum(count for _, count in plan.memory.owners) == plan.memory.predicted <= 12 << 10
    assert {c.micro_batch for c in plan.memory.candidates} >= {plan.micro_batch, 40}
    roomy = anybatch.plan(model, F.cross_entropy, (x, y), memory="1MiB", timed=False)
    assert "fits, not timed" in str(roomy)


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch must be a pair.*and it is Tensor"):
        anybatch.plan(mlp(), F.cross_entropy, rows()[0], memory="1MiB")


def test_a_plan_next_to_what_it_decides_is_refused() -> None:
    model, pair = mlp(), rows()
    plan = anybatch.plan(model, F.cross_entropy, pair, memory="1MiB", timed=False)
    for more in ({"memory": "1MiB"}, {"micro_batch": 4}):
        with pytest.raises(ValueError, match="a plan decides memory, micro_batch and workspace"):
            Engine(model, F.cross_entropy, plan=plan, **more)


def test_a_micro_batch_by_itself_is_planned_within_what_is_left() -> None:
    plan = anybatch.plan(mlp(), F.cross_entropy, rows(), micro_batch=7)
    assert plan.micro_batch == 7
    assert plan.memory is not None
    assert "less 20 %" in plan.memory.source


def test_a_batch_that_the_engine_would_refuse_is_refused() -> None:
    x, y = rows()
    with pytest.raises(anybatch.errors.BatchError):
        anybatch.plan(mlp(), F.cross_entropy, (x, y[:-1]), memory="1MiB")


def test_a_plan_with_a_loader_tells_the_pace_of_full_steps() -> None:
    model, (x, y) = mlp(), rows()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    before, rng_state = snapshot(model), torch.get_rng_state()
    plan = anybatch.plan(
        model, F.cross_entropy, (x[:16], y[:16]), memory="12KiB", optimizer=optimizer, loader=loader
    )
    assert plan.pace is not None
    assert plan.pace.epoch == 3
    low, high = plan.pace.interval
    assert 0 < low <= plan.pace.seconds <= high
    assert "a step, of" in str(plan)
    assert Plan.from_json(plan.to_json()) == plan
    assert same(before, snapshot(model))
    assert torch.equal(rng_state, torch.get_rng_state())
    assert not optimizer.state
    Engine(model, F.cross_entropy, plan=plan).backward(x[:16], y[:16])


def test_a_loader_needs_an_optimizer() -> None:
    model, batch = mlp(), rows()
    with pytest.raises(
        ValueError, match="which need an optimizer, and there is none: give optimizer="
    ):
        anybatch.plan(model, F.cross_entropy, batch, loader=[batch])


def test_states_are_offloaded_automatically_where_nothing_fits_otherwise() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)), nn.Linear(64, 8))
    batch = torch.randn(6, 64), torch.randint(0, 8, (6,))
    optimizer = torch.optim.AdamW(model.parameters())
    weights = sum(p.numel() * 4 for p in model.parameters())

    def planned(memory: int, optimizer: torch.optim.Optimizer | None, **states: Any) -> Plan:
        return anybatch.plan(
            model, F.cross_entropy, batch, memory=memory, optimizer=optimizer, timed=False, **states
        )

    roomy = planned(5 * weights, optimizer, states="auto")
    assert roomy.states is None
    tight = 7 * weights // 2
    with pytest.raises(anybatch.errors.BudgetError):
        planned(tight, optimizer)
    found = planned(tight, optimizer, states="auto")
    assert found.states is not None
    assert found.states.store == "file"
    assert found == planned(tight, optimizer, states="file")
    reported = planned(tight, optimizer, states="auto", loader=[batch])
    assert reported.pace is None
    assert "full steps were not measured" in reported.reasons[-1]
    with pytest.raises(anybatch.errors.BudgetError):
        planned(weights, None, states="auto")


def matrix(out: Tensor) -> Tensor:
    return F.cross_entropy(out @ out.T, torch.arange(len(out)))


def test_a_loss_of_pairs_counts_wherever_a_plan_shows_a_size_that_was_rehearsed() -> None:
    """It grows with the square of the batch, which no line through two sizes tells."""
    model, (x, _) = mlp(), rows(128)
    plan = anybatch.plan(model, matrix, (x, None), memory="4MiB", timed=False)
    assert plan.mechanism == "undivided"
    held = plan.memory.predicted
    assert held > 128 * 128 * 8
    assert plan.memory.undivided == held
    assert [row.peak_bytes for row in plan.memory.candidates if row.micro_batch == 128] == [held]
    with pytest.raises(BudgetError) as caught:
        anybatch.plan(model, matrix, (x, None), memory="4KiB", timed=False, rungs=("offload",))
    (activations,) = re.findall(r"activations ([0-9.]+ [KM]iB)", str(caught.value))
    assert parse_bytes(activations) > 128 * 128 * 8
