"""State of every kind that a loss can keep: it moves once a step, and no rehearsal moves it."""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import functools
import multiprocessing
import os
import queue
import random
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.oracle import assert_exact, state_of, undivided
from tests.unit.loss.test_state import LossFn, N, alike, batch, net, three_steps
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine
from anybatch.errors import LossError
from anybatch.integrations.transformers_losses import UserLoss

Read = Callable[[], Any]
Made = tuple[LossFn, Read]


def counted(up: Callable[[], float], read: Read) -> Made:
    """Return a loss that counts by `up`, weighted by the count."""
    return lambda o, y: F.cross_entropy(o * 0.1 * up(), y), read


def of_item(held: Any, key: Any) -> Made:
    """Return a loss that counts in an entry of a container."""

    def up() -> float:
        held[key] += 1
        return float(held[key])

    return counted(up, lambda: float(held[key]))


def of_new_attribute() -> Made:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        loss.calls = getattr(loss, "calls", 0) + 1  # type: ignore[attr-defined]
        return F.cross_entropy(o * 0.1 * loss.calls, y)  # type: ignore[attr-defined]

    return loss, lambda: loss.calls  # type: ignore[attr-defined]


def of_new_key() -> Made:
    held: dict[str, int] = {}

    def up() -> float:
        held["calls"] = held.get("calls", 0) + 1
        return held["calls"]

    return counted(up, lambda: held["calls"])


def of_new_global() -> Made:
    globals().pop("MADE", None)

    def up() -> float:
        global MADE  # noqa: PLW0603
        MADE = globals().get("MADE", 0) + 1
        return float(MADE)

    return counted(up, lambda: MADE)


def of_objects() -> Made:
    held = np.array([0, None], dtype=object)
    return of_item(held, 0)


def of_numpy_of_a_tensor() -> Made:
    held = torch.zeros(1)

    def up() -> float:
        held.numpy()[0] += 1
        return float(held)

    return counted(up, held.clone)


def of_c() -> Made:
    held = ctypes.c_int(0)

    def up() -> float:
        held.value += 1
        return held.value

    return counted(up, lambda: held.value)


def of_shared_value() -> Made:
    held = multiprocessing.Value("i", 0)

    def up() -> float:
        held.value += 1
        return held.value

    return counted(up, lambda: held.value)


def of_queue() -> Made:
    held: queue.Queue[int] = queue.Queue()
    held.put(0)

    def up() -> float:
        held.put(held.get() + 1)
        return held.queue[0]

    return counted(up, lambda: held.queue[0])


def of_local() -> Made:
    held = threading.local()
    held.calls = 0

    def up() -> float:
        held.calls += 1
        return float(held.calls)

    return counted(up, lambda: held.calls)


def of_context() -> Made:
    held = contextvars.ContextVar("held", default=0)
    held.set(0)

    def up() -> float:
        held.set(held.get() + 1)
        return held.get()

    return counted(up, held.get)


def of_environment() -> Made:
    os.environ["CALLS"] = "0"

    def up() -> float:
        os.environ["CALLS"] = str(int(os.environ["CALLS"]) + 1)
        return float(os.environ["CALLS"])

    return counted(up, lambda: os.environ["CALLS"])


def of_weak_keys() -> Made:
    held: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
    key = nn.Identity()
    held[key] = 0
    return of_item(held, key)


def of_schedule() -> Made:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], 1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step + 1)
    optimizer.step()

    def up() -> float:
        schedule.step()
        return schedule.last_epoch

    return counted(up, lambda: schedule.last_epoch)


def of_options() -> Made:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], 1.0)
    return of_item(optimizer.param_groups[0], "lr")


def of_cached() -> Made:
    @functools.cache
    def box() -> list[int]:
        return [0]

    box()

    def up() -> float:
        box()[0] += 1
        return box()[0]

    return counted(up, lambda: box()[0])


def of_history() -> Made:
    held = [0.0] * 5000

    def loss(o: Tensor, y: Tensor) -> Tensor:
        found = F.cross_entropy(o * (1 + held[7]), y)
        held[7] = 0.5 * held[7] + 0.5 * float(found.detach())
        return found

    return loss, lambda: held[7]


class Centred(nn.Module):
    """A loss about a centre that follows the outputs."""

    c: Tensor

    def __init__(self, write: Callable[[Any, Tensor], None], variant: str) -> None:
        super().__init__()
        centre = torch.zeros(3, dtype=torch.double)
        if variant == "parameter":
            self.c = nn.Parameter(centre, requires_grad=False)
        elif variant == "buffer":
            self.register_buffer("c", centre)
        else:
            self.c = centre
        self._write = write

    def forward(self, o: Tensor, y: Tensor) -> Tensor:
        found = F.cross_entropy(o - self.c, y)
        self._write(self, o.detach().mean(0))
        return found


