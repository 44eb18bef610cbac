from __future__ import annotations

import copy
import gc
import io
import random
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from tests.busy import busy
from tests.faults import alone
from tests.offloads import file_method, instead
from tests.peaks import metered
from tests.unit.offloading.steps import network as states_of_steps
from tests.unit.offloading.trainings import equal
from torch import Tensor, nn, optim
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import anybatch
from anybatch.errors import BudgetError, StoreError
from anybatch.offloading.parameters import optimizers

adamw = partial(optim.AdamW, lr=1e-2)
Step = Callable[[nn.Module, optim.Optimizer, int], Any]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "SMALL", 64)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    threads = busy()
    yield
    assert busy() == threads


def all_of(model: nn.Module, optimizer: optim.Optimizer) -> list[Tensor]:
    """Parameters, buffers, gradients and the optimizer's state."""
    states = (t for p in model.parameters() for t in optimizer.state.get(p, {}).values())
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    found = [*model.parameters(), *model.buffers(), *grads]
    return [t.detach().clone() for t in (*found, *(t for t in states if isinstance(t, Tensor)))]


def both(
    model: nn.Module, step: Step, memory: int, steps: int = 3, make: Any = adamw
) -> tuple[list[Tensor], list[Tensor]]:
    """Train in memory and with everything away; return all of both."""
    found = []
    for offloaded in (False, True):
        ours = copy.deepcopy(model)
        optimizer = make(ours.parameters())
        torch.manual_seed(1)
        if not offloaded:
            for number in range(steps):
                step(ours, optimizer, number)
        else:
            states = anybatch.offload_states(optimizer, model=ours, memory=memory)
            with states:
                for number in range(steps):
                    step(ours, optimizer, number)
                assert states._paged is not None
                assert states._paged.pages.moved
        found.append(all_of(ours, optimizer))
    return found[0], found[1]


def budget_for(model: nn.Module) -> int:
    """A quarter of all states, or what the largest parameter needs: it, twice its gradient."""
    sizes = [p.nbytes for p in model.parameters()]
    return max(sum(sizes), 10 * max(sizes))


@pytest.mark.parametrize("name", ["DenseNet", "transformer", "LSTM"])
def test_a_training_is_the_one_in_memory_bit_for_bit(name: str) -> None:
    torch.manual_seed(0)
    model, loss_fn, (x, y) = states_of_steps(name)

    def step(ours: nn.Module, optimizer: optim.Optimizer, number: int) -> None:
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        for rows in (slice(0, 3), slice(3, 5)):
            loss_fn(ours(x[rows]), y[rows]).backward()
        nn.utils.clip_grad_norm_(ours.parameters(), 0.5)
        optimizer.step()

    plain, ours = both(model, step, budget_for(model), 2)
    assert equal(plain, ours)


