from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.oracle import same, snapshot
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch.engine.given import Given
from anybatch.execution.case import Case
from anybatch.lockstep.adaptive import Fixed
from anybatch.loss.watched import Watched
from anybatch.memory.meter import Meter
from anybatch.planner import rehearse
from anybatch.planner.probe import seconds


class Model(nn.Linear):
    """Runs out of memory at more than `most` rows, and draws."""

    most = 100
    error: Exception = MemoryError()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise self.error
        return F.dropout(super().forward(x))


def case(model: nn.Module, n: int = 24) -> Case:
    given = Given(model, Watched(F.cross_entropy), None, Fixed("exact"))
    x, y = torch.randn(n, 5), torch.randint(0, 3, (n,))
    return given.case(given.batch(x, y), given.modules(), trains=True)


@pytest.mark.parametrize("there", [False, True])
def test_a_timed_size_leaves_everything_as_it_was(there: bool) -> None:
    model = Model(5, 3)
    for p in model.parameters() if there else ():
        p.grad = torch.ones_like(p)
    before, it = snapshot(model), case(model)
    torch.set_rng_state(before["rng"])
    _, seen = rehearse.look(it, 4)
    for n in (1, 5, 24):
        found = seconds(it, seen, n)
        assert found is not None
        assert found > 0
        assert same(before, snapshot(model))


def test_a_size_that_runs_out_of_memory_has_no_time_and_other_errors_go_out() -> None:
    model = Model(5, 3)
    it = case(model)
    _, seen = rehearse.look(it, 4)
    model.most = 4
    assert seconds(it, seen, 5) is None
    assert seconds(it, seen, 4) is not None
    model.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        seconds(it, seen, 5)


@pytest.mark.parametrize("n", [7, 8])
def test_timing_holds_no_copies_of_rows_that_are_there(n: int) -> None:
    make: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Flatten(), nn.Linear(4096, 3))  # noqa: E731
    model = make()
    given = Given(model, Watched(F.cross_entropy), None, Fixed("exact"))
    x, y = torch.randn(8, 4096), torch.randint(0, 3, (8,))
    it = given.case(given.batch(x, y), given.modules(), trains=True)
    _, seen = rehearse.look(it, 4)
    with Meter(torch.device("cpu")) as meter:
        seconds(it, seen, n)
    assert meter.peak < x.nbytes + 2 * 4096 * 3 * 4
