"""A vocabulary whose batch fits in parts: in chunks of rows where many more samples fit so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from tests.limits import test_chunked_budget
from tests.limits.test_chunked_budget import (
    KIB,
    D,
    L,
    N,
    Net,
    V,
    loss_fn,
    made,
    small_chunks,
    step,
    truth,
)
from tests.oracle import assert_exact, error_of, state_of, undivided
from tests.peaks import metered
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Engine
from anybatch.errors import BudgetError, NotExactError
from anybatch.loss import chunked_rows
from anybatch.planner import memory_model
from anybatch.planner.decision import Decision

__all__ = ["small_chunks"]


def engine_of(net: nn.Module, *, inside: bool, **options: Any) -> Engine:
    """Return an engine without a clock, which compares at once."""
    return test_chunked_budget.engine_of(net, inside=inside, **{"tune": "off", **options})


@pytest.fixture
def fast_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 rows are as fast as all at once."""
    monkeypatch.setattr(chunked_rows, "BYTES", 128 * KIB)


@pytest.mark.product
@pytest.mark.usefixtures("fast_chunks")
@pytest.mark.parametrize("inside", [True, False])
def test_a_batch_is_in_chunks_where_twice_as_many_samples_fit(*, inside: bool) -> None:
    net, batch = made(inside=inside)
    want = truth(net, batch, inside=inside)
    engine = engine_of(net, inside=inside, memory="7MiB")
    for _ in range(3):
        net.zero_grad()
        loss = step(engine, batch, inside=inside)
        assert engine.plan is not None
        assert engine.plan.memory is not None
        assert engine.last is not None
        assert engine.plan.memory.chunked == 16 * V * 8
        assert engine.plan.micro_batch == N
        assert engine.plan.exact
        assert engine.last.peak_bytes is None or engine.last.peak_bytes <= 7 << 20
        assert_exact(state_of(net, loss), want)
    rows = (batch, None) if inside else batch
    found = anybatch.plan(net, None if inside else loss_fn, rows, memory="7MiB", timed=False)
    assert found.memory is not None
    assert found.memory.chunked == 16 * V * 8


Pace = Callable[[int, int], float]
"""Seconds of a step in micro-batches of so many samples, in chunks of so many bytes."""

