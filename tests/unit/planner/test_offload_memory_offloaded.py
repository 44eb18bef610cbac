"""Plans in which saved tensors leave, and the engine that obeys them."""

from __future__ import annotations

import copy
import gc
import re
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.busy import busy
from tests.offloads import file_method, instead, small_leave
from tests.oracle import assert_exact, looks_here, same, snapshot, state_after, undivided
from tests.peaks import metered
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Engine, Plan
from anybatch.errors import BudgetError, StoreError
from anybatch.planner.search import SAME
from anybatch.reports import Memory, OffloadPlan


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_leave(monkeypatch)


def mlp(depth: int = 9, width: int = 16) -> nn.Module:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d((1, width)), nn.Dropout(0.2))


def rows(n: int = 5) -> tuple[Tensor, Tensor]:
    """Samples of many positions: what is saved of them is far more than the weights."""
    return torch.randn(n, 256, 16), torch.randn(n, 1, 16)


def shifted(out: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(out - out.mean(0), y)


def plan(model: nn.Module, loss: Any, batch: Any, **options: Any) -> Plan:
    found = anybatch.plan(model, loss, batch, **({"timed": False} | options))
    model.zero_grad()
    return found


def bounds(model: nn.Module, loss: Any, batch: Any, micro_batch: int = 1) -> tuple[int, int]:
    """What a step holds at least with everything away, and what it holds with nothing away."""
    options = {"micro_batch": micro_batch}
    high = plan(model, loss, batch, memory="1GiB", **options).memory
    with pytest.raises(BudgetError, match="with all saved tensors offloaded") as error:
        plan(model, loss, batch, memory=1024, **options)
    assert high is not None
    return error.value.needed, high.predicted


def steps(engine: Engine, batch: Any, count: int = 3) -> tuple[list[Any], list[int]]:
    """What each step leaves, and the most bytes that were live in it."""
    model, found, held = engine.model, [], []
    torch.manual_seed(1)
    for _ in range(count):
        model.zero_grad()
        with metered({"there": [*model.parameters(), *model.buffers()]}) as meter:
            engine.backward(*batch)
        held.append(meter.peak)
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append(grads + [b.clone() for b in model.buffers()])
    model.zero_grad()
    return found, held


def alike(a: list[Any], b: list[Any]) -> bool:
    return all(
        torch.equal(x, y)
        for one, two in zip(a, b, strict=True)
        for x, y in zip(one, two, strict=True)
    )


def by_hand(
    available: int, micro_batch: int = 1, way: str = "streaming", folder: Any = None
) -> Plan:
    """A plan that gives every micro-batch so much room, whatever it needs."""
    lots = 1 << 30
    memory = Memory(lots, "by hand", lots, (), 1, 1, "nobody")
    offloaded = OffloadPlan(
        "file", None if folder is None else str(folder), (available, available), 0, 0, 1
    )
    return Plan(micro_batch, way, "in place", "", True, (), memory, offload=offloaded)


ROOMS = (0, 60 << 10, 1 << 30)
"""Bytes: everything leaves and returns on demand; some leaves, as planned; nothing does."""


@pytest.mark.parametrize("size", [1, 2, 7])
def test_gradients_are_bit_for_bit_those_without_it(size: int) -> None:
    model, batch = mlp(), rows()
    wanted, _ = steps(Engine(copy.deepcopy(model), F.mse_loss, micro_batch=size), batch)
    moved = []
    for available in ROOMS:
        engine = Engine(copy.deepcopy(model), F.mse_loss, plan=by_hand(available * size, size))
        found, _ = steps(engine, batch)
        assert alike(found, wanted)
        assert engine.last is not None
        moved.append(engine.last.moved_bytes)
    assert moved[0] > moved[1] > moved[2] == 0


@pytest.mark.parametrize("size", [1, 4])
def test_a_coupled_loss_takes_its_second_pass_with_all_offloaded(size: int) -> None:
    model, batch = mlp().double(), tuple(t.double() for t in rows())
    model[-1].p = 0.0
    found: list[Any] = []
    for available in ROOMS:
        made = by_hand(2 * available * size, size, "two-pass")
        found.append(steps(Engine(copy.deepcopy(model), shifted, plan=made), batch)[0])
        state = state_after(model, lambda m, p=made: Engine(m, shifted, plan=p).backward(*batch))
        assert_exact(state, undivided(model, shifted, *batch))
    assert alike(found[0], found[1])
    assert alike(found[1], found[2])


def test_a_step_that_fits_in_no_other_way_keeps_to_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A busy machine measures a slow link, and kernels are run again instead.
    link = SimpleNamespace(out=1e9, back=1e9)
    monkeypatch.setattr("anybatch.planner.offload_memory.clocked", lambda *_: link)
    model, batch = mlp(), rows(3)
    low, high = bounds(model, F.mse_loss, batch)
    assert low < 0.7 * high
    memory = (low + high) // 2
    before = snapshot(model)
    with pytest.raises(BudgetError, match="with micro-batches of one sample, with all saved"):
        Engine(model, F.mse_loss, memory=low - 1).backward(*batch)
    assert same(before, snapshot(model))
    found = plan(model, F.mse_loss, batch, memory=memory)
    assert found.micro_batch == 1  # the same room keeps the most of the smallest
    assert Plan.from_json(found.to_json()) == found
    text = str(found)
    assert "are offloaded in a step and return; a micro-batch saves" in text
    assert "a file without a name in the system folder" in text
    assert "s a step, predicted" in text
    engine = Engine(model, F.mse_loss, plan=Plan.from_json(found.to_json()))
    _, held = steps(engine, batch)
    assert engine.last is not None
    assert engine.last.predicted_bytes is not None
    assert max(held) <= engine.last.predicted_bytes <= memory
    assert engine.last.predicted_bytes <= 1.1 * max(held)
    assert engine.last.moved_bytes > 0
    made = engine.plan
    assert made == replace(found, exact=made.exact, reasons=made.reasons)
    assert made.reasons[: len(found.reasons)] == found.reasons


def test_the_engine_finds_the_size_by_itself_in_steps_that_train() -> None:
    model, batch = mlp(), rows(6)
    low, high = bounds(model, F.mse_loss, batch)
    memory = (low + 2 * high) // 3
    engine = Engine(model, F.mse_loss, memory=memory)
    plans = []
    for n, count in ((6, 10), (4, 2)):  # a last partial batch is planned with what is known
        part = (batch[0][:n], batch[1][:n])
        for _ in range(count):
            _, held = steps(engine, part, 1)
            assert engine.last is not None
            assert engine.last.predicted_bytes is not None
            assert max(held) <= engine.last.predicted_bytes <= memory
        plans.append(engine.plan)
    found = plans[0]
    assert found is not None
    assert found.offload is not None
    assert found.memory is not None
    timed = {c.micro_batch: c.seconds for c in found.memory.candidates if c.seconds is not None}
    assert timed[found.micro_batch] <= SAME * min(timed.values())
    assert engine._planner is not None
    assert engine._planner._foreseen.rehearsed == 1


def test_what_is_requested_must_be_there(tmp_path: Path) -> None:
    model, batch = mlp(), rows()
    (tmp_path / "file").write_text("")
    for options, match in [
        ({"offload": "disk"}, "offload must be one of auto, off, host, file, and it is 'disk'"),
        ({"offload": "host"}, 'offload must be "file" on cpu'),
        ({"spill": tmp_path / "gone"}, "it is not there"),
        ({"spill": tmp_path / "file"}, "it is no folder"),
        ({"spill": tmp_path, "offload": "off"}, 'nothing goes to a file with offload="off"'),
    ]:
        with pytest.raises(ValueError, match=match):
            plan(model, F.mse_loss, batch, memory="1MiB", **options)


def test_no_space_is_noticed_before_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = mlp(), rows()
    engine, before = Engine(model, F.mse_loss, plan=by_hand(0, folder=tmp_path)), snapshot(model)
    ran: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: ran.append(1))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
        with pytest.raises(StoreError, match="an offloaded tensor must fit in its store"):
            engine.backward(*batch)
    handle.remove()
    assert ran == []
    assert same(before, snapshot(model))
    engine.backward(*batch)
    with pytest.raises(StoreError, match="the folder of the spill file must be there"):
        Engine(model, F.mse_loss, plan=by_hand(0, folder=tmp_path / "gone")).backward(*batch)


