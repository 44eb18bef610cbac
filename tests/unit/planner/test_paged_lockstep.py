"""Lanes of which not even one fits: the one that runs gives memory away between its kernels."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.busy import busy
from tests.oracle import assert_exact, same, snapshot, state_after, undivided
from tests.peaks import metered
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Engine, Plan
from anybatch.errors import BudgetError, StoreError
from anybatch.memory.stores import FileStore

SIZE = 6


def network(width: int = 8) -> nn.Module:
    """Layers enough between two BatchNorms that one turn of a lane holds many tensors."""
    layers: list[nn.Module] = []
    for before in (3, width):
        layers += [nn.Conv2d(before, width, 3, padding=1), *(nn.Tanh() for _ in range(5))]
        layers += [nn.BatchNorm2d(width)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()


def images(n: int = SIZE) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, 16, 16).double(), torch.randint(0, 8, (n,))


def contrast(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that couples all samples."""
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(targets)))


def plan(model: nn.Module, loss: Any, batch: Any, **options: Any) -> Plan:
    return anybatch.plan(model, loss, batch, **({"timed": False} | options))


def floor(model: nn.Module, loss: Any, batch: Any, micro_batch: int) -> int:
    """Bytes of which a refusal says that lanes of so many samples need them."""
    with pytest.raises(BudgetError, match="a kernel does not need offloaded") as error:
        plan(model, loss, batch, memory=1024, micro_batch=micro_batch)
    return error.value.needed


def step(engine: Engine, batch: Any) -> int:
    """The most bytes that were live in a step."""
    model = engine.model
    model.zero_grad()
    with metered({"there": [*model.parameters(), *model.buffers()]}) as meter:
        engine.backward(*batch)
    return int(meter.peak)


