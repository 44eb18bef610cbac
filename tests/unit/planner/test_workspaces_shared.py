"""How a budget is shared with convolutions: of a few ways, the one whose step is fastest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels import Measured, measured_as
from tests.limits.test_workspace import LOSS, batch, gradients, net, true
from tests.pool import ranks
from tests.unit.conv.problems import distance
from torch.utils.data import TensorDataset

import anybatch
from anybatch import Engine, Plan
from anybatch.errors import BudgetError
from anybatch.planner.workspaces import LEAST, SHARED_GAIN, SHARES, shared
from anybatch.reports import Division, Divisions, Memory

MIB = 1 << 20


def plan(budget: int, workspace: int | None, *, other: bool = True) -> Plan:
    memory = Memory(budget, "as given", budget, (), 10 * MIB, 10 * budget, "nobody")
    part = (4, "fft" if other else "native", 0.1, 100, 0.0)
    kernels = (Division((), 4, (part,), 1.0),)
    divisions = None if workspace is None else Divisions(workspace, "all", 100, kernels)
    return Plan(4, "streaming", "in place", "a loss", True, (), memory, convolutions=divisions)


def chosen_plan(durations: dict[int | None, float], budget: int, *, other: bool = True) -> Plan:
    """Return the plan that is chosen where steps take this long, by shares of the budget."""
    available = budget - 10 * MIB
    seconds = {None if s is None else available // s: t for s, t in durations.items()}

    def foresee(workspace: int | None) -> Plan:
        if workspace is not None and workspace not in seconds:
            raise BudgetError("too little", needed=2, budget=1)
        return plan(budget, workspace, other=other)

    def run(found: Plan) -> float:
        divisions = found.convolutions
        return seconds[None if divisions is None else divisions.workspace]

    return shared(foresee, run)


@given(st.lists(st.one_of(st.none(), st.floats(0.01, 10)), min_size=3, max_size=3))
def test_it_is_the_fastest_of_all_shares_by_brute_force(times: list[float | None]) -> None:
    budget, available = 1034 * MIB, 1024 * MIB
    durations = {s: t for s, t in zip(SHARES, times, strict=True) if t is not None}
    found = chosen_plan({None: 1.0, **durations}, budget)
    best = min(durations.values(), default=1.0)
    chosen = None if found.convolutions is None else found.convolutions.workspace
    if best < SHARED_GAIN:
        assert chosen is not None
        assert durations[available // chosen] == best
    else:
        assert chosen is None
    if durations:
        assert "1 s without workspace" in found.reasons[-1]


def test_what_brings_nothing_is_not_run() -> None:
    def never(_: Plan) -> float:
        raise AssertionError

    def torchs_own(workspace: int | None) -> Plan:
        return plan(1034 * MIB, workspace, other=False)

    assert shared(torchs_own, never).convolutions is None
    assert shared(lambda w: plan(11 * MIB, w), never).convolutions is None  # less than LEAST
    assert MIB // SHARES[0] < LEAST


@pytest.fixture
def fourier(monkeypatch: pytest.MonkeyPatch) -> Measured:
    found = Measured()
    measured_as(monkeypatch, found)
    return found


@pytest.mark.large(few=1)
@pytest.mark.parametrize("faster", [True, False])
@pytest.mark.usefixtures("fourier")
def test_a_plan_shares_its_budget_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, faster: bool
) -> None:
    """Seconds are made up, and all else is real: plans, their workspace, and what obeys them."""

    def seconds(engine: Engine, *_: object) -> float:
        assert engine.plan is not None
        return 1.0 if (engine.plan.convolutions is not None) == faster else 2.0

    monkeypatch.setattr("anybatch.tools.planning.step_seconds", seconds)
    monkeypatch.setattr("anybatch.planner.workspaces.LEAST", 1 << 10)
    model, (x, y) = net(), batch()
    found = anybatch.plan(model, LOSS, (x, y), memory="600KiB", workspace="auto", timed=False)
    assert (found.convolutions is not None) == faster
    assert "without workspace" in found.reasons[-1]
    assert found.memory is not None
    assert found.memory.predicted <= 600 << 10
    engine = Engine(model, LOSS, plan=Plan.from_json(found.to_json()))
    engine.backward(x, y)
    exact = true(x, y)
    assert all(distance(a.double(), b) < 1e-5 for a, b in zip(gradients(model), exact, strict=True))


def test_a_step_that_is_tried_leaves_no_trace(fourier: Measured) -> None:
    model, (x, y) = net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = [p.detach().clone() for p in model.parameters()]
    found = anybatch.plan(
        model, LOSS, (x, y), memory="64MiB", optimizer=optimizer, workspace="auto", timed=False
    )
    assert "without workspace" in found.reasons[-1]  # steps were run
    assert not fourier.inside
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def shared_over_ranks(_rank: int, _size: int) -> list[str]:
    model, (x, y) = net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for words in ({"workspace": "auto"}, {"gpus": 2}, {"network": "1Gbit"}):
        with pytest.raises(anybatch.errors.NotYetError) as refused:
            anybatch.plan(
                *(model, LOSS, (x, y)), memory="1MiB", optimizer=optimizer, loader=[(x, y)], **words
            )
        found.append(str(refused.value))
    plan = anybatch.plan(
        *(model, LOSS, (x, y)), memory="1MiB", optimizer=optimizer, loader=[(x, y)], timed=False
    )
    assert plan.pace is not None
    assert plan.scale is None
    return found


def test_what_one_process_can_do_is_refused_elsewhere() -> None:
    lazy = anybatch.LazyBatch(TensorDataset(*batch()))
    with pytest.raises(anybatch.errors.NotYetError, match="a LazyBatch can be run once only"):
        anybatch.plan(net(), LOSS, lazy, memory="1MiB", workspace="auto")
    with ranks(2) as pool:
        for reported in pool.run(shared_over_ranks):
            assert "not shared with convolutions over ranks" in reported[0]
            assert all("predicted from one process" in one for one in reported[1:])