@pytest.mark.parametrize("place", ["write", "read", "forward", "interrupt"])
def test_a_step_that_fails_leaves_no_trace(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch, found = mlp(), rows(), by_hand(60 << 10, folder=tmp_path)
    wanted, _ = steps(Engine(copy.deepcopy(model), F.mse_loss, micro_batch=1), batch, 1)
    engine, threads = Engine(model, F.mse_loss, plan=found), busy()
    for recorded in (False, True):  # while micro-batches are recorded, and while they are planned
        torch.manual_seed(1)
        before = snapshot(model)
        with monkeypatch.context() as patch, pytest.raises(_failing(model, place, patch)):
            engine.backward(*batch)
        assert same(before, snapshot(model)), recorded
        assert busy() == threads
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        engine.backward(*batch)
        grads = [p.grad for p in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(grads, wanted[0], strict=True))
        model.zero_grad()
    held = weakref.ref(engine._runner._keeping[1]._mover)  # type: ignore[index]
    del engine
    gc.collect()
    assert held() is None, "what was raised held the graph, and that what it had saved"
    assert list(tmp_path.iterdir()) == []


def _failing(model: nn.Module, place: str, patch: pytest.MonkeyPatch) -> type[BaseException]:
    """Let a step fail in its third micro-batch, and return the error."""
    calls = 0

    def counted(limit: int, error: BaseException, real: Callable[..., Any]) -> Any:
        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > limit:
                raise error
            return real(*args)

        return call

    if place in ("write", "read"):
        name = "_write" if place == "write" else "_read"
        full = OSError(28, "No space left on device")
        instead(patch, name, counted(12, full, file_method(name)))
        return StoreError
    error = KeyboardInterrupt() if place == "interrupt" else ZeroDivisionError()
    patch.setattr(model[4], "forward", counted(2, error, model[4].forward))
    return type(error)


def test_memory_that_runs_out_all_the_same_costs_a_smaller_try() -> None:
    model, batch = mlp().double(), tuple(t.double() for t in rows(6))
    model[-1].p = 0.0
    found = by_hand(240 << 10, 4)

    class Full(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 2 and not looks_here():  # a look saves nothing
                raise torch.OutOfMemoryError("out of memory")
            return self.inner(x)

    engines: list[Engine] = []

    def run(ours: nn.Module) -> Tensor:
        engines.append(Engine(Full(ours), F.mse_loss, plan=found))
        for _ in range(2):
            ours.zero_grad()
            loss = engines[0].backward(*batch)
        return loss

    state = state_after(model, run)
    assert_exact(state, undivided(model, F.mse_loss, *batch))
    assert engines[0].last is not None
    assert engines[0].last.micro_batch == 2


def normed(depth: int = 5, width: int = 8) -> nn.Module:
    """Layers enough that a lane of one sample saves more than a layer of three samples holds."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Conv1d(width, width, 3, padding=1), nn.BatchNorm1d(width), nn.Tanh()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1)).double()


@pytest.mark.large(few=1)
@pytest.mark.parametrize("share", [0, 0.5])
def test_a_batch_that_meets_in_batchnorm_leaves_whole_where_no_lane_fits(share: float) -> None:
    """At the floor too, where planning inside the first step has a copy of the buffers beside."""
    model = normed()
    x, y = torch.randn(3, 8, 256).double() + 100, torch.randn(3, 8, 1).double()
    needed = []
    for options in ({"offload": "file", "micro_batch": 3}, {"offload": "off"}):
        with pytest.raises(BudgetError) as error:
            plan(model, F.mse_loss, (x, y), memory=1024, **options)
        needed.append(error.value.needed)
    low, lanes = needed
    memory = low + int(share * (lanes - low))
    assert low <= memory < lanes
    want = undivided(model, F.mse_loss, x, y)
    engines: list[Engine] = []

    def run(ours: nn.Module) -> Tensor:
        engines.append(Engine(ours, F.mse_loss, memory=memory))
        before = {name: b.clone() for name, b in ours.named_buffers()}
        for i in range(3):  # recorded, planned, planned
            ours.zero_grad()
            ours.load_state_dict(before, strict=False)
            with metered({"there": [*ours.parameters(), *ours.buffers()]}) as meter:
                loss = engines[0].backward(x, y)
            last = engines[0].last
            assert last is not None
            assert last.moved_bytes + last.remade_bytes > 0
            assert last.predicted_bytes is not None
            assert max(last.predicted_bytes, meter.peak) <= memory
            assert i == 0 or meter.peak <= last.predicted_bytes  # planned in the first
        return loss

    assert_exact(state_after(model, run), want)
    found = engines[0].plan
    assert found is not None
    assert found.offload is not None
    assert (found.micro_batch, found.mechanism) == (3, "undivided")


def test_a_size_that_does_not_fit_is_refused_with_the_largest_that_does() -> None:
    model, batch = mlp(4), rows(7)
    needed = []
    for n in (1, 6):
        with pytest.raises(BudgetError, match="with all saved tensors offloaded") as error:
            plan(model, F.mse_loss, batch, memory=1024, micro_batch=n)
        assert "or less" not in str(error.value)  # not one sample fits
        needed.append(error.value.needed)
    low, high = needed
    memory = low + 7 * (high - low) // 10  # from two samples on a look holds four rows
    with pytest.raises(BudgetError, match="give micro_batch=[0-9]+ or less, or memory=") as error:
        plan(model, F.mse_loss, batch, memory=memory, micro_batch=6)
    hint = re.search(r"micro_batch=(\d+) or less", str(error.value))
    assert hint is not None
    most, inputs = int(hint[1]), error.value.budget
    assert 1 < most < 5
    found = plan(model, F.mse_loss, batch, memory=inputs, micro_batch=most)
    assert found.micro_batch == most
    _, held = steps(Engine(model, F.mse_loss, plan=found), batch, 2)
    assert max(held) <= inputs
    with pytest.raises(BudgetError, match=f"give micro_batch={most} or less"):
        plan(model, F.mse_loss, batch, memory=inputs, micro_batch=most + 1)


def test_a_plan_that_sends_elsewhere_than_the_device_does_is_refused() -> None:
    model, batch = mlp(), rows()
    made = by_hand(0)
    assert made.offload is not None
    before = snapshot(model)
    elsewhere = replace(made, offload=replace(made.offload, store="host"))
    with pytest.raises(ValueError, match="by this one saved tensors go to page-locked memory"):
        Engine(model, F.mse_loss, plan=elsewhere).backward(*batch)
    assert same(before, snapshot(model))


@pytest.mark.large(few=1)
@pytest.mark.parametrize("size", [2, 3], ids=["divided", "undivided"])
def test_the_timeline_of_a_plan_is_what_leaves_and_returns(size: int) -> None:
    model, batch = mlp(), rows(3)
    low, high = bounds(model, F.mse_loss, batch, size)
    engine = Engine(model, F.mse_loss, memory=(low + high) // 2, micro_batch=size)
    found = engine.foresee(*batch, timed=False, offload="file")
    reported = engine.timeline()
    assert reported is not None
    assert found.memory is not None
    assert found.offload is not None
    assert (reported.peak, reported.budget) == (found.memory.predicted, found.memory.budget)
    for back in (False, True):
        assert sum(move.size for move in reported.moved(back=back)) == found.offload.sent
    assert found.offload.sent or found.offload.remade  # by the measured link and kernels
    assert reported.stall >= 0
    assert reported.seconds is not None
    assert list(reported.seconds) == sorted(reported.seconds)
    assert reported.runs[-1].end <= reported.end
    assert ("in 2 micro-batches of 2" in reported.title) == (size == 2)
    names = [phase.name for phase in reported.phases]
    assert names[: 4 - size] == ["micro-batch 1", "micro-batch 2"][: 4 - size]
    obeying = Engine(model, F.mse_loss, plan=found)
    obeying.backward(*batch)
    assert obeying.timeline() is None


class Rows(nn.Module):
    """Samples of a few sequences: two undivided need less than one beside sums of gradients."""

    def __init__(self, class_: type[nn.RNNBase]) -> None:
        super().__init__()
        self.body, self.head = class_(8, 24, batch_first=True), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.body(x.flatten(0, 1))[0].mean(1)
        return self.head(found).view(*x.shape[:2], 3).mean(1)


def _convolutions(norm: Callable[[], nn.Module]) -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, padding=1), norm(), nn.ReLU(), nn.Conv2d(8, 8, 3), norm()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


SEQUENCES, IMAGES = (32, 4, 8), (3, 24, 24)
NEEDY: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "GRU": (lambda: Rows(nn.GRU), SEQUENCES, 2),
    "LSTM": (lambda: Rows(nn.LSTM), SEQUENCES, 2),
    "RNN": (lambda: Rows(nn.RNN), SEQUENCES, 2),
    "one sample": (lambda: Rows(nn.GRU), SEQUENCES, 1),
    "many samples": (lambda: Rows(nn.GRU), SEQUENCES, 7),
    "convolutions": (lambda: _convolutions(nn.Identity), IMAGES, 5),
    "in lanes": (lambda: _convolutions(lambda: nn.BatchNorm2d(8)), IMAGES, 5),
    "layers": (lambda: nn.Sequential(nn.Linear(8, 900), nn.ReLU(), nn.Linear(900, 3)), (8,), 7),
}


@pytest.mark.large(few=1)
@pytest.mark.parametrize("name", NEEDY)
def test_what_is_said_to_be_needed_runs_and_no_less_does(name: str) -> None:
    make, shape, samples = NEEDY[name]
    model, loss_fn = make().double(), nn.CrossEntropyLoss()
    batch = torch.randn(samples, *shape, dtype=torch.float64), torch.arange(samples) % 3

    def planned(memory: int) -> Plan:
        return anybatch.plan(model, loss_fn, batch, memory=memory, timed=False)

    with pytest.raises(BudgetError) as error:
        planned(1000)
    needed = error.value.needed
    for memory in (needed - 1, int(0.93 * needed)):
        with pytest.raises(BudgetError) as error:
            planned(memory)
        assert error.value.needed == needed
    plan = planned(needed)
    assert plan.memory is not None
    assert plan.memory.floor <= plan.memory.predicted <= needed
    truth = undivided(model, loss_fn, *batch)
    engine = Engine(model, loss_fn, memory=needed)
    assert_exact(
        state_after(model, lambda ours: Engine(ours, loss_fn, plan=plan).backward(*batch)), truth
    )
    engine.backward(*batch)
    assert engine.last is not None
    assert engine.last.peak_bytes is None or engine.last.peak_bytes <= needed