PACES: dict[str, tuple[Pace, bool, bool]] = {
    # A micro-batch takes as long with many samples: chunks are tried, and stay.
    "per micro-batch": (lambda n, _: -(-N // n), True, True),
    "per sample": (lambda *_: 1.0, False, False),
    "larger is a little faster": (lambda n, _: 1.0 + 0.05 / n, False, False),
    "chunks cost more than they save": (lambda n, c: -(-N // n) + 9.0 * (c > 0), True, False),
    "chunks save less than noise": (lambda n, c: 3.0 if c else 3.1 if n > 2 else 4.0, True, False),
}
"""Pace, whether chunks are tried, and whether they stay."""


@pytest.fixture
def pace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, bool]:
    """Steps take the seconds of a pace; return whether chunks are tried, and stay."""
    seconds, tried, stay = PACES[request.param]
    place = "anybatch.planner.planner.Planner.took"
    took = resolve_name(place)

    def paced(self: Any, at: Any, n: int, real: float | None, **more: Any) -> None:
        took(self, at, n, real and seconds(n, more["run_plan"].memory.chunked), **more)

    monkeypatch.setattr(place, paced)
    return tried, stay


@pytest.mark.usefixtures("fast_chunks")
@pytest.mark.parametrize("pace", PACES, indirect=True)
def test_chunks_are_tried_where_larger_micro_batches_may_be_clearly_faster(
    pace: tuple[bool, bool], tmp_path: Path
) -> None:
    """Every step is exact and within its budget, and another start goes the same way."""
    tries, stay = pace
    first = None
    for _ in range(2):
        net, batch = made(inside=False)
        want = truth(net, batch, inside=False)
        engine = engine_of(net, inside=False, memory="14MiB", tune="steps", cache=tmp_path)
        used = list[tuple[int, int]]()
        for _ in range(18):
            net.zero_grad()
            with metered({"there": [*net.parameters()]}) as meter:
                loss = engine.backward(*batch)
            assert meter.peak <= 14 << 20
            assert_exact(state_of(net, loss), want)
            assert engine.plan is not None
            assert engine.plan.memory is not None
            used.append((engine.plan.micro_batch, engine.plan.memory.chunked))
        assert len(set(used[-4:])) == 1
        assert used[0][1] == 0
        assert any(chunked for _, chunked in used) == tries
        assert (used[-1][1] > 0) == stay
        assert first in (None, used)
        first = used


@pytest.mark.large(few=2)
@pytest.mark.usefixtures("fast_chunks")
@pytest.mark.parametrize(
    "options",
    [
        {"memory": "60MiB"},
        {"memory": "7MiB", "micro_batch": 2},
        {"memory": "7MiB", "rng": "batch"},
        {"memory": "7MiB", "rungs": ["offload"]},
    ],
)
def test_a_batch_that_fits_is_not_in_chunks(options: dict[str, Any]) -> None:
    net, batch = made(inside=True)
    engine = engine_of(net, inside=True, **options)
    for _ in range(2):
        net.zero_grad()
        step(engine, batch, inside=True)
        assert engine.plan is not None
        assert engine.plan.memory is not None
        assert engine.plan.memory.chunked == 0


def test_chunks_that_save_too_little_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are as fast take 16 and 6 MiB, and all logits 7."""
    monkeypatch.setattr(chunked_rows, "LEAST", 256)
    net, batch = made(inside=True)
    engine = engine_of(net, inside=True, memory="7MiB")
    step(engine, batch, inside=True)
    assert engine.plan is not None
    assert engine.plan.memory is not None
    assert engine.plan.memory.chunked == 0
    assert engine.plan.micro_batch < N


@pytest.fixture
def forecasts(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Bytes of the chunks of each forecast, and of each that is tried on fakes."""
    found: dict[str, list[int]] = {"forecast": [], "_dry_run": []}
    for place, name in (("budget", "forecast"), ("ladder", "_dry_run")):
        real = resolve_name(f"anybatch.planner.{place}:{name}")

        def noted(case: Any, *args: Any, name: str = name, real: Any = real, **more: Any) -> Any:
            found[name].append(case.chunked)
            return real(case, *args, **more)

        monkeypatch.setattr(f"anybatch.planner.{place}.{name}", noted)
    return found


class ReadsWeight(nn.Module):
    """The value of a weight is read, which fakes do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if float(self.weight.detach()) > 0 else x


@pytest.mark.usefixtures("fast_chunks")
@pytest.mark.parametrize("reads", [True, False])
def test_chunks_that_spare_little_are_not_even_foreseen(
    forecasts: dict[str, list[int]], *, reads: bool
) -> None:
    torch.manual_seed(0)
    body = [nn.Linear(8, 512), *(nn.Tanh() for _ in range(12)), nn.Linear(512, 8)]
    net = nn.Sequential(ReadsWeight() if reads else nn.Identity(), *body, nn.Linear(8, 64)).double()
    batch = torch.randn(N, L, 8).double(), torch.randint(64, (N, L))
    engine = engine_of(net, inside=False, memory="9MiB")
    want = undivided(net, loss_fn, *batch)
    assert_exact(state_of(net, engine.backward(*batch)), want)
    assert engine.plan is not None
    assert engine.plan.micro_batch < N
    assert forecasts["forecast"] == [0]


@pytest.mark.usefixtures("fast_chunks")
def test_chunks_of_a_model_that_fakes_cannot_run_are_foreseen_on_real_rows(
    forecasts: dict[str, list[int]],
) -> None:
    net, batch = made(inside=False)
    net.body.append(ReadsWeight().double())
    engine = engine_of(net, inside=False, memory="7MiB")
    want = undivided(net, loss_fn, *batch)
    assert_exact(state_of(net, engine.backward(*batch)), want)
    assert engine.plan is not None
    assert engine.plan.memory is not None
    assert engine.plan.memory.chunked > 0
    assert any(forecasts["forecast"])
    assert not any(forecasts["_dry_run"])


@pytest.mark.usefixtures("fast_chunks")
def test_a_batch_that_fits_no_longer_is_compared_then() -> None:
    net, _ = made(inside=True)
    engine, used = engine_of(net, inside=True, memory="7MiB"), []
    for length in (4, 30, 30, 50):
        torch.manual_seed(length)
        batch = torch.randint(V, (N, length)), torch.randint(V, (N, length))
        want = truth(net, batch, inside=True)
        net.zero_grad()
        loss = step(engine, batch, inside=True)
        assert engine.plan is not None
        assert engine.plan.memory is not None
        used.append(engine.plan.memory.chunked > 0)
        assert_exact(state_of(net, loss), want)
    assert used == [False, True, True, True]


@pytest.mark.large(few=1)
@pytest.mark.parametrize(
    ("rungs", "chunked", "offloads"),
    [(("chunks", "offload"), True, False), (["chunks"], True, False), (["offload"], False, True)],
)
def test_a_rung_that_is_left_out_is_not_planned(rungs: Any, chunked: bool, offloads: bool) -> None:
    """A body whose saved tensors are most of the bytes."""
    torch.manual_seed(0)
    body = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())]
    net = nn.Sequential(nn.Embedding(400, 64), *body, nn.Linear(64, 400)).double()
    batch = torch.randint(400, (2, 300)), torch.randint(400, (2, 300))
    memory = "7MiB"
    engine = engine_of(net, inside=False, memory=memory, rungs=rungs)
    engine.backward(*batch)
    assert engine.plan is not None
    assert engine.plan.memory is not None
    net.zero_grad()
    found = anybatch.plan(net, loss_fn, batch, memory=memory, timed=False, rungs=rungs)
    for plan in (engine.plan, found):
        assert plan.memory is not None
        assert ((plan.memory.chunked > 0), plan.offload is not None) == (chunked, offloads)


def test_no_rungs_are_micro_batches_alone() -> None:
    net, batch = made(inside=True)
    with pytest.raises(BudgetError):
        step(engine_of(net, inside=True, memory="3000KiB", rungs=()), batch, inside=True)
    wrongs: list[Any] = [
        "chunks",
        ["chunk"],
        None,
        5,
        True,
        b"chunks",
        [["chunks"]],
        iter(["chunks"]),
    ]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="rungs must be a collection of some of"):
            engine_of(net, inside=True, rungs=wrong)
        with pytest.raises(ValueError, match="rungs must be a collection of some of"):
            anybatch.plan(net, loss_fn, batch, memory="9MiB", rungs=wrong)
    with pytest.raises(ValueError, match="offloads always"):
        anybatch.plan(net, loss_fn, batch, memory="9MiB", offload="file", rungs=["chunks"])


def test_gradients_that_are_there_may_take_the_place_of_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With them a step fits offloaded only: it is in chunks before, and not with them."""
    monkeypatch.setattr(memory_model, "CHUNKS", ())
    monkeypatch.setattr(chunked_rows, "LEAST", 4096)
    torch.manual_seed(0)
    body = [layer for _ in range(14) for layer in (nn.Linear(64, 64), nn.Tanh())]
    net = nn.Sequential(nn.Embedding(400, 64), *body, nn.Linear(64, 400)).double()
    batch = torch.randint(400, (2, 300)), torch.randint(400, (2, 300))
    want = truth(net, batch, inside=False)
    engine, used = engine_of(net, inside=False, memory="7600KiB"), []
    for times in (1, 2):
        loss = engine.backward(*batch)
        assert engine.plan is not None
        assert engine.plan.memory is not None
        used.append((engine.plan.memory.chunked > 0, engine.plan.offload is not None))
        expected = {k: v if k == "loss" else v * times for k, v in want.items()}
        assert_exact(state_of(net, loss), expected)
    assert used == [(True, False), (False, True)]


@pytest.mark.large(few=1)
@pytest.mark.parametrize("length", [1, 3])
def test_chunks_of_more_rows_than_a_few_samples_have_are_foreseen(length: int) -> None:
    """A classifier of many classes: 16 rows are those of 5 samples, or of 16."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(D, 64), nn.Tanh(), nn.Linear(64, D))
    net = nn.Sequential(nn.Embedding(V, D), body, nn.Linear(D, V)).double()
    batch = torch.randint(V, (300, length)), torch.randint(V, (300, length))
    want = truth(net, batch, inside=False)
    engine = engine_of(net, inside=False, memory="4MiB")
    for _ in range(2):
        net.zero_grad()
        with metered({"there": [*net.parameters()]}) as meter:
            loss = engine.backward(*batch)
        assert meter.peak <= 4 << 20
        assert_exact(state_of(net, loss), want)
    assert engine.plan is not None
    assert engine.plan.memory is not None
    assert engine.plan.memory.chunked == 16 * V * 8
    assert engine.plan.micro_batch > 100


@pytest.mark.parametrize(("transposed", "memory"), [(False, 2), (False, 16), (True, 2)])
def test_a_model_without_a_wide_map_is_not_planned_in_chunks(
    transposed: bool, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A classifier of few classes: its weight is a wide map's only where it is transposed."""
    planned, made_so = set[bool](), Decision.made

    def noted(self: Decision) -> Any:
        planned.add(self._request.chunked > 0)
        return made_so(self)

    class Classifier(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight if transposed else super().forward(x)

    monkeypatch.setattr(Decision, "made", noted)
    net = Classifier(*((8, 64) if transposed else (64, 8)), bias=False)
    if transposed:
        net.weight = nn.Parameter(net.weight.detach().t().contiguous())
    batch = torch.randn(300, len(net.weight if transposed else net.weight.t()))
    engine = engine_of(net, inside=False, memory=f"{memory}KiB")
    with pytest.raises(BudgetError) if memory == 2 else nullcontext():
        engine.backward(batch[:, None], torch.randint(8, (300, 1)))
    assert planned == {False, transposed}


@pytest.mark.usefixtures("fast_chunks")
@pytest.mark.parametrize("error", [KeyboardInterrupt, NotExactError])
def test_a_forecast_in_chunks_that_ends_early_is_none_of_other_steps(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, batch = made(inside=True)
    engine = engine_of(net, inside=True, memory="7MiB")
    made_so = Decision.made

    def ended(self: Decision) -> Any:
        found = made_so(self)
        if self._request.chunked:
            raise error("ended")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Decision, "made", ended)
        with pytest.raises(error) if error is KeyboardInterrupt else nullcontext():
            step(engine, batch, inside=True)
    net.zero_grad()
    want = truth(net, batch, inside=True)
    with metered({"there": [*net.parameters()]}) as meter:
        loss = step(engine, batch, inside=True)
    assert meter.peak <= 7 << 20
    assert engine.plan is not None
    assert engine.plan.memory is not None
    assert (engine.plan.memory.chunked > 0) == (error is KeyboardInterrupt)  # it compares again
    assert_exact(state_of(net, loss), want)


class Penalised(Net):
    """A penalty on gradients of each sample, for which torch differentiates twice."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        h = self.body(self.embedding(x))
        h = h if h.requires_grad else h.detach().requires_grad_()
        with torch.enable_grad():
            z = self.head(h)
            each = F.cross_entropy(z.transpose(1, 2), x, reduction="none")
            (slope,) = torch.autograd.grad(each.sum(), h, create_graph=True)
        return each.mean(1) + slope.square().sum((1, 2))


class Overwritten(Net):
    """Features that are written to once a head without gradients has been computed."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        h = self.body(self.embedding(x))
        z: Tensor = self.head.requires_grad_(requires_grad=False)(h)
        h.mul_(2)
        return z


@pytest.mark.usefixtures("fast_chunks")
@pytest.mark.parametrize(
    ("model", "loss", "memory"),
    [(Penalised, lambda each, _: each.mean(), "9MiB"), (Overwritten, loss_fn, "6MiB")],
)
def test_a_model_that_cannot_be_in_chunks_is_run_without(
    model: Any, loss: Any, memory: str
) -> None:
    torch.manual_seed(0)
    net = model(inside=False).double()
    x, y = torch.randint(V, (N, L)), torch.randint(V, (N, L))
    alone = copy.deepcopy(net)
    want = loss(alone(x), y)
    want.backward()
    engine = Engine(net, loss, memory=memory, cache=None)
    found = engine.backward(x, y)
    assert engine.plan is not None
    assert engine.plan.memory is not None
    assert engine.plan.memory.chunked == 0
    assert engine.plan.micro_batch < N
    errors = error_of(state_of(net, found), state_of(alone, want))
    assert max(errors.values()) < 1e-7, errors  # of a second derivative


def test_more_memory_makes_no_smaller_micro_batches() -> None:
    """A chunk of 16 MiB lets one sample of 60 tokens fit, and the least fast one lets all."""
    torch.manual_seed(0)
    net = Net(inside=False).double()
    batch = torch.randint(V, (5, 60)), torch.randint(V, (5, 60))
    for kib in (7000, 8000, 11242, 17988):
        engine = engine_of(net, inside=False, memory=f"{kib}KiB")
        engine.backward(*batch)
        net.zero_grad()
        assert engine.plan is not None
        assert engine.plan.micro_batch == 5


def test_a_plan_and_rungs_that_forbid_it_are_refused() -> None:
    net, batch = made(inside=True)
    engine = engine_of(net, inside=True, memory="3800KiB")
    step(engine, batch, inside=True)
    with pytest.raises(ValueError, match="it uses chunks"):
        engine_of(net, inside=True, plan=engine.plan, rungs=["offload"])