def write_in_place(held: Any, mean: Tensor) -> None:
    with torch.no_grad():
        held.c.mul_(0.9).add_(mean, alpha=0.1)


def write_data(held: Any, mean: Tensor) -> None:
    held.c.data.mul_(0.9).add_(mean, alpha=0.1)


def add_to_data(held: Any, mean: Tensor) -> None:
    held.c.data += mean


def replace_data(held: Any, mean: Tensor) -> None:
    held.c.data = 0.9 * held.c.data + 0.1 * mean


WRITES = (write_in_place, write_data, add_to_data, replace_data)


def of_module(write: Callable[[Any, Tensor], None], variant: str, *, held: bool) -> Made:
    module = Centred(write, variant)
    loss: LossFn = (lambda o, y: module(o, y)) if held else module
    return loss, lambda: module.c.detach().clone()


def of_closure(write: Callable[[Any, Tensor], None]) -> Made:
    class Held:
        c = torch.zeros(3, dtype=torch.double)

    held, centre = Held(), Held.c

    def loss(o: Tensor, y: Tensor) -> Tensor:
        found = F.cross_entropy(o - centre, y)
        write(held, o.detach().mean(0))
        return found

    return loss, centre.clone


def of_bank(write: str) -> Made:
    bank = torch.zeros(9000, dtype=torch.double)

    def loss(o: Tensor, y: Tensor) -> Tensor:
        found = F.cross_entropy(o - bank[:3], y)
        with torch.no_grad():
            rows = bank.data if write == "data" else bank
            rows[:3].mul_(0.9).add_(o.detach().mean(0), alpha=0.1)
        return found

    return loss, lambda: bank[:3].clone()


def of_parameters() -> Made:
    held = nn.ParameterDict({"c": nn.Parameter(torch.zeros(3).double(), requires_grad=False)})

    def loss(o: Tensor, y: Tensor) -> Tensor:
        found = F.cross_entropy(o - held["c"], y)
        with torch.no_grad():
            held["c"].mul_(0.9).add_(o.detach().mean(0), alpha=0.1)
        return found

    return loss, lambda: held["c"].detach().clone()


def of_trainer() -> Made:
    calls = [0]

    def function(o: Tensor, y: Tensor, num_items_in_batch: Any = None) -> Tensor:
        calls[0] += 1
        return F.cross_entropy(o * 0.1 * calls[0], y)

    return UserLoss(function), lambda: calls[0]


KINDS: dict[str, Callable[[], Made]] = {
    "a new attribute": of_new_attribute,
    "a new key": of_new_key,
    "a new global": of_new_global,
    "a long dict": lambda: of_item(dict.fromkeys(range(1001), 0), 0),
    "a long list": lambda: of_item([0] * 1001, 0),
    "a large array": lambda: of_item(np.zeros(8193), 0),
    "an array of objects": of_objects,
    "an array of bytes": lambda: of_item(array.array("d", [0.0]), 0),
    "numpy of a tensor": of_numpy_of_a_tensor,
    "UserDict": lambda: of_item(collections.UserDict(calls=0), "calls"),
    "UserList": lambda: of_item(collections.UserList([0]), 0),
    "ctypes": of_c,
    "multiprocessing": of_shared_value,
    "queue": of_queue,
    "threading.local": of_local,
    "ContextVar": of_context,
    "os.environ": of_environment,
    "WeakKeyDictionary": of_weak_keys,
    "a schedule": of_schedule,
    "options of an optimizer": of_options,
    "a cached box": of_cached,
    "a history of samples": of_history,
    "ParameterDict": of_parameters,
    "a large tensor": lambda: of_bank(""),
    "data of a large tensor": lambda: of_bank("data"),
    "compute_loss_func": of_trainer,
}
KINDS |= {
    f"{write.__name__} of a {variant}, {'held' if held else 'the loss'}": functools.partial(
        of_module, write, variant, held=held
    )
    for write in WRITES
    for variant in ("parameter", "buffer", "tensor")
    for held in (False, True)
}
KINDS |= {
    f"{write.__name__} in a closure": functools.partial(of_closure, write) for write in WRITES
}


