from __future__ import annotations

import copy
import gc
import io
import pickle
import signal
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.busy import busy
from tests.offloads import file_method, instead
from tests.peaks import metered
from tests.unit.offloading.trainings import (
    CPU,
    equal,
    gradients,
    network,
    pair,
    trained,
    values,
)
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import StepLR

import anybatch
from anybatch.core import optimizers
from anybatch.errors import NotExactError, StoreError

LIMIT = 16 << 10
adamw = partial(optim.AdamW, lr=1e-2)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "SMALL", 64)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    threads, files = busy(), _files()
    yield
    if _files() > files:
        gc.collect()
    assert busy() == threads
    assert _files() <= files


def _files() -> set[str]:
    """The files of ours that this process holds open."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            name = str(link.readlink())
        except OSError:
            continue
        if "anybatch-" in name:
            found.add(name)
    return found


def tensors(optimizer: optim.Optimizer) -> list[Tensor]:
    every = (t for state in optimizer.state.values() for t in state.values())
    return [t for t in every if isinstance(t, Tensor) and t.numel() > 16]


def is_offloaded(optimizer: optim.Optimizer) -> bool:
    found = {t.is_meta for t in tensors(optimizer)}
    assert len(found) == 1
    return found.pop()


class Shallow(nn.Module):
    """Parameters without a forward that costs anything."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3000, 700, 5000, 20, 4096, 1)
        self.all = nn.ParameterList(torch.ones(size) for size in sizes)


def gave(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)


@pytest.mark.parametrize("available", [20_000, 30_000, 62_500, 1 << 30])
def test_no_more_state_is_in_memory_than_the_limit(available: int) -> None:
    model = Shallow()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    with anybatch.offload_states(optimizer, memory=available) as states:
        for _ in range(3):  # without a kernel that makes anything but the state
            gave(model)
            there = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
            with metered({"there": there}) as meter:
                optimizer.step()
            held = sum(t.nbytes for t in there)
            assert states.last is not None
            assert meter.peak - held <= states.last.most_bytes + 4
            assert states.last.most_bytes <= min(available, held // 2)
            assert meter.live - held in (0, 4)  # what is below a block stays: one number
        assert states.last.offloaded_bytes == held // 2 - 4
        assert states.last.out_bytes == states.last.back_bytes == states.last.offloaded_bytes


def test_a_state_that_was_there_is_offloaded_at_once_and_returns_in_full() -> None:
    model = network()
    optimizer = adamw(model.parameters())
    trained(model, optimizer, range(2))
    before, ids = values(optimizer), [id(t) for t in tensors(optimizer)]
    states = anybatch.offload_states(optimizer, memory=LIMIT)
    assert is_offloaded(optimizer)
    assert ids != [id(t) for t in tensors(optimizer)]
    states.back()
    assert equal(values(optimizer), before)
    assert "step" not in vars(optimizer)
    assert "__getstate__" not in vars(optimizer)
    assert not optimizer._optimizer_state_dict_pre_hooks
    trained(model, optimizer, range(2, 3))
    states.back()  # again changes nothing


def test_reading_what_is_offloaded_is_an_error() -> None:
    _, (model, optimizer), states = pair(adamw, LIMIT)
    trained(model, optimizer, range(1))
    offloaded = optimizer.state[model[0].weight]["exp_avg"]
    assert offloaded.shape == model[0].weight.shape
    for read in (Tensor.tolist, Tensor.numpy, lambda t: t.sum().item(), lambda t: t.to(CPU)):
        with pytest.raises((RuntimeError, NotImplementedError, TypeError), match="meta"):
            read(offloaded)
    states.close()


def test_writing_to_what_is_offloaded_is_refused_and_replacing_it_is_not() -> None:
    plain, ours, states = pair(adamw, LIMIT)
    for model, optimizer in (plain, ours):
        trained(model, optimizer, range(1))
        optimizer.state[model[0].weight]["exp_avg"] = torch.ones_like(model[0].weight)
        del optimizer.state[model[0].bias]
        trained(model, optimizer, range(1, 3))
    model, optimizer = ours
    assert states.last is not None
    assert states.last.offloaded_bytes == sum(t.nbytes for t in tensors(optimizer))
    states.back()
    assert equal(values(plain[1]), values(optimizer))
    states = anybatch.offload_states(optimizer, memory=LIMIT)
    optimizer.state[model[0].weight]["exp_avg"].zero_()
    with pytest.raises(StoreError, match="must not be written to while it is offloaded"):
        optimizer.step()
    states.close()


@pytest.mark.parametrize("first", ["schedule", "states"])
def test_a_schedule_before_or_after_it(first: str) -> None:
    found = []
    for offloaded in (False, True):
        model = network()
        optimizer = adamw(model.parameters())
        held = None
        if offloaded and first == "states":
            held = anybatch.offload_states(optimizer, memory=LIMIT)
        schedule = StepLR(optimizer, 1, 0.5)
        if offloaded and first == "schedule":
            held = anybatch.offload_states(optimizer, memory=LIMIT)
        for step in range(3):
            trained(model, optimizer, range(step, step + 1))
            schedule.step()
        if held is not None:
            held.back()
            trained(model, optimizer, range(3, 4))
            schedule.step()
        else:
            trained(model, optimizer, range(3, 4))
            schedule.step()
        found.append([*values(optimizer), torch.tensor(schedule.get_last_lr())])
    assert equal(*found)


def test_hooks_and_closures_see_one_step() -> None:
    found = []
    for offloaded in (False, True):
        model, observed = network(), list[Any]()
        optimizer = adamw(model.parameters())
        held = anybatch.offload_states(optimizer, memory=LIMIT) if offloaded else None

        def note(ours: optim.Optimizer, args: Any, _: Any, observed: list[Any] = observed) -> None:
            observed.append((len(ours.param_groups[0]["params"]), len(args)))

        optimizer.register_step_pre_hook(note)
        optimizer.register_step_post_hook(note)

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            assert torch.is_grad_enabled()
            return gradients(model, 0)

        for _ in range(2):
            observed.append(optimizer.step(closure).item())
        if held is not None:
            held.back()
        found.append((observed, values(optimizer)))
    assert found[0][0] == found[1][0]
    assert equal(found[0][1], found[1][1])


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_steps_or_skips_as_in_memory(fused: bool) -> None:
    plain, ours, states = pair(partial(optim.AdamW, fused=fused), LIMIT)
    scales = []
    for model, optimizer in (plain, ours):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.full((2, 12), float("inf") if step == 2 else 1.0)).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    states.back()
    assert scales[0] == scales[1]
    assert equal(values(plain[1]), values(ours[1]))


def loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_a_state_dict_has_real_tensors_and_a_run_goes_on_from_it() -> None:
    plain, ours, states = pair(adamw, LIMIT)
    for model, optimizer in (plain, ours):
        trained(model, optimizer, range(2))
    data = saved(ours[1].state_dict())
    assert is_offloaded(ours[1])
    wanted, found = plain[1].state_dict(), loaded(data)
    assert found["param_groups"] == wanted["param_groups"]
    assert list(found["state"]) == list(wanted["state"])
    for number, state in wanted["state"].items():
        assert list(found["state"][number]) == list(state)
        assert equal(list(found["state"][number].values()), list(state.values()))
    for model, optimizer in (plain, ours):
        trained(model, optimizer, range(2, 4))
        optimizer.load_state_dict(loaded(data))
        if optimizer is ours[1]:
            assert is_offloaded(optimizer)
        trained(model, optimizer, range(4, 6))
    states.back()
    assert equal(values(plain[1]), values(ours[1]))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: loaded(saved(x))]
)
def test_a_copy_is_an_optimizer_in_memory(copied: Callable[[Any], Any]) -> None:
    (model, plain), (ours, optimizer), states = pair(adamw, LIMIT)
    trained(model, plain, range(2))
    trained(ours, optimizer, range(2))
    twin = copied(optimizer)
    assert is_offloaded(optimizer)
    assert "step" not in vars(twin)
    assert equal(values(twin), values(plain))
    states.close()


def test_groups_that_are_added_join() -> None:
    plain, ours, states = pair(lambda params: adamw(params[:2]), LIMIT)
    for model, optimizer in (plain, ours):
        trained(model, optimizer, range(2))
        rest = list(model.parameters())[2:]
        optimizer.add_param_group({"params": rest, "lr": 1e-3})
        trained(model, optimizer, range(2, 4))
    states.back()
    assert equal(values(plain[1]), values(ours[1]))