@pytest.mark.large(few=1)
@pytest.mark.parametrize("loss", [F.cross_entropy, contrast])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_step_below_one_lane_is_exact_and_within_its_budget(n: int, loss: Any) -> None:
    model, batch = network(), images()
    low = floor(model, loss, batch, n)
    memory = plan(model, loss, batch, memory="1GiB", micro_batch=n, offload="off").memory
    assert memory is not None
    high = next(c.peak_bytes for c in memory.candidates if c.micro_batch == n)
    assert low < 0.8 * high
    want = state_after(model, lambda m: Engine(m, loss, micro_batch=n).backward(*batch))
    for memory in (low, (low + high) // 2):
        before = snapshot(model)
        found = plan(model, loss, batch, memory=memory, micro_batch=n)
        assert same(before, snapshot(model))
        assert (found.mechanism, found.micro_batch) == ("lockstep", n)
        assert found.offload is not None
        assert found.offload.sent > 0
        assert Plan.from_json(found.to_json()) == found
        assert "are offloaded in a step and return" in str(found)
        engine = Engine(copy.deepcopy(model), loss, plan=found)
        for _ in range(2):
            held = step(engine, batch)
            assert engine.last is not None
            assert engine.last.predicted_bytes is not None
            assert held <= engine.last.predicted_bytes <= memory
            assert engine.last.moved_bytes > 0
        got = state_after(model, lambda m, p=found: Engine(m, loss, plan=p).backward(*batch))
        assert all(torch.equal(got[name], want[name]) for name in want)
    assert_exact(got, undivided(model, loss, *batch))
    with pytest.raises(BudgetError, match=f'memory="{-(-low // 1024)}KiB" or more'):
        Engine(model, loss, memory=low - 1, micro_batch=n).backward(*batch)


def spread(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that couples all samples, and makes far more than any of its kernels needs."""
    for _ in range(12):
        outputs = (outputs - outputs.mean(0)).tanh()
    return contrast(outputs.flatten(1), targets)


@pytest.mark.large(few=1)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
def test_what_a_loss_of_all_outputs_makes_leaves_too(share: float) -> None:
    model, (x, _) = network()[:-2], images()
    batch = x, torch.zeros(len(x))
    low = floor(model, spread, batch, 1)
    retained = plan(model, spread, batch, memory="1GiB", micro_batch=1, offload="off").memory
    assert retained is not None
    assert low < 0.6 * retained.predicted
    memory = low + int(share * (retained.predicted - low))
    found = plan(model, spread, batch, memory=memory, micro_batch=1, offload="file")
    assert (found.mechanism, found.micro_batch) == ("lockstep", 1)
    engine = Engine(copy.deepcopy(model), spread, plan=found)
    held = step(engine, batch)
    assert engine.last is not None
    assert engine.last.predicted_bytes is not None
    assert held <= engine.last.predicted_bytes <= memory
    got = state_after(model, lambda m: Engine(m, spread, plan=found).backward(*batch))
    assert_exact(got, undivided(model, spread, *batch))


def test_where_nothing_else_fits_the_engine_takes_them_by_itself_and_draws_the_step() -> None:
    model, batch = network(), images()
    memory = floor(model, F.cross_entropy, batch, 1) + 2048
    engine = Engine(copy.deepcopy(model), F.cross_entropy, memory=memory)
    foreseen, drawn = engine.foresee(*batch).memory, engine.timeline()
    assert drawn is not None
    assert foreseen is not None
    assert drawn.peak == foreseen.predicted <= drawn.budget == memory
    assert "lanes" in drawn.ledger.owners
    for n in (SIZE, SIZE - 1):
        assert step(engine, tuple(t[:n] for t in batch)) <= memory
        assert engine.last is not None
        assert (engine.last.micro_batch, engine.last.micro_batches) == (1, n)
    assert engine.plan is not None
    assert (engine.plan.mechanism, bool(engine.plan.exact)) == ("lockstep", True)
    with pytest.raises(BudgetError, match="in lanes of one sample"):
        Engine(model, F.cross_entropy, memory=memory - 4096).backward(*batch)


def test_the_largest_that_fits_is_chosen() -> None:
    model, batch = network(), images(32)
    lows = {n: floor(model, F.cross_entropy, batch, n) for n in (1, 4, 8)}
    found = plan(model, F.cross_entropy, batch, memory=lows[8] - 1024, offload="file")
    assert (found.mechanism, found.micro_batch) == ("lockstep", 4)
    assert found.memory is not None
    fits = {c.micro_batch: c.peak_bytes for c in found.memory.candidates}
    assert fits[4] == lows[4]
    with pytest.raises(BudgetError, match="give micro_batch=1 or less, or memory="):
        plan(model, F.cross_entropy, batch, memory=lows[1], micro_batch=4)


def test_requested_offload_sends_only_what_does_not_fit() -> None:
    model, batch = network(), images()
    options = {"micro_batch": 2, "offload": "file"}
    found = plan(model, F.cross_entropy, batch, memory="1GiB", **options)
    assert (found.mechanism, found.micro_batch) == ("lockstep", 2)
    assert found.offload is not None
    assert found.offload.sent == 0
    engine = Engine(model, F.cross_entropy, plan=found)
    step(engine, batch)
    assert engine.last is not None
    assert engine.last.moved_bytes == 0


@pytest.mark.large(few=1)
@pytest.mark.parametrize("memory", [None, 24])
def test_what_leaves_goes_to_the_folder_that_was_named(
    memory: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of lanes that wait as of the one that runs."""
    model, batch, folders = network(), images(), list[Path | None]()
    begin = FileStore.__init__

    def noted(self: FileStore, folder: Path | None = None, **options: Any) -> None:
        folders.append(folder)
        begin(self, folder, **options)

    monkeypatch.setattr(FileStore, "__init__", noted)
    low = floor(model, F.cross_entropy, batch, 2)
    high = 3 * low if memory is None else low + memory
    found = plan(model, F.cross_entropy, batch, memory=high, micro_batch=2, spill=tmp_path)
    assert (found.offload is None) == (memory is None)
    engine = Engine(model, F.cross_entropy, memory=high, micro_batch=2)
    engine.foresee(*batch, spill=tmp_path)
    folders.clear()
    step(engine, batch)
    assert engine.last is not None
    assert engine.last.moved_bytes > 0
    assert folders == [tmp_path]


def test_a_write_that_fails_is_said_and_the_next_step_is_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = network(), images()
    low = floor(model, F.cross_entropy, batch, 2)
    found = plan(model, F.cross_entropy, batch, memory=low + 4096, micro_batch=2)
    threads, writing, count = busy(), FileStore.writing, 0

    def fails(self: FileStore, key: Any, storage: Any) -> Any:
        nonlocal count
        count += 1
        work = writing(self, key, storage)

        def late() -> None:
            if count > 20:
                raise StoreError("a write must be whole, and the disk is full")
            work()

        return late

    engine, before = Engine(model, F.cross_entropy, plan=found), snapshot(model)
    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "writing", fails)
        with pytest.raises(StoreError, match="disk is full"):
            engine.backward(*batch)
    assert same(before, snapshot(model))
    assert busy() == threads
    got = state_after(model, lambda m: Engine(m, F.cross_entropy, plan=found).backward(*batch))
    assert_exact(got, undivided(model, F.cross_entropy, *batch))


def test_no_space_is_noticed_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = network(), images()
    low = floor(model, F.cross_entropy, batch, 2)
    found = plan(model, F.cross_entropy, batch, memory=low + 4096, micro_batch=2)
    engine, before = Engine(model, F.cross_entropy, plan=found), snapshot(model)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(StoreError, match="free space there"):
        engine.backward(*batch)
    assert same(before, snapshot(model))


class Reads(nn.Module):
    """Forward reads a value, which no tensor without data has."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * (2.0 if float(x.detach().sum()) < 1e9 else 1.0)


@pytest.mark.parametrize(("n", "offload"), [(2, "file"), (2, "auto"), (SIZE, "file")])
def test_where_nothing_can_be_foreseen_without_memory_lanes_are_offloaded_while_they_wait(
    n: int, offload: str
) -> None:
    model, batch = Reads().double(), images()
    options = {"micro_batch": n, "offload": offload}
    found = plan(model, F.cross_entropy, batch, memory="1GiB", **options)
    assert found.mechanism == ("lockstep" if n < SIZE else "undivided")
    assert (found.offload is None) == (n < SIZE)
    got = state_after(model, lambda m: Engine(m, F.cross_entropy, plan=found).backward(*batch))
    assert_exact(got, undivided(model, F.cross_entropy, *batch))
    with pytest.raises(BudgetError):
        plan(model, F.cross_entropy, batch, memory=1024, **options)


def test_one_sample_is_not_divided() -> None:
    model, batch = network(), images(1)
    with pytest.raises(BudgetError, match="undivided, with all saved tensors offloaded"):
        plan(model, F.cross_entropy, batch, memory=1024, offload="file")


@pytest.mark.large(few=1)
@pytest.mark.parametrize(("size", "micro_batch"), [(5, 2), (5, 3), (5, 4), (7, 3), (7, 6)])
@pytest.mark.parametrize("share", [0.6, 0.8])
def test_a_smaller_last_lane_does_not_stand_for_all(
    size: int, micro_batch: int, share: float
) -> None:
    model, batch = network(), images(size)
    recorded = plan(model, F.cross_entropy, batch, memory="1GiB", micro_batch=micro_batch).memory
    assert recorded is not None
    options: dict[str, Any] = {"micro_batch": micro_batch, "offload": "file"}
    found = plan(model, F.cross_entropy, batch, memory=int(share * recorded.undivided), **options)
    assert found.mechanism == "lockstep"
    assert found.memory is not None
    held = step(Engine(model, F.cross_entropy, plan=found), batch)
    assert held <= found.memory.predicted <= found.memory.budget
