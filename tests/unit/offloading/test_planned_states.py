"""Plans of trainings whose parameters and gradients leave: within the budget, and bit for bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.peaks import metered
from tests.unit.offloading.steps import network as groups
from tests.unit.offloading.test_parameters_paging import Unusual, adamw, all_of, budget_for
from tests.unit.offloading.trainings import equal
from torch import Tensor, nn, optim
from torch.nn import functional as F

import anybatch
from anybatch import Engine, Plan
from anybatch.errors import BudgetError
from anybatch.offloading.planned_states import best_resident, least_resident, optimizers

STEPS = 3


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "SMALL", 64)


def normed() -> nn.Module:
    """Layers between which samples meet, so that there are lanes."""
    torch.manual_seed(0)
    layers = [(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(*(layer for block in layers for layer in block))


class Recurrent(nn.Module):
    """Layers whose weights are more than the pages that their kernels keep for a row."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 64, num_layers=3, batch_first=True)
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[n, L, 6] -> [n, 3]."""
        return self.head(self.lstm(x)[0][:, -1])


def case(name: str) -> tuple[nn.Module, Any, Tensor, Tensor]:
    """Return a network, its loss, and a batch."""
    torch.manual_seed(0)
    if name == "BatchNorm":
        return normed(), nn.MSELoss(), torch.randn(13, 32), torch.randn(13, 32)
    if name == "unusual":
        x = torch.randint(20, (11, 5))
        return Unusual(), _tokens, x, x
    model, loss_fn, (x, y) = groups(name)
    model = Recurrent() if name == "LSTM" else model
    again = [0, 1, 2, 3, 4, 4, 2, 1]
    return model, loss_fn, x[again], y[again]


def _tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def train(model: nn.Module, engine: Engine, optimizer: optim.Optimizer, batch: Any) -> None:
    """Make steps."""
    torch.manual_seed(1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        engine.backward(*batch)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def like(plan: Plan, model: nn.Module, loss_fn: Any, batch: Any) -> list[Tensor]:
    """Train in memory, in micro-batches of the same size."""
    optimizer = adamw(model.parameters())
    n = plan.micro_batch
    engine = Engine(model, loss_fn, optimizer=optimizer, micro_batch=n)
    train(model, engine, optimizer, batch)
    return all_of(model, optimizer)


def within(plan: Plan, model: nn.Module, loss_fn: Any, batch: Any) -> list[Tensor]:
    """Obey a plan, and require that no more bytes are there than it says."""
    assert plan.memory is not None
    assert plan.states is not None
    optimizer = adamw(model.parameters())
    engine = Engine(model, loss_fn, optimizer=optimizer, plan=plan)
    assert engine.states is not None
    paged = engine.states._paged
    assert paged is not None
    groups = {"there": [*model.parameters(), *model.buffers()], "rows": batch}
    with metered(groups) as meter:
        paged._meters = [meter]
        with engine.states:
            paged.pages.squeeze(0)  # all was in memory until then
            paged.pages.limit = engine.states.memory
            meter.peak = meter.live
            train(model, engine, optimizer, batch)
            rows = sum(t.nbytes for t in batch)
            assert meter.peak - rows <= plan.memory.predicted <= plan.memory.budget
            assert paged.pages.most <= engine.states.memory
            assert engine.last is not None
            assert engine.plan is not None
            assert engine.plan.states == plan.states
    return all_of(model, optimizer)


def small(make: Any, budget: int) -> Plan:
    """Return a plan for little more than is needed; what kernels round up is not known before."""
    for _ in range(4):
        try:
            return make(memory=budget, states="file", offload="off")
        except BudgetError as error:
            budget = error.needed + budget // 8
    raise AssertionError


TIMES = {"transformer": 5.2, "LSTM": 1.85, "BatchNorm": 1.0}
"""Of the bytes of the parameters: about the least that a step fits in."""


@pytest.mark.large(few=1)
@pytest.mark.parametrize(("name", "times"), TIMES.items())
def test_a_plan_lets_parameters_leave_where_a_step_does_not_fit_without(
    name: str, times: float
) -> None:
    model, loss_fn, *batch = case(name)
    full = int(times * sum(p.nbytes for p in model.parameters()))
    optimizer = adamw(model.parameters())
    make = partial(anybatch.plan, model, loss_fn, tuple(batch), optimizer=optimizer, timed=False)
    before = all_of(model, optimizer)
    plan = small(make, full)
    assert equal(all_of(model, optimizer), before)
    assert "step" not in vars(optimizer)
    assert plan.states is not None
    assert plan.states.model
    plan = Plan.from_json(plan.to_json())
    assert "with parameters and gradients; at most" in str(plan)
    ours = within(plan, copy.deepcopy(model), loss_fn, batch)
    assert equal(ours, like(plan, copy.deepcopy(model), loss_fn, batch))


def test_random_budgets_are_kept_or_truly_too_small(counted: Callable[..., int]) -> None:
    rng = random.Random(5)
    fits, refused = 0, None
    for number in range(counted(50, 15)):
        name = rng.choice(["BatchNorm", "unusual"])
        model, loss_fn, *batch = case(name)
        budget = int(rng.uniform(1, 5) * sum(p.nbytes for p in model.parameters()))
        optimizer = adamw(model.parameters())
        options: Any = {"optimizer": optimizer, "timed": number % 3 == 0, "states": "file"}
        options["offload"] = rng.choice(["off", "auto"])
        try:
            plan = anybatch.plan(model, loss_fn, tuple(batch), memory=budget, **options)
        except BudgetError as error:
            refused = error
            continue
        fits += 1
        assert plan.states is not None
        ours = copy.deepcopy(model)
        if plan.states.model:
            found = within(plan, ours, loss_fn, batch)
        else:
            optimizer = adamw(ours.parameters())
            engine = Engine(ours, loss_fn, optimizer=optimizer, plan=plan)
            train(ours, engine, optimizer, batch)
            assert engine.last is not None
            assert engine.states is not None
            engine.states.back()
            found = all_of(ours, optimizer)
        assert equal(found, like(plan, copy.deepcopy(model), loss_fn, batch))
    assert fits
    assert refused is not None
    assert refused.needed > refused.budget


@pytest.mark.large(few=1)
@pytest.mark.parametrize("name", ["transformer", "BatchNorm"])
def test_an_engine_with_a_budget_inside_offload_states(name: str) -> None:
    model, loss_fn, *batch = case(name)
    ours, optimizer = copy.deepcopy(model), adamw(model.parameters())
    resident = budget_for(model)
    states = anybatch.offload_states(optimizer, model=model, memory=resident)
    with states:
        engine = Engine(model, loss_fn, optimizer=optimizer, memory=resident + (1 << 20))
        train(model, engine, optimizer, batch)
        plan, last = engine.plan, engine.last
        assert plan is not None
        assert plan.memory is not None
        owners = dict(plan.memory.owners)
        assert owners["paged parameters"] == resident
        assert owners.get("parameters", 0) < 2000
        assert last is not None
        assert (last.peak_bytes or 0) <= plan.memory.predicted
    assert equal(all_of(model, optimizer), like(plan, ours, loss_fn, batch))


def test_a_gradient_that_a_lane_has_made_is_moved_by_one_of_both() -> None:
    model, loss_fn, *batch = case("BatchNorm")
    ours, optimizer = copy.deepcopy(model), adamw(model.parameters())
    states = anybatch.offload_states(optimizer, model=model, memory=budget_for(model))
    with states:
        found = Engine(model, loss_fn, optimizer=optimizer, memory="1GiB").foresee(
            *batch, timed=False
        )
        assert found.memory is not None
        floor = found.memory.floor
        engine = Engine(model, loss_fn, optimizer=optimizer, memory=floor + 4000, micro_batch=3)
        train(model, engine, optimizer, batch)
        assert engine.last is not None
        assert engine.last.moved_bytes
        plan = engine.plan
        assert plan is not None
        pages = states._paged.pages  # type: ignore[union-attr]
        assert pages.most <= states.memory
    assert equal(all_of(model, optimizer), like(plan, ours, loss_fn, batch))


def test_a_plan_whose_parameters_are_offloaded_is_refused_outside() -> None:
    model, loss_fn, *batch = case("transformer")
    optimizer = adamw(model.parameters())
    plan = anybatch.plan(
        *(model, loss_fn, tuple(batch)), optimizer=optimizer, memory="1GiB", timed=False
    )
    resident = least_resident(optimizer, model)
    planned = f'{{"store": "file", "folder": null, "resident_bytes": {resident}, "model": true}}'
    text = plan.to_json().replace('"states": null', f'"states": {planned}')
    engine = Engine(model, loss_fn, optimizer=optimizer, plan=Plan.from_json(text))
    with pytest.raises(ValueError, match="this step is outside: put that around"):
        engine.backward(*batch)
    with pytest.raises(ValueError, match="this step is outside: put that around"):
        engine.evaluate(*batch)
    assert engine.states is not None
    with engine.states:
        engine.backward(*batch)
    assert "step" not in vars(optimizer)


def brute_resident(
    held_by_size: dict[int, int], size: int, budget: int, least: int, total: int
) -> int:
    """Return the bytes that move at the least, over every room."""
    found = []
    for n, held in held_by_size.items():
        for resident in range(least, budget - held + 1):
            found.append(-(-size // n) * max(0, total - resident))
    return min(found)


def test_the_best_resident_bytes_move_the_fewest_bytes() -> None:
    rng = random.Random(0)
    for _ in range(300):
        size, budget, least = rng.randint(1, 40), rng.randint(50, 200), rng.randint(1, 30)
        sizes = sorted({1, size, *(rng.randint(1, size) for _ in range(3))})
        held = rng.randint(0, 15)
        held_by_size = {n: held + rng.randint(1, 9) * n for n in sizes}
        if budget - min(held_by_size.values()) < least:
            continue
        total = rng.randint(1, 300)
        resident = best_resident(held_by_size, size, budget, least, total)
        assert least <= resident <= budget
        moved = min(
            -(-size // n) * max(0, total - resident)
            for n in sizes
            if held_by_size[n] + resident <= budget
        )
        assert moved == brute_resident(held_by_size, size, budget, least, total)
