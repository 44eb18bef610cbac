from __future__ import annotations

import copy
import gc
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.busy import busy
from tests.offloads import slow_link, small_leave
from tests.unit.memory.copies import stores
from tests.unit.offloading.steps import (
    CPU,
    LOTS,
    NAMES,
    TELLS,
    bounds,
    equal,
    held,
    mlp,
    network,
    offloaded,
    plain,
    states,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import anybatch
from anybatch.errors import BudgetError, StoreError
from anybatch.offloading import saved_tensors
from anybatch.reports import Offload


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_leave(monkeypatch)


def offload(memory: int = LOTS, **options: Any) -> anybatch.reports.Offload:
    return anybatch.offload(memory=memory, device="cpu", **options)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    before, files = busy(), _files()
    yield
    if set(_files()) > set(files):
        gc.collect()
    assert busy() == before
    assert set(_files()) <= set(files)


def _files() -> list[str]:
    """The spill files that this process holds open."""
    links = Path("/proc/self/fd").iterdir()
    return sorted(name for link in links if "anybatch-" in (name := _target(link)))


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


@pytest.mark.large(few=2)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_without_it_and_the_budget_is_respected(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, loss_fn, (x, y) = network(name)

    def step(ours: nn.Module) -> None:
        loss_fn(ours(x), y).backward()

    wanted = plain(model, step, 3)
    low, high = bounds(model, step)
    assert high > low
    middle = (low + high) // 2
    for memory, slow in ((low, False), (middle, False), (middle, True), (high, True)):
        slow_link(monkeypatch, 1e3 if slow else 1e15)
        off, ours = offload(memory), copy.deepcopy(model)
        torch.manual_seed(1)
        for one in wanted:
            ours.zero_grad()

            def once(off: Any = off, ours: nn.Module = ours) -> None:
                with off:
                    step(ours)

            most = held(ours, (x, y), once)
            assert equal(states(ours), one)
            assert off.last is not None
            assert off.last.predicted_bytes is not None
            assert most <= off.last.predicted_bytes <= memory
        if memory > low:
            assert off.last.mode == "planned"
        assert (off.last.out_bytes + off.last.remade_bytes > 0) == (memory < high)
        assert (off.last.remade_bytes > 0) == (slow and memory < high and name != "LSTM" and TELLS)


def test_less_than_the_floor_is_refused_with_what_is_needed() -> None:
    model, x = mlp()
    low, _ = bounds(model, lambda ours: ours(x).sum().backward())
    off = offload(low - 1)
    match = "with all saved tensors offloaded it holds"
    with pytest.raises(BudgetError, match=match) as error, off:
        model(x).sum().backward()
    assert (error.value.needed, error.value.budget) == (low, low - 1)
    assert model[0].weight.grad is not None


def test_gradients_that_are_there_count() -> None:
    model, x = mlp(width=64, rows=256)

    def step(ours: nn.Module) -> None:
        ours(x).sum().backward()

    _, high = bounds(model, step)
    off = offload(high)
    for _ in range(3):  # never set to zero: from the second step on gradients are there before
        assert held(model, (x,), lambda: _in(off, lambda: step(model))) <= high
        extra = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert off.last is not None
    assert off.last.mode == "planned"
    assert off.last.out_bytes > 0
    assert extra > 0


def test_where_gradients_may_not_fit_the_step_is_recorded_again() -> None:
    model, x = mlp()
    low, _ = bounds(model, lambda ours: ours(x).sum().backward())
    off = offload(low)
    _in(off, lambda: model(x).sum().backward())
    with pytest.raises(BudgetError, match="a step must fit in memory"):
        _in(off, lambda: model(x).sum().backward())
    assert off.last is not None
    assert off.last.mode == "recorded"


def _in(off: anybatch.reports.Offload, body: Callable[[], Any]) -> None:
    with off:
        body()


def test_weights_inputs_and_what_was_there_remain() -> None:
    model, x = mlp(depth=1)
    table = torch.randn(32, 32)
    off = offload()
    with off:
        y = torch.tanh(x @ table)  # inputs and a table: no gradient is wanted of them
        (model[0](x).sum() + (model[0].weight * table).sum() + y.sum()).backward()
    assert off.last is not None
    assert off.last.out_bytes == 0

    with off, torch.autocast("cpu", torch.bfloat16):
        model[0](x).float().sum().backward()
    assert off.last.out_bytes <= x.nbytes  # its copy in bfloat16, and not the weight's
    off.close()


def test_a_storage_moves_once_however_many_views_are_saved() -> None:
    w = torch.randn(16, 16, requires_grad=True)
    off = offload()
    with off:
        a = w * 2  # its storage is saved five times
        loss = a.sin().sum() + (a.t() @ a).sum() + (a[2:] * a[:-2]).sum()
        loss.backward()
    assert off.last is not None
    assert off.last.out_bytes == a.nbytes


def test_a_write_after_saving_is_found() -> None:
    for when in ("before it leaves", "after it has left"):
        off, w = offload(), torch.randn(16, 16, requires_grad=True)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"), off:
                a = w * 2
                loss = a.sin().sum()
                if when == "after it has left":
                    (w * 3).sin().sum().backward()
                a.add_(1)
                loss.backward()
    small = torch.randn(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), offload():
        a = small * 2
        loss = a.sin().sum()
        a.add_(1)
        loss.backward()


def test_in_place_layers_are_no_writes_after_saving() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    x = torch.randn(5, 8)

    def step(ours: nn.Module) -> None:
        ours(x).sum().backward()

    assert all(
        equal(a, b)
        for a, b in zip(plain(model, step, 3), offloaded(model, step, offload(), 3), strict=True)
    )


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside(reentrant: bool) -> None:
    model, x = mlp(depth=6)
    low, high = _checkpointed_bounds(model, x, reentrant)
    wanted = plain(model, lambda ours: _checkpointed(ours, x, reentrant), 3)
    off = offload((low + high) // 2)
    found = offloaded(model, lambda ours: _checkpointed(ours, x, reentrant), off, 3)
    assert all(equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert off.last is not None
    assert off.last.mode == "planned"


def _checkpointed(model: nn.Module, x: Tensor, reentrant: bool) -> None:
    assert isinstance(model, nn.Sequential)
    h = model[0](x)
    h = checkpoint(model[1:4], h, use_reentrant=reentrant)
    model[4:](h).sum().backward()


def _checkpointed_bounds(model: nn.Module, x: Tensor, reentrant: bool) -> tuple[int, int]:
    return bounds(model, lambda ours: _checkpointed(ours, x, reentrant))


def test_backward_twice_and_double_backward() -> None:
    model, x = mlp()

    def twice(ours: nn.Module) -> None:
        loss = ours(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    def penalty(ours: nn.Module) -> None:
        inputs = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(ours(inputs).sum(), inputs, create_graph=True)
        grad.square().sum().backward()

    for step in (twice, penalty):
        wanted = plain(model, step, 3)
        low, high = bounds(model, step)
        off = offload((low + high) // 2)
        assert all(equal(*p) for p in zip(offloaded(model, step, off, 3), wanted, strict=True))


def test_backward_after_the_step_is_right() -> None:
    model, x = mlp()
    wanted = plain(model, lambda ours: ours(x).sum().backward(), 1)[0]
    off = offload()
    for _ in range(3):
        model.zero_grad()
        with off:
            loss = model(x).sum()
        loss.backward()
        assert equal(states(model), wanted)
    del off
    with offload():
        loss = model(x).sum()
    model.zero_grad()
    loss.backward()
    assert equal(states(model), wanted)


def test_backward_after_its_store_was_closed_is_an_error() -> None:
    model, x = mlp()
    off = offload()
    for again in (False, True):
        with off:
            loss = model(x).sum()
        off.close()
        if again:
            with off:
                model(x)
        with pytest.raises(StoreError, match="run forward again"):
            loss.backward()


@pytest.mark.parametrize("store", ["host", "file"])
def test_a_graph_of_a_store_that_was_closed_is_refused_in_a_later_step(
    store: str, tmp_path: Path
) -> None:
    model, x = mlp()
    off = Offload(LOTS, lambda: stores(tmp_path)[store], CPU)
    with off:
        loss = model(x).sum()
        loss.backward(retain_graph=True)
    off.close()
    with off:
        model(x).sum().backward()
    with pytest.raises(StoreError, match="its store was closed: run forward again"):
        loss.backward()
    off.close()


def test_a_planned_step_that_stops_halfway_holds_nothing() -> None:
    model, x = mlp()
    low, high = bounds(model, lambda ours: ours(x).sum().backward())
    off = offload((low + high) // 2)
    for backward in (True, False):
        model.zero_grad()
        with off:
            out = model[1](model[0](x))
            retained = weakref.ref(out.untyped_storage())
            loss = model[2:](out).sum()
            if backward:
                loss.backward()
        del out, loss
        assert retained() is None
    assert off.last is not None
    assert off.last.mode == "on demand"


def test_an_engine_inside() -> None:
    x, y = torch.randn(10, 8), torch.randint(3, (10,))
    for norm in (nn.GroupNorm(2, 16), nn.BatchNorm1d(16)):  # one after another, and in lanes
        model = nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Linear(16, 3))
        found = []
        for off in (nullcontext(), offload()):
            ours = copy.deepcopy(model)
            engine = anybatch.Engine(ours, nn.CrossEntropyLoss(), micro_batch=4)
            for _ in range(3):
                ours.zero_grad()
                with off:
                    engine.backward(x, y)
            found.append(states(ours))
        assert equal(*found)
        assert isinstance(off, anybatch.reports.Offload)
        assert off.last is not None
        assert off.last.mode == "planned"


def test_autocast() -> None:
    model, x = mlp()

    def step(ours: nn.Module) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = ours(x).float().sum()
        loss.backward()

    wanted = plain(model, step, 3)
    low, high = bounds(model, step)
    found = offloaded(model, step, offload((low + high) // 2), 3)
    assert all(equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_forward_without_backward_leaves_nothing() -> None:
    model, x = mlp()
    off = offload()
    for _ in range(3):
        with off:
            out = model[1](model[0](x))
            retained = weakref.ref(out.untyped_storage())
            model[2:](out)
        del out
        assert retained() is None


def test_other_shapes_and_another_order_are_found_and_recorded() -> None:
    model, _ = mlp()
    off, kinds = offload(), []
    for rows in (16, 16, 5, 5, 16, 5, 1, 1, 16, 1):
        x = torch.randn(rows, 32)
        wanted = plain(model, lambda ours, x=x: ours(x).sum().backward(), 1)[0]
        model.zero_grad()
        with off:
            model(x).sum().backward()
        assert equal(states(model), wanted)
        assert off.last is not None
        kinds.append(off.last.mode)
    assert kinds[:6] == ["recorded", "planned", "on demand", "recorded", "planned", "planned"]
    assert kinds[6:] == ["on demand", "recorded", "recorded", "planned"]  # two misses: two recorded


def test_a_step_that_goes_another_way_in_the_middle() -> None:
    model, x = mlp()
    low, high = bounds(model, lambda ours: ours(x).sum().backward())
    off = offload((low + high) // 2)

    def straight(ours: nn.Module) -> None:
        ours(x).sum().backward()

    def bent(ours: nn.Module) -> None:
        assert isinstance(ours, nn.Sequential)
        h = ours[:4](x)
        (ours[4:](h) + h.exp() * h).sum().backward()

    for step, variant in ((straight, "recorded"), (straight, "planned"), (bent, "on demand")):
        wanted = plain(model, step, 1)[0]
        model.zero_grad()
        with off:
            step(model)
        assert equal(states(model), wanted)
        assert off.last is not None
        assert off.last.mode == variant


@pytest.mark.parametrize("at", ["forward", "backward"])
def test_an_error_in_a_step_leaves_nothing_and_the_next_is_right(at: str) -> None:
    model, x = mlp()
    low, high = bounds(model, lambda ours: ours(x).sum().backward())
    wanted = plain(model, lambda ours: ours(x).sum().backward(), 1)[0]
    off, losses, threads = offload((low + high) // 2), [], busy()
    for fails in (True, False, False, True, False):
        model.zero_grad()
        try:
            with off:
                loss = model(x).sum()
                losses.append(loss)
                if fails and at == "forward":
                    raise KeyboardInterrupt
                if fails:
                    model[2].weight.register_hook(_raises)
                loss.backward()
        except KeyboardInterrupt:
            assert fails
            assert busy() == threads
            if at == "forward":
                with pytest.raises(StoreError, match="run forward again"):
                    loss.backward()
        model[2].weight._backward_hooks and model[2].weight._backward_hooks.clear()
        if not fails:
            assert equal(states(model), wanted)


def _raises(grad: Tensor) -> Tensor:
    raise KeyboardInterrupt


def test_ctrl_c_at_every_place_of_a_step() -> None:
    model, x = mlp()
    low, high = bounds(model, lambda ours: ours(x).sum().backward())
    wanted = plain(model, lambda ours: ours(x).sum().backward(), 1)[0]
    places = 0
    real = saved_tensors.StepHooks._cut
    for at in range(0, 40, 3):
        off, left = offload((low + high) // 2), [at]

        def cut(self: Any, cut: Any, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                left[0] = 1000
                signal.raise_signal(signal.SIGINT)
            real(self, cut)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(saved_tensors.StepHooks, "_cut", cut)
            for _ in range(2):
                try:
                    model.zero_grad()
                    _in(off, lambda: model(x).sum().backward())
                except KeyboardInterrupt:
                    places += 1
        model.zero_grad()
        _in(off, lambda: model(x).sum().backward())
        assert equal(states(model), wanted)
    assert places >= 10


def test_where_hooks_are_forbidden_nothing_is_left() -> None:
    model, x = mlp()
    off = offload()
    forbidden = torch.autograd.graph.disable_saved_tensors_hooks("not here")
    with forbidden, pytest.raises(RuntimeError, match="not here"), off:
        raise AssertionError
    with off:
        model(x).sum().backward()
    assert off.last is not None
    assert off.last.mode == "recorded"


def test_only_so_many_steps_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anybatch.offloading.recorder.CAPACITY", 2)
    model, off = mlp()[0], offload()
    for rows in (3, 4, 5, 6, 3, 4, 5, 6, 3):
        _in(off, lambda rows=rows: model(torch.randn(rows, 32)).sum().backward())  # type: ignore[misc]
        assert len(off._cache.recorded) <= 2


def test_inside_itself_is_refused() -> None:
    off = offload()
    with off, pytest.raises(RuntimeError, match="is entered already"):
        off.__enter__()


def test_two_threads_have_their_own() -> None:
    model, x = mlp()
    wanted = plain(model, lambda ours: ours(x).sum().backward(), 1)[0]
    found: list[bool] = []

    def run() -> None:
        ours, off = copy.deepcopy(model), offload()
        for _ in range(3):
            ours.zero_grad()
            _in(off, lambda: ours(x).sum().backward())
            found.append(equal(states(ours), wanted))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 6


def test_what_does_not_move() -> None:
    x = torch.randn(8, 8, dtype=torch.complex64, requires_grad=True)
    table = nn.Embedding(9, 8, sparse=True)
    ids = torch.tensor([1, 2, 2, 5])

    def step() -> Tensor:
        x.grad = table.weight.grad = None
        ((x * 2).conj() * (x * 3)).abs().sum().backward()
        (table(ids) * 2).sin().sum().backward()
        assert x.grad is not None
        assert table.weight.grad is not None
        return torch.cat(
            [torch.view_as_real(x.grad).flatten(), table.weight.grad.to_dense().flatten()]
        )

    wanted, off = step(), offload()
    for _ in range(3):
        with off:
            found = step()
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"memory": 0}, "memory must be a number of bytes of at least 1"),
        ({"memory": "1GiB", "store": "host"}, 'store must be "file" or a folder that is there'),
        (
            {"memory": "1GiB", "store": "/no/such/folder"},
            'store must be "file" or a folder that is there',
        ),
    ],
)
def test_what_means_nothing_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        anybatch.offload(device="cpu", **options)


def test_the_file_is_in_the_folder_that_was_named_and_has_no_name(tmp_path: Path) -> None:
    model, x = mlp()
    off = offload(store=tmp_path)
    with off:
        model(x).sum().backward()
        assert any(str(tmp_path) in name for name in _files())
        assert list(tmp_path.iterdir()) == []
    off.close()


def test_no_grad_steps_do_nothing() -> None:
    model, x = mlp()
    off = offload()
    for _ in range(2):
        with off, torch.no_grad():
            model(x)
    assert off.last is not None
    assert off.last.out_bytes == 0


@pytest.mark.parametrize("name", ["ResNet-20", "transformer"])
def test_the_timeline_of_a_step_is_what_it_was_planned_to_hold_and_to_move(name: str) -> None:
    model, loss_fn, (x, y) = network(name)

    def step(ours: nn.Module) -> None:
        loss_fn(ours(x), y).backward()

    low, high = bounds(model, step)
    off = offload((low + high) // 2)
    with pytest.raises(
        RuntimeError, match="a step must have been recorded before it has a timeline"
    ):
        off.timeline()
    for variant in ("recorded", "planned", "planned"):
        model.zero_grad()
        with off:
            step(model)
        assert off.last is not None
        assert off.last.mode == variant
        reported = off.timeline()
        assert reported.budget == off.memory
        assert reported.seconds is not None
        assert len(reported.runs) > 10
        if variant == "planned":
            assert reported.peak == off.last.predicted_bytes
            assert sum(move.size for move in reported.moved(back=False)) == off.last.out_bytes > 0
            assert sum(move.size for move in reported.moved(back=True)) == off.last.back_bytes
    full = offload()
    with full:
        step(copy.deepcopy(model))
    assert full.timeline().moves == ()
