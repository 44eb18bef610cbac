from __future__ import annotations

import threading
from math import inf
from typing import Any

import pytest
import torch
from tests.busy import no_idle
from tests.cases import inputs_of
from tests.oracle import same, snapshot
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from anybatch import Engine, LazyBatch
from anybatch.engine.step_builder import Runner, RunPlan, Step, seconds_of_step
from anybatch.reports import Memory


class Model(nn.Module):
    """Draws, and may run out of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.head = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.error: Exception | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        out: Tensor = self.head(F.dropout(self.norm(self.one(x))))
        return out


def rows() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)  # those of the process must not move
    return torch.randn(20, 5, generator=rng), torch.randint(0, 3, (20,), generator=rng)


def timed(model: Model, n: int = 8, available: int | None = 0, inputs: Any = None) -> float | None:
    step_inputs = inputs_of(model, F.cross_entropy)
    batch = step_inputs.batch(*rows()) if inputs is None else step_inputs.batch(inputs, None)
    return seconds_of_step(step_inputs, batch, step_inputs.modules(), planned(n, available))


def planned(n: int, available: int | None = 0) -> RunPlan:
    memory = Memory(1, "given", 1, (), 1, 1, "told", waiting_capacity=available)
    return RunPlan(n, False, memory, coupled=False, loss="")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each step that is run looks like."""
    found, run = [], Runner.run

    def watched(self: Runner, step: Step, *rest: Any) -> Tensor:
        found.append((step.lanes, step.count, step.lane_bytes, step.budgeted))
        return run(self, step, *rest)

    monkeypatch.setattr(Runner, "run", watched)
    return found


@pytest.mark.parametrize("available", [0, None])
def test_all_of_a_step_is_run_in_lanes_and_put_back(ran: list[Any], available: int | None) -> None:
    model = Model()
    for p in list(model.parameters())[1:]:
        p.grad = torch.ones_like(p)
    before = snapshot(model)
    found = timed(model, 8, available)
    assert found is not None
    assert 0 < found < inf
    assert same(before, snapshot(model))
    assert set(ran) == {(True, 3, available, True)}
    assert len(ran) in (1, 2, 4)  # a long one is not repeated


def test_a_step_that_runs_out_of_memory_takes_for_ever_and_other_errors_go_out() -> None:
    model = Model()
    model.error = MemoryError()
    assert timed(model) == inf
    model.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        timed(model)


def test_undivided_it_is_not_tried_smaller(ran: list[Any]) -> None:
    """Another plan would be needed for that, and it is this one that is timed."""
    model = Model()
    model.error = torch.OutOfMemoryError("full")
    before = snapshot(model)
    assert timed(model, 20) == inf
    assert ran == [(False, 1, 0, True)]
    assert same(before, snapshot(model))


def test_lanes_for_which_there_are_no_threads_take_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(_: threading.Thread) -> None:
        raise MemoryError

    model = Model()
    before = snapshot(model)
    monkeypatch.setattr(threading.Thread, "start", fails)
    no_idle(monkeypatch)
    assert timed(model) == inf
    assert same(before, snapshot(model))


@pytest.mark.parametrize("n", [8, 20])
@pytest.mark.parametrize("there", [False, True])
def test_what_a_loss_closes_over_gets_nothing(n: int, there: bool) -> None:
    """Four timed steps undivided were added to it: 4.0 of the gradient, and 'exact'."""
    model, head = Model(), nn.Linear(3, 3)
    head.weight.grad = torch.ones(3, 3) if there else None

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(head(out), y)

    step_inputs = inputs_of(model, loss)
    batch, before = step_inputs.batch(*rows()), snapshot(head)
    assert seconds_of_step(step_inputs, batch, step_inputs.modules(), planned(n, None)) is not None
    assert same(before, snapshot(head))


@pytest.mark.parametrize("there", [False, True])
def test_an_undivided_step_that_fails_takes_back_what_a_loss_closes_over(there: bool) -> None:
    """Law 5."""
    model, head = nn.Linear(5, 3), nn.Linear(3, 3)
    head.weight.grad = torch.ones(3, 3) if there else None

    def fails(_: Tensor) -> None:
        raise ZeroDivisionError

    model.weight.register_hook(fails)  # it comes after the head
    before = snapshot(head), snapshot(model)
    engine = Engine(model, lambda out, y: F.cross_entropy(head(out), y), micro_batch=20)
    with pytest.raises(ZeroDivisionError):
        engine.backward(*rows())
    assert same(before[0], snapshot(head))
    assert same(before[1], snapshot(model))


def test_a_batch_that_is_loaded_on_the_way_is_not_run(ran: list[Any]) -> None:
    assert timed(Model(), inputs=LazyBatch(TensorDataset(*rows()))) is None
    assert ran == []