class Unusual(nn.Module):
    """Tied weights, weights that others use, and parts that are computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.inner, self.twice = nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.ones(16))
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = checkpoint(self.part, h, use_reentrant=False)
        other = {"weight": self.twice.weight.t(), "bias": self.inner.bias * 2}
        h = h + functional_call(self.twice, other, (h,))
        return self.head(self.norm(h) * self.scale)

    def part(self, h: Tensor) -> Tensor:
        return F.gelu(self.twice(F.linear(h, self.inner.weight)))


def test_tied_borrowed_viewed_and_recomputed_weights() -> None:
    torch.manual_seed(0)
    model, x = Unusual(), torch.randint(20, (4, 5))

    def step(ours: nn.Module, optimizer: optim.Optimizer, _: int) -> None:
        optimizer.zero_grad()
        F.cross_entropy(ours(x).flatten(0, 1), x.flatten()).backward()
        optimizer.step()

    plain, ours = both(model, step, 10 * 4 * 48 * 16)
    assert equal(plain, ours)


def mlp(depth: int = 12, width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))


def simple_backward(ours: nn.Module, number: int) -> None:
    rows = torch.randn(2, 32, generator=torch.Generator().manual_seed(number))
    ours(rows).square().sum().backward()


def simple(ours: nn.Module, optimizer: optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    simple_backward(ours, number)
    optimizer.step()


@pytest.mark.parametrize("share", [2, 4])
def test_states_of_several_times_the_budget_train_within_it(share: int) -> None:
    depth, width = 24, 32
    model, one = mlp(depth, width), 4 * width * width
    plain = copy.deepcopy(model)
    optimizer = adamw(plain.parameters())
    for number in range(3):
        simple(plain, optimizer, number)
    wanted, full = all_of(plain, optimizer), 4 * depth * one
    budget = full // share
    optimizer = adamw(model.parameters())
    extra = 3 * one + 3 * depth * 2 * 4 * width  # a kernel's results; rows that are saved
    states = anybatch.offload_states(optimizer, model=model, memory=budget - extra)
    with metered({"there": model.parameters()}) as meter:
        states._paged._meters = [meter]  # type: ignore[union-attr]
        with states:
            for number in range(3):
                simple(model, optimizer, number)
                if number == 0:  # all was in memory until the first step brought it out
                    meter.peak = meter.live
            assert meter.peak <= budget
            assert states._paged.pages.most <= states.memory  # type: ignore[union-attr]
    assert equal(all_of(model, optimizer), wanted)


def test_what_does_not_change_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    total = sum(p.nbytes for p in model.parameters())
    optimizer = adamw(model.parameters())
    x, written, writes = torch.randn(2, 32), 0, []

    def write(store: Any, storage: Any, begin: int) -> None:
        nonlocal written
        written += storage.nbytes()
        real(store, storage, begin)

    real = instead(monkeypatch, "_write", write)
    with anybatch.offload_states(optimizer, model=model, memory=total // 2):
        for _ in range(3):
            with torch.no_grad():
                model(x)
            writes.append(written)
    assert total // 2 <= writes[0] <= writes[-1] <= total


def test_inside_everything_can_be_saved_copied_and_read() -> None:
    model = mlp()
    wanted = [p.detach().clone() for p in model.parameters()]
    total = sum(p.nbytes for p in model.parameters())
    optimizer = adamw(model.parameters())
    file = io.BytesIO()
    with anybatch.offload_states(optimizer, model=model, memory=total // 2):
        model(torch.randn(2, 32))
        twin = copy.deepcopy(model)
        assert equal([p.detach() for p in twin.parameters()], wanted)
        assert equal(
            [p.sum().view(1) for p in wanted], [p.sum().view(1) for p in twin.parameters()]
        )
    with anybatch.offload_states(optimizer, model=model, memory=2 * total):
        torch.save(model.state_dict(), file)
        array = next(iter(model.parameters())).detach().numpy()
        model(torch.randn(2, 32))
        assert (torch.from_numpy(array) == wanted[0]).all()
    file.seek(0)
    assert equal(list(torch.load(file).values()), wanted)
    assert equal([p.detach() for p in model.parameters()], wanted)


def test_what_stays_because_its_address_was_read_counts_until_it_dies() -> None:
    """Gradients that are logged in each step are new ones, and those of earlier steps are gone."""

    def step(ours: nn.Module, optimizer: optim.Optimizer, number: int) -> None:
        simple(ours, optimizer, number)
        assert all(np.isfinite(p.grad.numpy()).all() for p in ours.parameters())  # type: ignore[union-attr]
        optimizer.zero_grad()

    model = mlp()
    plain, ours = both(model, step, 3 * sum(p.nbytes for p in model.parameters()), steps=6)
    assert equal(plain, ours)


def test_a_kernel_that_reads_too_much_at_once_is_refused_with_what_it_needs() -> None:
    model = mlp()
    one = next(model.parameters()).nbytes
    optimizer = adamw(model.parameters())
    with anybatch.offload_states(optimizer, model=model, memory=6 * one):
        match = r"and aten.cat.default needs 28.0 KiB at once, and 24.0 KiB is reserved.*\"28KiB\""
        with pytest.raises(BudgetError, match=match):
            torch.cat([p.flatten() for p in model.parameters()])
        simple(model, optimizer, 0)


@pytest.mark.parametrize("foreach", [False, True])
def test_kernels_for_many_tensors_take_a_few_at_a_time(foreach: bool) -> None:
    def step(ours: nn.Module, optimizer: optim.Optimizer, number: int) -> None:
        optimizer.zero_grad(set_to_none=False)
        simple_backward(ours, number)
        nn.utils.clip_grad_norm_(ours.parameters(), 0.1, foreach=foreach)
        torch._foreach_mul_([p.grad for p in ours.parameters()], [1.5] * 11 + [2.5])
        optimizer.step()

    plain, ours = both(mlp(), step, 6 * 4096, make=partial(adamw, foreach=foreach))
    assert equal(plain, ours)


@pytest.mark.parametrize("call", [1, 5, 20])
@pytest.mark.parametrize("name", ["_write", "_read"])
def test_no_parameter_is_lost_where_a_copy_fails(
    monkeypatch: pytest.MonkeyPatch, name: str, call: int
) -> None:
    model, optimizer = mlp(), None
    wanted = [p.detach().clone() for p in model.parameters()]
    optimizer = adamw(model.parameters())
    states = anybatch.offload_states(optimizer, model=model, memory=6 * wanted[0].nbytes)
    real = file_method(name)
    calls = 0

    def fails(store: Any, *args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError(28, "No space left on device")
        real(store, *args)

    x = torch.randn(2, 32)
    with states:
        instead(monkeypatch, name, fails)
        with pytest.raises(StoreError, match="No space left on device"):
            for _ in range(3):
                optimizer.zero_grad()
                model(x).sum().backward()
        optimizer.zero_grad()
        model(x).sum().backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert equal([p.detach() for p in model.parameters()], wanted)
    model.zero_grad()
    model(x).sum().backward()
    assert equal([p.grad for p in model.parameters() if p.grad is not None], grads)


def test_what_cannot_be_read_at_the_end_is_nan_and_a_store_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    model = mlp()
    optimizer = adamw(model.parameters())
    states = anybatch.offload_states(optimizer, model=model, memory=6 * model[0].weight.nbytes)
    with pytest.raises(StoreError, match="could not be read from .*Input/output error"), states:
        model(torch.randn(2, 32)).sum().backward()
        monkeypatch.setattr("anybatch.memory.stores.FileStore._read", fails)
    assert any(p.isnan().all() for p in model.parameters())


def test_outside_everything_is_as_it_was() -> None:
    model = mlp()
    model[0].weight.grad = torch.ones(32, 32)
    optimizer = adamw(model.parameters())
    before = all_of(model, optimizer)
    ids = [id(p) for p in model.parameters()]
    modes = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
    states = anybatch.offload_states(optimizer, model=model, memory="30KiB")
    with pytest.raises(ZeroDivisionError), states:
        model(torch.randn(2, 32))
        _ = 1 / 0
    assert equal(all_of(model, optimizer), before)
    assert ids == [id(p) for p in model.parameters()]
    assert modes == (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert "step" not in vars(optimizer)
    gc.collect()


def test_an_engine_and_offload_inside_it() -> None:
    torch.manual_seed(0)
    model, loss_fn, (x, y) = states_of_steps("transformer")

    def by_engine(ours: nn.Module, optimizer: optim.Optimizer, _: int) -> None:
        optimizer.zero_grad()
        engine = anybatch.Engine(ours, loss_fn, optimizer=optimizer, micro_batch=3)
        engine.backward(x, y)
        optimizer.step()

    plain, ours = both(model, by_engine, budget_for(model), 2)
    assert equal(plain, ours)
    off = anybatch.offload(memory="1GiB", device="cpu")

    def offloaded(ours: nn.Module, optimizer: optim.Optimizer, _: int) -> None:
        optimizer.zero_grad()
        with off:
            loss_fn(ours(x), y).backward()
        optimizer.step()

    plain, ours = both(model, offloaded, budget_for(model))
    assert equal(plain, ours)


class Interrupts:
    """Sends a real signal at one of the lines of the package that a training runs."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if "anybatch" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.at -= 1
            if self.at == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self


def twice(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number in range(2):
        simple(model, optimizer, number)


def test_an_interrupt_leaves_complete_steps_and_nothing_offloaded() -> None:
    model, rng = mlp(6), random.Random(0)
    plain = copy.deepcopy(model)
    optimizer = adamw(plain.parameters())
    states_of_steps = [[p.detach().clone() for p in plain.parameters()]]
    for number in range(2):
        simple(plain, optimizer, number)
        states_of_steps.append([p.detach().clone() for p in plain.parameters()])
    interrupted = 0
    for _ in range(6):
        ours = copy.deepcopy(model)
        optimizer = adamw(ours.parameters())
        states = anybatch.offload_states(optimizer, model=ours, memory=24 << 10)
        try:
            with states:
                sys.settrace(Interrupts(rng.randint(1, 4000)))
                alone(partial(twice, ours, optimizer))
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        found = [p.detach() for p in ours.parameters()]
        assert any(equal(found, one) for one in states_of_steps)
        every = (t for state in optimizer.state.values() for t in state.values())
        assert not any(t.is_meta for t in every)
        assert "step" not in vars(optimizer)
    assert interrupted
