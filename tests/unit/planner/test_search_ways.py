"""Saved tensors leave though a step would fit without, where that is faster by known clocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.offloads import link_of
from tests.oracle import assert_exact, same, snapshot, state_after, undivided
from tests.peaks import metered
from tests.planners import instead
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Engine, Plan
from anybatch.errors import BudgetError, StoreError

SIZE = 8
INF = float("inf")


class Clocks:
    """Seconds of steps that are known: resident, with saved tensors offloaded, and of lanes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here: Callable[[int], float] = lambda n: 1.0 + 0.01 * n
        self.offloaded: Callable[[int], float] = lambda n: 1.1 + 0.01 * n
        self.lanes = 5.0
        self.wider = 6.0
        self.link = link_of(1e12, 1e12)
        self.run: list[tuple[int, str]] = []
        self.linked = 0
        self._real = instead(monkeypatch, "took", self._took())
        monkeypatch.setattr("anybatch.engine.step_builder.seconds_of_step", lambda *_: 1.0)
        monkeypatch.setattr("anybatch.planner.offload_memory.clocked", self._clocked)

    def _took(self) -> Callable[..., None]:
        def known(
            planner: Any,
            signature: Any,
            n: int,
            seconds: float | None,
            *,
            failed: bool,
            run_plan: Any = None,
        ) -> None:
            search = planner._search
            if search.trial is not None and seconds is not None:
                place = search.trial.place
                self.run.append((n, place))
                seconds = self.step(n, place, lanes=signature.lanes)
            failed = failed or seconds == INF
            self._real(planner, signature, n, seconds, failed=failed, run_plan=run_plan)

        return known

    def step(self, n: int, place: str, *, lanes: bool) -> float:
        """Return the seconds of a step."""
        if lanes and place != "offloaded":
            return self.wider if place == "paged" else self.lanes
        one = self.here if place == "resident" else self.offloaded
        full, rest = divmod(SIZE, n)
        return full * one(n) + (one(rest) if rest else 0.0)

    def ways(self, place: str) -> list[int]:
        """Return the sizes that were run in a place, each once, in order."""
        return list(dict.fromkeys(n for n, where in self.run if where == place))

    def _clocked(self, *_: Any) -> Any:
        self.linked += 1
        return self.link


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), *(nn.Tanh() for _ in range(15))).double()


def rows() -> tuple[Tensor, Tensor]:
    return torch.randn(SIZE, 256, 16).double(), torch.randn(SIZE, 256, 16).double()


