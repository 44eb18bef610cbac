"""Law 5: a failed step leaves model, buffers, gradients, dice, hooks and modes as they were."""

from __future__ import annotations

import copy
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tests.faults import alone, in_backward
from tests.oracle import same, snapshot
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils.data import Dataset

import anybatch
from anybatch import Engine, LazyBatch
from anybatch.core import transaction as transactions
from anybatch.execution.proof.rows import _saving_nothing

SOURCE = str(Path(anybatch.__file__).parent)


class Model(nn.Module):
    """Everything that can be left behind: batch statistics, a counter, dropout, spectral norm."""

    def __init__(self, *, waits: bool = False) -> None:
        super().__init__()
        first = nn.Linear(5, 6)
        self.waits = waits  # lanes refuse buffers that each of them would move
        self.first = first if waits else nn.utils.parametrizations.spectral_norm(first)
        self.norm, self.drop, self.last = nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.fail: Callable[..., None] = lambda *_: None

    def forward(self, x: Tensor) -> Tensor:
        if not self.waits:
            self.calls = self.calls + 1
        self.fail(x)
        return self.last(self.drop(self.norm(self.first(x))))


class Items(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + torch.rand(()), self.y[index]


def coupled(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out - out.mean(0), y)


def setting(variant: str) -> tuple[Model, Callable[..., Any]]:
    """Return a model with gradients already there, and a step on it."""
    torch.manual_seed(2)
    model = Model(waits="lanes" in variant)
    x, y = torch.randn(10, 5), torch.randint(0, 3, (10,))
    for p in list(model.parameters())[1:]:
        p.grad = torch.ones_like(p)
    loss = coupled if "coupled" in variant else F.cross_entropy
    batchnorm: Any = "exact" if "lanes" in variant else "local"
    engine = Engine(model, loss, micro_batch=4, batchnorm=batchnorm)
    if "lazy" in variant:
        lazy = LazyBatch(Items(x, y))
        return model, lambda **k: engine.backward(lazy, **k)
    if "evaluate" in variant:
        return model, lambda **k: engine.evaluate(x, y, **k)
    return model, lambda **k: engine.backward(x, y, **k)


KINDS = ["streaming", "coupled", "lazy", "lazy coupled", "lanes", "lanes evaluate", "evaluate"]


class BoomError(Exception):
    pass


def fail_at(count: int, error: BaseException) -> Callable[..., None]:
    """Fail at one call; for memory, which is tried again, at every later one too."""
    calls, again = iter(range(1000)), isinstance(error, torch.OutOfMemoryError)

    def fail(*arguments: Any) -> None:
        if any(isinstance(one, FakeTensor) for one in arguments):
            return  # whether the full batch computes the same: no step runs
        call = next(calls)
        if call == count or (again and call > count):
            raise error

    return fail


@pytest.mark.product
@pytest.mark.parametrize(
    "error", [BoomError("x"), KeyboardInterrupt(), torch.OutOfMemoryError("x")]
)
@pytest.mark.parametrize(
    ("variant", "index"),
    [(variant, i) for variant in KINDS for i in range(8 if "coupled" in variant else 5)],
)
def test_in_forward(variant: str, index: int, error: BaseException) -> None:
    """Two forwards to look and three to stream; a coupled loss is seen at the first of these."""
    model, step = setting(variant)
    model.fail = fail_at(index, error)
    before = snapshot(model)
    with pytest.raises(type(error)):
        step()
    assert same(before, snapshot(model))


@pytest.mark.product
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("variant", KINDS)
def test_in_the_observer(variant: str, index: int) -> None:
    model, step = setting(variant)
    before = snapshot(model)
    with pytest.raises(BoomError):
        step(observe=fail_at(index, BoomError()))
    assert same(before, snapshot(model))


@pytest.mark.product
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("variant", KINDS[:5])
def test_in_backward(variant: str, index: int) -> None:
    model, step = setting(variant)
    handle = in_backward(model.last, fail_at(index, BoomError()))
    before = snapshot(model)
    with pytest.raises(BoomError):
        step()
    assert same(before, snapshot(model))
    handle.remove()


def test_in_the_data_set() -> None:
    model = Model()
    data = Items(torch.randn(10, 5), torch.randint(0, 3, (10,)))
    data.y = data.y[:7]
    before = snapshot(model)
    engine = Engine(model, F.cross_entropy, micro_batch=4, batchnorm="local")
    lazy = LazyBatch(data)
    before = snapshot(model)
    with pytest.raises(IndexError):
        engine.backward(lazy)
    assert same(before, snapshot(model))


class SignalAt:
    """Sends this process a real SIGINT at the count-th line of anybatch's own code."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.lines = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        if event == "line":
            self.lines += 1
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


def run_traced(step: Callable[[], Any], count: int) -> tuple[int, bool]:
    """Return the lines run and whether the step was interrupted."""
    tracer = SignalAt(count)
    sys.settrace(tracer)
    try:
        alone(step)
    except KeyboardInterrupt:
        return tracer.lines, True
    finally:
        sys.settrace(None)
    return tracer.lines, False


@pytest.mark.usefixtures("_ctrl_c")
@pytest.mark.parametrize("variant", ["streaming", "coupled", "lazy", "lanes"])
def test_ctrl_c_at_every_line(variant: str, counted: Callable[..., int]) -> None:
    """A step happened whole or not at all, wherever the signal came."""
    setting(variant)[1]()  # some lines run once in a process
    model, step = setting(variant)
    rng_state = torch.get_rng_state()
    start = copy.deepcopy(model)
    lines, interrupted = run_traced(step, 10**9)
    assert not interrupted
    after = snapshot(model)
    places = list(range(1, lines + 1))
    chosen = sorted(random.Random(0).sample(places, counted(lines, 900)))  # each runs a step
    outcomes = {"before": 0, "after": 0}
    for place in chosen:
        fresh, step = setting(variant)
        torch.set_rng_state(rng_state)
        before = snapshot(fresh)
        ran, interrupted = run_traced(step, place)
        now = snapshot(fresh)
        sent = ran >= place  # what is freed runs a few lines, and not in every step the same
        assert interrupted or not sent, f"the signal at line event {place} was lost"
        was = same(_values(before), _values(now))
        done = same(_values(after), _values(now))
        assert was or done, f"half a step at line event {place} of {lines}"
        assert now["hooks"] == before["hooks"]
        outcomes["before" if was else "after"] += 1
    assert outcomes["before"] > 0.8 * len(chosen), outcomes
    assert len(list(start.buffers())) == len(list(model.buffers()))


@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_as_a_step_begins_to_be_undone() -> None:
    """The handler of the first error is where the second one comes: at each of its lines."""
    setting("coupled")[1]()
    for line in range(1, 21):
        model, step = setting("coupled")  # its first attempt ends with a retry, which is undone
        before, tracer = snapshot(model), SignalAtUndo(line)
        sys.settrace(tracer)
        try:
            with pytest.raises(KeyboardInterrupt):
                alone(step)
        finally:
            sys.settrace(None)
        assert same(_values(before), _values(snapshot(model))), f"line {line} of the undoing"


class SignalAtUndo(SignalAt):
    """Sends it at the count-th line after the body of a transaction has failed."""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != transactions.__file__:
            return None
        if frame.f_code.co_name == "transaction" and sys.exception() is not None:
            self.lines = 1
        if not self.lines:
            return self
        if event == "line":
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self


@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_as_hooks_are_put_on_or_removed_leaves_none() -> None:
    def enter() -> None:
        with _saving_nothing():
            pass

    interrupted, count = True, 0
    while interrupted:
        count += 1
        _, interrupted = run_traced(enter, count)
        assert not torch._C._autograd._top_saved_tensors_default_hooks(False), count
    assert count > 3


def _values(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not name.endswith("ids")}


def test_after_a_good_step_only_gradients_buffers_and_rng_states_have_moved() -> None:
    model, step = setting("streaming")
    before = snapshot(model)
    step()
    after = snapshot(model)
    moved = {name for name in before if not same(before[name], after[name])}
    assert moved <= {"gradients", "gradient ids", "buffers", "buffer ids", "rng"}
    assert before["gradient ids"][1:] == after["gradient ids"][1:], "the same tensors"


def test_a_step_that_fails_leaves_functions_of_torch_traced() -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        torch._C.DisableTorchFunction().__enter__()  # as an interrupt before __exit__ leaves it
        raise ValueError

    model = nn.Linear(3, 2)
    engine = Engine(model, loss, micro_batch=2)
    with pytest.raises(ValueError):  # noqa: PT011
        engine.backward(torch.randn(6, 3), torch.randint(2, (6,)))
    assert torch._C._is_torch_function_enabled()


class Pressed(nn.Module):
    """Presses Ctrl-C in one call: a pipe says in which, because no step undoes what was read.

    Args:
        fd: each call reads a byte of it.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self.fd = fd

    def forward(self, x: Tensor) -> Tensor:
        if os.read(self.fd, 1) == b"!":
            os.kill(os.getpid(), signal.SIGINT)
        return x


@pytest.mark.parametrize("call", range(8))
def test_a_ctrl_c_while_draws_are_learnt_leaves_an_engine_that_can_go_on(call: int) -> None:
    reads, writes = os.pipe()
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), Pressed(reads), nn.Dropout(0.4), nn.Linear(8, 3)
    model = nn.Sequential(*layers).double()
    engine = Engine(model, F.cross_entropy, micro_batch=3, rng="batch")
    batch = torch.randn(10, 4).double(), torch.randint(3, (10,))
    os.write(writes, b"." * call + b"!" + b"." * 4000)
    with pytest.raises(KeyboardInterrupt):
        engine.backward(*batch)
    rng_state = torch.get_rng_state()
    loss = engine.backward(*batch)
    torch.set_rng_state(rng_state)
    assert torch.allclose(loss, F.cross_entropy(model(batch[0]), batch[1]), rtol=1e-12)
    os.close(reads)
    os.close(writes)
