from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.oracle import same, snapshot
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch.engine.inputs import StepInputs
from anybatch.execution.signature import Case
from anybatch.lockstep.sync_batchnorm import Fixed
from anybatch.loss.tracer import CallableLoss
from anybatch.memory.meter import Meter
from anybatch.planner import rehearsal
from anybatch.planner.probe import ran


class Model(nn.Linear):
    """Runs out of memory at more than `most` rows, and draws."""

    most = 100
    error: Exception = MemoryError()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise self.error
        return F.dropout(super().forward(x))


def case(model: nn.Module, n: int = 24) -> Case:
    step_inputs = StepInputs(model, CallableLoss(F.cross_entropy), None, Fixed("exact"))
    x, y = torch.randn(n, 5), torch.randint(0, 3, (n,))
    return step_inputs.case(step_inputs.batch(x, y), step_inputs.modules(), trains=True)


@pytest.mark.parametrize("there", [False, True])
def test_a_size_that_was_run_leaves_everything_as_it_was(there: bool) -> None:
    model = Model(5, 3)
    for p in model.parameters() if there else ():
        p.grad = torch.ones_like(p)
    before, it = snapshot(model), case(model)
    torch.set_rng_state(before["rng"])
    _, observed = rehearsal.inspect_model(it, 4)
    for n in (1, 5, 24):
        assert ran(it, observed, n)
        assert same(before, snapshot(model))


def test_a_size_that_runs_out_of_memory_says_so_and_other_errors_go_out() -> None:
    model = Model(5, 3)
    it = case(model)
    _, observed = rehearsal.inspect_model(it, 4)
    model.most = 4
    assert not ran(it, observed, 5)
    assert ran(it, observed, 4)
    model.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        ran(it, observed, 5)


@pytest.mark.parametrize("n", [7, 8])
def test_running_a_size_holds_no_copies_of_rows_that_are_there(n: int) -> None:
    make: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Flatten(), nn.Linear(4096, 3))  # noqa: E731
    model = make()
    step_inputs = StepInputs(model, CallableLoss(F.cross_entropy), None, Fixed("exact"))
    x, y = torch.randn(8, 4096), torch.randint(0, 3, (8,))
    it = step_inputs.case(step_inputs.batch(x, y), step_inputs.modules(), trains=True)
    _, observed = rehearsal.inspect_model(it, 4)
    with Meter(torch.device("cpu")) as meter:
        ran(it, observed, n)
    assert meter.peak < x.nbytes + 2 * 4096 * 3 * 4