def convolutions() -> nn.Module:
    layers = [
        layer
        for wide in (3, 8)
        for layer in (
            nn.Conv2d(wide, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            *(nn.Tanh() for _ in range(6)),
        )
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(SIZE, 3, 16, 16).double(), torch.randint(0, 8, (SIZE,))


@cache
def tight_budget(make: Callable[[], nn.Module]) -> int:
    """Bytes in which micro-batches of three fit with all of their saved tensors, and no more do."""
    model, loss, batch = parts(make)
    options = {"memory": "1GiB", "timed": False, "micro_batch": 3, "offload": "off"}
    memory = anybatch.plan(model, loss, batch, **options).memory
    assert memory is not None
    return next(c.peak_bytes for c in memory.candidates if c.micro_batch == 3) + 1024


def parts(make: Callable[[], nn.Module]) -> tuple[nn.Module, Any, tuple[Tensor, Tensor]]:
    return (mlp(), F.mse_loss, rows()) if make is mlp else (make(), F.cross_entropy, images())


def step(engine: Engine, batch: Any) -> int:
    """The most bytes that were live in a step, which its plan has foreseen."""
    model = engine.model
    model.zero_grad()
    with metered({"there": [*model.parameters(), *model.buffers()]}) as meter:
        engine.backward(*batch)
    assert engine.last is not None
    assert engine.last.predicted_bytes is not None
    assert engine.plan is not None
    assert engine.plan.memory is not None
    assert meter.peak <= engine.last.predicted_bytes <= engine.plan.memory.budget
    return meter.peak


def test_larger_micro_batches_are_chosen_where_they_are_faster_with_tensors_offloaded(
    clocks: Clocks,
) -> None:
    model, batch = mlp(), rows()
    memory = tight_budget(mlp)
    engine, before = Engine(model, F.mse_loss, memory=memory), snapshot(model)
    plan = engine.foresee(*batch)
    assert same(before, snapshot(model))
    assert plan.memory is not None
    assert plan.offload is not None
    assert (plan.micro_batch, plan.mechanism) == (8, "undivided")
    assert clocks.ways("offloaded") == [4, 8]
    assert Plan.from_json(plan.to_json()) == plan
    text = str(plan)
    assert "saved tensors offloaded; chosen: the fastest timed" in text
    assert "161 % slower" in text  # 3.08 s in threes
    assert "saved tensors offloaded; runner-up: 93 % slower" in text  # 2.28 s in fours
    assert (
        "a step takes 1.18 s in micro-batches of 8 with saved tensors "
        "offloaded, and 3.08 s in micro-batches of 3 without"
    ) in text
    timed = list(clocks.run)
    for n in (8, 6, 3):  # what comes later is not timed
        step(engine, tuple(t[:n] for t in batch))
        assert engine.last is not None
        assert engine.last.micro_batches == 1
        assert (engine.last.moved_bytes > 0) == (n > 3)
    assert clocks.run == timed
    assert engine.plan is not None
    assert replace(engine.plan, loss=plan.loss) == plan  # how it is called undivided


@pytest.mark.parametrize(
    ("offloaded", "tried"),
    [
        (lambda n: 0.5 + 1.02 * n, [4]),
        (lambda n: 9.0 + 1.02 * n, [4]),
        (lambda n: 1.8 if n < SIZE else 9.0, [4, 8]),  # one that is close tells not of others
    ],
)
def test_all_stays_where_that_is_faster(
    clocks: Clocks, offloaded: Callable[[int], float], tried: list[int]
) -> None:
    clocks.offloaded = offloaded
    model, batch = mlp(), rows()
    memory = tight_budget(mlp)
    plan = anybatch.plan(model, F.mse_loss, batch, memory=memory)
    assert clocks.ways("offloaded") == tried
    assert plan.offload is None
    assert (plan.micro_batch, plan.mechanism) == (3, "streaming")
    text = str(plan)
    assert "saved tensors offloaded; " in text
    assert "3 without" in text
    assert Plan.from_json(plan.to_json()) == plan


def test_the_gradient_of_a_plan_that_was_chosen_so_is_that_of_the_batch(clocks: Clocks) -> None:
    model, batch = mlp(), rows()
    memory = tight_budget(mlp)
    clocks.offloaded = lambda n: 1.1 if n < SIZE else 9.0
    engines: list[Engine] = []

    def run(ours: nn.Module) -> Tensor:
        engines.append(Engine(ours, F.mse_loss, memory=memory))
        for _ in range(9):  # steps that train
            engines[0].backward(*batch)
            ours.zero_grad()
        return engines[0].backward(*batch)

    assert_exact(state_after(model, run), undivided(model, F.mse_loss, *batch))
    assert engines[0].last is not None
    assert engines[0].last.micro_batch == 4
    assert engines[0].last.moved_bytes > 0


@pytest.mark.large(few=2)
@pytest.mark.parametrize(
    ("lanes", "wider", "full", "chosen"),
    [
        (5.0, None, 1.2, SIZE),  # the full batch with all away
        (INF, None, 1.2, SIZE),
        (1.0, 6.0, 1.2, 3),
        (1.0, 0.8, 1.2, 4),  # lanes that leave while they run
        (0.8, INF, 1.2, 3),
        (INF, 0.8, INF, 4),
    ],
)
def test_lanes_against_wider_ones_and_the_whole_batch_with_all_away(
    clocks: Clocks, lanes: float, wider: float | None, full: float, chosen: int
) -> None:
    """Wider lanes move more, and are not tried (None) where the whole batch is faster."""
    mechanism = "lockstep" if chosen < SIZE else "undivided"
    clocks.lanes, clocks.wider, clocks.offloaded = lanes, wider or INF, lambda _: full
    clocks.here = lambda n: 0.2 + 0.01 * n
    model, batch = convolutions(), images()
    memory = tight_budget(convolutions)
    engine = Engine(model, F.cross_entropy, memory=memory)
    plan = engine.foresee(*batch)
    assert clocks.ways("paged") == ([] if wider is None else [4])
    assert clocks.ways("offloaded") == [SIZE]
    assert (plan.mechanism, plan.micro_batch) == (mechanism, chosen)
    assert (plan.offload is not None) == (chosen > 3)
    assert plan.memory is not None
    found = {(c.micro_batch, c.offloaded): c.seconds for c in plan.memory.candidates}
    assert found[SIZE, True] == (full if full < INF else None)
    assert found[3, False] == (lanes if lanes < INF else None)
    assert found.get((4, True)) == (wider if wider != INF else None)
    state = state_after(model, lambda m: Engine(m, F.cross_entropy, plan=plan).backward(*batch))
    assert_exact(state, undivided(model, F.cross_entropy, *batch))
    for n in (8, 7):
        step(engine, tuple(t[:n] for t in batch))
        assert engine.plan is not None
        assert engine.plan.mechanism == mechanism


def test_lanes_that_move_are_the_largest(clocks: Clocks) -> None:
    """Smaller lanes move more, so none of them is run."""
    clocks.lanes = 0.5
    model, batch = convolutions(), images()
    engine = Engine(model, F.cross_entropy, memory=tight_budget(convolutions))
    step(engine, batch)
    assert engine.plan is not None
    assert engine.plan.memory is not None
    assert engine.plan.memory.waiting_capacity is not None
    for _ in range(5):
        step(engine, batch)
    assert clocks.ways("resident") == [3]


def flat(n: int) -> float:
    return 1.0 * n


@pytest.mark.parametrize(
    ("options", "here", "link", "linked"),
    [
        ({}, flat, link_of(1e12, 1e12), 0),  # a sample costs the same at every size
        ({}, None, link_of(1e4, 1e4), 1),  # what is too much would take minutes
        ({"offload": "off"}, None, link_of(1e12, 1e12), 0),
        ({"timed": False}, None, link_of(1e12, 1e12), 0),
        ({"micro_batch": 3}, None, link_of(1e12, 1e12), 0),
    ],
)
def test_nothing_is_tried_that_cannot_win_or_was_not_requested(
    clocks: Clocks,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    here: Callable[[int], float] | None,
    link: Any,
    linked: int,
) -> None:
    clocks.here, clocks.link = here or clocks.here, link
    model, batch = mlp(), rows()
    memory = tight_budget(mlp)
    monkeypatch.setattr("anybatch.planner.offload_memory.rehearse_offloaded", None)  # nor rehearsed
    plan = anybatch.plan(model, F.mse_loss, batch, memory=memory, **options)
    assert clocks.ways("offloaded") == []
    assert clocks.linked == linked
    assert plan.offload is None
    assert not any(c.offloaded for c in plan.memory.candidates) if plan.memory else False


def test_small_tensors_are_not_even_thought_of(
    clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anybatch.planner.offload_memory.rehearse_offloaded", None)
    model, batch = (
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)),
        (
            torch.randn(40, 8),
            torch.randint(0, 3, (40,)),
        ),
    )
    plan = anybatch.plan(model, F.cross_entropy, batch, memory="8KiB")
    assert plan.mechanism == "streaming"
    assert (clocks.ways("offloaded"), clocks.linked) == ([], 0)


@pytest.mark.parametrize("error", [StoreError("full"), BudgetError("x", needed=2, budget=1)])
def test_where_there_is_no_space_after_all_it_stays(
    clocks: Clocks, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr("anybatch.planner.offload_memory.OffloadedSizes.planned", fails)
    model, batch = mlp(), rows()
    memory = tight_budget(mlp)
    engine = Engine(model, F.mse_loss, memory=memory)
    for _ in range(10):
        step(engine, batch)
        assert engine.plan is not None
        assert engine.plan.offload is None
    assert engine.plan is not None
    assert engine.plan.micro_batch == 3
    assert clocks.ways("offloaded") == []


def test_nothing_goes_to_a_file_system_that_is_memory(
    clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a step would be faster so: what moves there frees no memory."""
    monkeypatch.setattr("anybatch.memory.stores.in_memory", lambda _: True)
    model, batch = mlp(), rows()
    engine = Engine(model, F.mse_loss, memory=tight_budget(mlp))
    for _ in range(9):
        step(engine, batch)
    assert engine.plan is not None
    assert engine.plan.offload is None
    assert clocks.ways("offloaded") == []


def test_the_first_time_that_something_leaves_one_line_says_how_much_and_where(
    clocks: Clocks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    monkeypatch.setattr("anybatch.engine.engine.say", said.append)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model, batch = mlp(), rows()
    engine = Engine(model, F.mse_loss, memory=tight_budget(mlp))
    for _ in range(10):
        step(engine, batch)
    assert clocks.ways("offloaded") == [4, 8]
    (line,) = said
    assert f" leave for a file in {tmp_path} in a step and return" in line


def test_a_cold_size_is_run_again_before_anything_is_offloaded(clocks: Clocks) -> None:
    """A first step warms up: as the only one of its size it makes larger ones look cheap."""
    cold = set[int]()

    def here(n: int) -> float:
        first = n == 1 and n not in cold
        cold.add(n)
        return (1.5 if first else 0.36) * (0.1 + n)

    clocks.here = here
    engine, batch = Engine(mlp(), F.mse_loss, memory=tight_budget(mlp)), rows()
    for _ in range(10):
        engine.backward(*batch)
    assert clocks.run.count((1, "resident")) == 2
    assert clocks.ways("offloaded") == []
    assert engine.plan is not None
    assert engine.plan.micro_batch == 2