def test_what_was_released_is_not_there_and_says_so() -> None:
    _, (model, optimizer), states = pair(adamw, LIMIT)
    trained(model, optimizer, range(1))
    retained = optimizer.state_dict()
    states.close()
    for use in (optimizer.step, optimizer.state_dict, lambda: copy.deepcopy(optimizer)):
        with pytest.raises(StoreError, match="the store was closed: load a state"):
            use()
    optimizer.load_state_dict(retained)
    trained(model, optimizer, range(1, 2))
    assert not is_offloaded(optimizer)


def test_it_is_for_one_optimizer_once_and_before_others_wrap_its_step() -> None:
    _, (_, optimizer), states = pair(adamw, LIMIT)
    with pytest.raises(NotExactError, match=r"was replaced by .*once for each optimizer"):
        anybatch.offload_states(optimizer)
    states.close()
    optimizer.step = print
    with pytest.raises(NotExactError, match="was replaced by print"):
        anybatch.offload_states(optimizer)


def test_the_limit_is_the_budget_or_three_of_the_largest() -> None:
    for size, available in ((10, 64 << 20), (9 << 20, 3 * 2 * (9 << 20))):
        p = nn.Parameter(torch.empty(size, dtype=torch.uint8), requires_grad=False)
        states = anybatch.offload_states(optim.AdamW([p]))
        assert states.memory == max(available, 64 << 20)
        states.close()


def test_stores_that_mean_nothing_on_the_cpu_are_refused(tmp_path: Path) -> None:
    optimizer = adamw(network().parameters())
    for store in ("host", tmp_path / "not there"):
        with pytest.raises(ValueError, match='a "file" or a folder that is there on the CPU|store'):
            anybatch.offload_states(optimizer, store=store)
    assert "step" not in vars(optimizer)
    anybatch.offload_states(optimizer, store=tmp_path).back()
    assert not list(tmp_path.iterdir())


