from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.cases import case_of, inspected
from tests.oracle import same, snapshot
from tests.peaks import metered
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.planner import probe
from anybatch.planner.probe import Case, ran


class Model(nn.Linear):
    """Runs out of memory at more than `most` rows, and draws."""

    most = 100
    error: Exception = MemoryError()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise self.error
        return F.dropout(super().forward(x))


def case(model: nn.Module, n: int = 24) -> Case:
    return case_of(model, F.cross_entropy, torch.randn(n, 5), torch.randint(0, 3, (n,)))


@pytest.mark.parametrize("there", [False, True])
def test_a_size_that_was_run_leaves_everything_as_it_was(there: bool) -> None:
    model = Model(5, 3)
    for p in model.parameters() if there else ():
        p.grad = torch.ones_like(p)
    before, it = snapshot(model), case(model)
    torch.set_rng_state(before["rng"])
    observed = inspected(it)
    for n in (1, 5, 24):
        assert ran(it, observed, n)
        assert same(before, snapshot(model))


def test_a_size_that_runs_out_of_memory_says_so_and_other_errors_go_out() -> None:
    model = Model(5, 3)
    it = case(model)
    observed = inspected(it)
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
    x, y = torch.randn(8, 4096), torch.randint(0, 3, (8,))
    it = case_of(model, F.cross_entropy, x, y)
    observed = inspected(it)
    with metered() as meter:
        ran(it, observed, n)
    assert meter.peak < x.nbytes + 2 * 4096 * 3 * 4


def test_a_size_that_was_run_holds_nothing() -> None:
    x, y = torch.randn(24, 5).bfloat16(), torch.randint(0, 3, (24,))
    it = case_of(nn.Linear(5, 3).bfloat16(), F.cross_entropy, x, y)
    observed = inspected(it)
    gc.collect()
    gc.disable()  # what lies in a circle would be found later, and counts until then
    try:
        with metered() as meter:
            ran(it, observed, 2)
        assert meter.live == 0
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("make", "sets"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p), 2),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 3),
    ],
)
def test_the_state_of_an_optimizer_is_foreseen_before_its_first_step(
    make: Callable[..., torch.optim.Optimizer], sets: int
) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = make(model.parameters())
    found = probe.update(optimizer, list(model.modules()))
    assert found is not None
    assert not optimizer.state
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    state = found.final().get("optimizer", 0)
    held = [t for one in optimizer.state.values() for t in one.values() if isinstance(t, Tensor)]
    assert state == sum(t.nbytes for t in held)
    assert state >= sets * sum(p.nbytes for p in model.parameters())


def test_an_optimizer_that_reads_a_value_is_not_rehearsed() -> None:
    model = nn.Linear(3, 3)
    assert probe.update(torch.optim.LBFGS(model.parameters()), [model]) is None


def test_running_a_micro_batch_holds_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan runs must not hold more than what it plans."""
    monkeypatch.setattr("anybatch.loss.contrastive.SIDE", 8)
    parts = {
        name: nn.Sequential(nn.Linear(8, 64), *(nn.Tanh() for _ in range(16))) for name in "ab"
    }
    model, rows = anybatch.Encoders(parts), {name: torch.randn(256, 8) for name in "ab"}
    it = case_of(model, anybatch.contrastive(symmetric=True), rows)
    graph, observed = 16 * 64 * 64 * 4, replace(inspected(it), coupled=True)
    with metered({"parameters": list(model.parameters())}) as meter:
        assert ran(it, observed, 64)
    assert graph < meter.peak < 2 * graph