@pytest.mark.product
@pytest.mark.parametrize("options", [{"micro_batch": 4}, {"memory": "1MiB"}])
@pytest.mark.parametrize("name", KINDS)
def test_state_moves_once_a_step(name: str, options: dict[str, Any]) -> None:
    truth, ours = net(), net()
    loss, read = KINDS[name]()

    def plain(x: Tensor, y: Tensor) -> Tensor:
        found = loss(truth(x), y)
        found.backward()
        return found

    want, has = three_steps(truth, plain), read()
    loss, read = KINDS[name]()
    assert_exact(three_steps(ours, Engine(ours, loss, **options).backward), want)
    assert alike(read(), has)


def test_targets_that_a_loss_writes_to_are_as_they_were_in_each_rehearsal() -> None:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(o, y.data.mul_(0.5))

    x, _ = batch()
    y = torch.randn(len(x), 3, dtype=torch.double)
    truth, ours = net(), net()
    want = loss(truth(x), y.clone())
    assert torch.allclose(Engine(ours, loss, memory="1MiB").backward(x, y), want, rtol=1e-12)


def test_a_tensor_that_a_loss_counts_in_has_its_data_after_a_rehearsal() -> None:
    calls = torch.zeros(())

    def loss(o: Tensor, y: Tensor) -> Tensor:
        calls.data += 1
        return F.cross_entropy(o, y) * min(1.0, calls.item() / 10)

    Engine(net(), loss, memory="1MiB").backward(*batch())
    assert calls.device.type == "cpu"
    assert calls.item() == 1


def test_a_loss_that_is_another_function_of_one_sample_is_rehearsed_with_all_outputs() -> None:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(o, y) if len(o) % 2 else F.l1_loss(o, y)

    def model() -> nn.Module:
        torch.manual_seed(0)
        inner = nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 3)
        return nn.Sequential(*inner).double()

    x, y = torch.randn(12, 6, dtype=torch.double), torch.randn(12, 3, dtype=torch.double)
    truth, ours = model(), model()
    want = undivided(truth, loss, x, y)
    assert_exact(state_of(ours, Engine(ours, loss, memory="30KiB").backward(x, y)), want)


# State that nothing lists.


def in_a_file(path: Path) -> float:
    path.write_text(str(int(path.read_text() or 0) + 1))
    return float(path.read_text())


def in_a_library(path: Path) -> float:
    name = f"calls_{path.parent.name}"
    setattr(nn.Module, name, getattr(nn.Module, name, 0) + 1)
    return float(getattr(nn.Module, name))


LONG = {i: [0] for i in range(1001)}


def in_a_long_dict(path: Path) -> float:
    del path
    LONG[0][0] += 1
    return LONG[0][0]


HIDDEN = (in_a_file, in_a_library, in_a_long_dict)


@pytest.mark.parametrize("options", [{"micro_batch": 4}, {"memory": "1MiB"}])
@pytest.mark.parametrize("up", HIDDEN)
def test_state_that_nothing_lists_is_refused_for_its_effect(
    up: Callable[[Path], float], options: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "calls"
    path.write_text("0")

    def loss(o: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(o * up(path), y)

    with pytest.raises(
        LossError, match="must have state that anybatch can restore, and it returned the"
    ):
        Engine(net(), loss, **options).backward(*batch())


@pytest.mark.parametrize("up", HIDDEN)
def test_a_batch_that_is_not_divided_calls_its_loss_once(
    up: Callable[[Path], float], tmp_path: Path
) -> None:
    path = tmp_path / "calls"
    path.write_text("0")
    calls: list[float] = []

    def loss(o: Tensor, y: Tensor) -> Tensor:
        calls.append(up(path))
        return F.cross_entropy(o * calls[-1], y)

    Engine(net(), loss, micro_batch=N).backward(*batch())
    assert len(calls) == 1


def drawn(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o * random.random() * torch.rand(()), y)


def in_place(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o.sub_(o.mean(0)), y)


def of_no_single_sample(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o.squeeze() - o.std(0), y)


ENTROPY = random.SystemRandom()
"""A generator without a state."""


def with_entropy(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o, y) if isinstance(ENTROPY, random.Random) else o.sum()


@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("loss", [drawn, in_place, of_no_single_sample, with_entropy])
def test_a_loss_without_state_is_not_refused_for_what_it_does(
    loss: LossFn, micro_batch: int
) -> None:
    x, y = batch()
    truth, ours = net(), net()
    random.seed(3)
    torch.manual_seed(3)
    want = undivided(truth, loss, x, y)
    random.seed(3)
    torch.manual_seed(3)
    assert_exact(state_of(ours, Engine(ours, loss, micro_batch=micro_batch).backward(x, y)), want)