class Failing:
    """Lets a store fail at one of its copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, call: int) -> None:
        self.calls, self.on = 0, True
        real = file_method(name)

        def fails(store: Any, *args: Any) -> None:
            self.calls += 1
            if self.on and self.calls == call:
                raise OSError(28, "No space left on device")
            real(store, *args)

        instead(monkeypatch, name, fails)


@pytest.mark.parametrize("call", [1, 4, 8])
@pytest.mark.parametrize("name", ["_write", "_read"])
def test_no_state_is_lost_where_a_copy_fails(
    monkeypatch: pytest.MonkeyPatch, name: str, call: int
) -> None:
    (plain, one), (model, optimizer), states = pair(partial(adamw, foreach=False), LIMIT)
    trained(plain, one, range(2))
    trained(model, optimizer, range(2))
    wanted = values(one)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    done: list[Tensor] = []
    failing = Failing(monkeypatch, name, call)
    optimizer.zero_grad()
    gradients(model, 2)
    before = [p.detach().clone() for p in parameters]
    with pytest.raises(StoreError, match=r"No space left on device.*free space there"):
        optimizer.step()
    failing.on = False
    assert len(optimizer.param_groups[0]["params"]) == len(parameters)
    stepped = [not torch.equal(p, was) for p, was in zip(parameters, before, strict=True)]
    gradients(plain.zero_grad() or plain, 2)
    one.step()
    later = values(one)
    states.back()
    found, place = values(optimizer), 0
    for p, moved in zip(parameters, stepped, strict=True):  # each as before, or as after
        count = 1 + len(optimizer.state.get(p, {}))
        done += (later if moved else wanted)[place : place + count]
        place += count
    assert equal(found, done)


def test_too_small_a_limit_is_reported_before_anything_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, (model, optimizer), states = pair(adamw, LIMIT)
    before = [p.detach().clone() for p in model.parameters()]
    gradients(model, 0)
    instead(monkeypatch, "space", lambda _: 1000)
    with pytest.raises(StoreError, match=r"that is 1\d\.\d KiB, and the folder .* has 1000 B left"):
        optimizer.step()
    assert equal(before, [p.detach() for p in model.parameters()])
    assert not tensors(optimizer)
    states.close()


def test_an_error_of_the_optimizer_leaves_groups_and_state_intact() -> None:
    plain, (model, optimizer), states = pair(adamw, LIMIT)
    trained(*plain, range(2))
    trained(model, optimizer, range(2))
    last = model[3].weight
    last.grad = torch.ones_like(last).to_sparse()
    with pytest.raises(RuntimeError, match="sparse gradients"):
        optimizer.step()
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
    optimizer.state_dict()
    last.grad = None
    optimizer.step()
    assert is_offloaded(optimizer)
    states.close()


def test_an_interrupt_waits_for_the_end_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, (model, optimizer), states = pair(adamw, LIMIT)
    trained(*plain, range(2))
    trained(model, optimizer, range(1))
    real = file_method("writing")

    def interrupted(store: Any, *args: Any) -> Any:
        instead(monkeypatch, "writing", real)
        signal.raise_signal(signal.SIGINT)
        return real(store, *args)

    instead(monkeypatch, "writing", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained(model, optimizer, range(1, 2))
    states.back()
    assert equal(values(optimizer), values(plain[1]))


def test_nothing_is_held_alive_by_it() -> None:
    _, (model, optimizer), states = pair(adamw, LIMIT)
    trained(model, optimizer, range(1))
    watched = [weakref.ref(optimizer), weakref.ref(states), weakref.ref(model)]
    del model, optimizer, states, _
    gc.collect()
    assert [ref() for ref in watched] == [None] * 3


def wide(depth: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(depth)))


def rows(n: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 64, generator=generator), torch.randn(n, 64, generator=generator)


@pytest.mark.parametrize(
    "make", [adamw, partial(adamw, foreach=True), partial(optim.SGD, momentum=0.9)]
)
def test_a_plan_whose_states_are_offloaded_is_obeyed_within_its_prediction(make: Any) -> None:
    found, batch, memory = [], rows(), "700KiB"
    for leaves in (False, True):
        model = wide()
        optimizer = make(model.parameters())
        plan = anybatch.plan(
            *(model, nn.MSELoss(), batch),
            optimizer=optimizer,
            micro_batch=4,
            memory=memory if leaves else "4MiB",
            timed=False,
            states="file" if leaves else None,
        )
        assert "step" not in vars(optimizer)
        plan = anybatch.Plan.from_json(plan.to_json())
        engine = anybatch.Engine(model, nn.MSELoss(), optimizer=optimizer, plan=plan)
        for _ in range(3):
            optimizer.zero_grad()
            there = [*model.parameters(), *(t for t in tensors(optimizer) if not t.is_meta)]
            with metered({"there": there}) as meter:
                engine.backward(*batch)
                optimizer.step()
            assert plan.memory is not None
            own = sum(t.nbytes for t in batch)  # a person's mini-batch does not count
            assert meter.peak - own <= plan.memory.predicted <= plan.memory.budget
        if leaves:
            assert plan.states is not None
            assert "states       in a file; at most" in str(engine.plan)
            assert is_offloaded(optimizer)
            assert engine.states is not None
            engine.states.back()
        found.append(values(optimizer))
    assert equal(*found)


def test_a_plan_for_states_needs_their_optimizer_and_a_store_of_the_device(tmp_path: Path) -> None:
    model, batch = wide(1), rows()
    options: Any = {"micro_batch": 4, "timed": False, "memory": "1MiB"}
    with pytest.raises(ValueError, match="there is no optimizer: give optimizer="):
        anybatch.plan(model, nn.MSELoss(), batch, states="file", **options)
    optimizer = adamw(model.parameters())
    with pytest.raises(ValueError, match='store must be "file" or a folder that is there'):
        anybatch.plan(model, nn.MSELoss(), batch, states="host", optimizer=optimizer, **options)
    options |= {"optimizer": optimizer, "states": "file", "spill": tmp_path}
    plan = anybatch.plan(model, nn.MSELoss(), batch, **options)
    assert plan.states is not None
    assert plan.states.folder == str(tmp_path)
    with pytest.raises(ValueError, match="needs that optimizer: give optimizer="):
        anybatch.Engine(model, nn.MSELoss(), plan=plan)
    engine = anybatch.Engine(model, nn.MSELoss(), plan=plan, optimizer=optimizer)
    engine.backward(*batch)
    optimizer.step()
    assert any(str(tmp_path) in name for name in _files())
    assert engine.states is not None
    engine.states.close()
