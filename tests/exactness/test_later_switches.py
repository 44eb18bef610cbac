"""A model that computes something else from a later step on is looked at again, before its step.

What changes here leaves no trace in the autograd graph: the inputs are moved before it begins.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from contextvars import ContextVar
from datetime import timedelta
from fractions import Fraction
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.oracle import assert_exact, state_of, undivided
from tests.unit.core.test_python_state_pieces import Loads
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook

from anybatch import Engine, Loss
from anybatch.errors import NotExactError

BEGUN = False
HELD = {"a": {"begun": False}}


@dataclasses.dataclass
class Options:
    begun: bool = False


@dataclasses.dataclass(slots=True)
class Slots:
    begun: bool = False


class Of:
    begun = False

    def __init__(self) -> None:
        self.inner, self.held = SimpleNamespace(begun=False), {"begun": False}


class Phase(enum.Enum):
    BEFORE, AFTER = 0, 1


def centred(x: Tensor, begun: Any = 1) -> Tensor:
    return x - x.mean(0) if begun else x


class Net(nn.Module):
    """Centres its inputs once a switch is set."""

    begun = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        first: Any = self.first
        first.begun, first.weight.begun, first.held = False, False, {"begun": False}
        self.number, self.nothing, self.pair, self.phase = 0, None, (0,), Phase.BEFORE
        self.options, self.slots, self.space, self.object = Options(), Slots(), Of().inner, Of()
        self.held: Any = {"begun": False, "inner": [[0]]}
        self.names, self.ring, self.calls = set[str](), deque([0]), list[Any]()
        self.default = defaultdict[str, bool](bool)
        self.call: Any = partial(centred, begun=False)
        self.dtype = torch.float32
        self.buffer: Tensor
        self.register_buffer("buffer", torch.zeros(()))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for call in self.calls:
            x = call(x)
        x = self.call(x)
        return self.last(self.first(centred(x, bool(self.switch()))).tanh())

    def switch(self) -> Any:
        return False


Switch = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def attribute(name: str, value: Any, read: Callable[[Any], Any]) -> Switch:
    return read, lambda net: setattr(net, name, value)


def setting(held: dict[Any, Any], key: Any, value: Any) -> None:
    held[key] = value


SWITCHES: dict[str, Switch] = {
    "a number": attribute("number", 1, lambda net: net.number),
    "something for None": attribute("nothing", object(), lambda net: net.nothing is not None),
    "a tensor for None": attribute("nothing", torch.ones(1), lambda net: net.nothing is not None),
    "a new attribute": attribute("new", object(), lambda net: hasattr(net, "new")),
    "a tuple": attribute("pair", (1,), lambda net: net.pair[0]),
    "an enum": attribute("phase", Phase.AFTER, lambda net: net.phase is Phase.AFTER),
    "a dtype": attribute("dtype", torch.half, lambda net: net.dtype is torch.half),
    "an attribute that is gone": (
        lambda net: not hasattr(net, "number"),
        lambda net: delattr(net, "number"),
    ),
    "an attribute of a layer": (
        lambda net: hasattr(net.last, "begun"),
        lambda net: setattr(net.last, "begun", True),
    ),
    "an attribute that a layer has": (
        lambda net: net.first.begun,
        lambda net: setattr(net.first, "begun", True),
    ),
    "a dict that a layer has": (
        lambda net: net.first.held["begun"],
        lambda net: setting(net.first.held, "begun", True),
    ),
    "an attribute of a parameter": (
        lambda net: getattr(net.first.weight, "begun", False),  # a copy has none
        lambda net: setattr(net.first.weight, "begun", True),
    ),
    "a dict": (
        lambda net: net.held["begun"],
        lambda net: setting(net.held, "begun", True),
    ),
    "a list in a list": (
        lambda net: net.held["inner"][0][0],
        lambda net: setting(net.held["inner"][0], 0, 1),
    ),
    "a set": (lambda net: net.names, lambda net: net.names.add("begun")),
    "a deque": (lambda net: net.ring[0], lambda net: setting(net.ring, 0, 1)),
    "a default": (
        lambda net: "begun" in net.default,
        lambda net: setting(net.default, "begun", True),
    ),
    "a dataclass": (
        lambda net: net.options.begun,
        lambda net: setattr(net.options, "begun", True),
    ),
    "slots": (lambda net: net.slots.begun, lambda net: setattr(net.slots, "begun", True)),
    "a namespace": (lambda net: net.space.begun, lambda net: setattr(net.space, "begun", True)),
    "an object in an object": (
        lambda net: net.object.inner.begun,
        lambda net: setattr(net.object.inner, "begun", True),
    ),
    "a dict in an object": (
        lambda net: net.object.held["begun"],
        lambda net: setting(net.object.held, "begun", True),
    ),
    "a class of its own": (lambda net: net.begun, lambda _: setattr(Net, "begun", True)),
    "another class": (lambda _: Of.begun, lambda _: setattr(Of, "begun", True)),
    "a global": (lambda _: BEGUN, lambda _: setting(globals(), "BEGUN", True)),
    "a global dict": (
        lambda _: HELD["a"]["begun"],
        lambda _: setting(HELD["a"], "begun", True),
    ),
    "a buffer that Python reads": (lambda net: net.buffer > 0, lambda net: net.buffer.fill_(1)),
}


def hooks(net: Any, registry: str) -> None:
    setting(getattr(net, registry), 77, lambda _, inputs: (centred(*inputs),))


def in_place(_: Any, inputs: tuple[Tensor]) -> None:
    inputs[0].data.sub_(inputs[0].mean(0))


def forward(net: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(centred(x), net.weight, net.bias)


CODE: dict[str, Callable[[Any], Any]] = {
    "a function for another": attribute("call", centred, bool)[1],
    "an argument": attribute("call", partial(centred, begun=True), bool)[1],
    "a list of functions": lambda net: net.calls.append(centred),
    "a hook": lambda net: net.register_forward_pre_hook(lambda _, inputs: (centred(*inputs),)),
    "a hook by hand": lambda net: hooks(net, "_forward_pre_hooks"),
    "a hook that writes": lambda net: net.register_forward_pre_hook(in_place),
    "a hook of a layer": lambda net: net.first.register_forward_pre_hook(in_place),
    "a hook of every module": lambda net: register_module_forward_pre_hook(
        lambda module, inputs: (centred(*inputs),) if module is net else None
    ),
    "the forward of a layer": lambda net: setattr(
        net.first, "forward", MethodType(forward, net.first)
    ),
    "the forward of its class": lambda _: setattr(
        Net, "forward", lambda net, x: net.last(net.first(centred(x)).tanh())
    ),
}


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in (
        (Net, "begun"),
        (Net, "forward"),
        (Net, "switch"),
        (Of, "begun"),
        (Kinds, "switch"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setitem(globals(), "BEGUN", False)
    monkeypatch.setitem(HELD["a"], "begun", False)
    every = torch.nn.modules.module._global_forward_pre_hooks
    monkeypatch.setattr(torch.nn.modules.module, "_global_forward_pre_hooks", every.copy())


def step(net: Net, engine: Engine, seed: int, loss: Any = F.cross_entropy) -> None:
    torch.manual_seed(seed)
    x, y = torch.randn(12, 6, dtype=torch.double), torch.randint(3, (12,))
    net.zero_grad()
    want = undivided(net, loss, x.clone(), y)
    assert_exact(state_of(net, engine.backward(x, y)), want)
    assert engine.plan is not None
    assert engine.plan.exact


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_that_is_set_later_is_detected(name: str) -> None:
    read, switch = SWITCHES[name]
    Net.switch = read  # type: ignore[method-assign]
    later(switch)


@pytest.mark.parametrize("name", CODE)
def test_code_that_comes_later_is_detected(name: str) -> None:
    later(CODE[name])


def later(switch: Callable[[Any], Any], net: Net | None = None) -> None:
    net = net or Net()
    engine = Engine(net, F.cross_entropy, micro_batch=5)
    for seed in range(3):
        step(net, engine, seed)
    switch(net)
    with pytest.raises(NotExactError, match="samples 0 and 1 meet"):
        step(net, engine, 3)


VARIABLE, LOCAL = ContextVar("begun", default=False), threading.local()


class Kinds(Net):
    """Centres its inputs by a value of some kind."""

    def __init__(self, value: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.value, self.read = value, read
        self.rate: Any = torch.optim.SGD(self.parameters(), 0.1)
        self.form: Tensor
        self.register_buffer("form", torch.zeros(3, dtype=torch.double))

    def switch(self) -> Any:
        return self.read(self.value)


def closure(value: bool) -> Callable[[], bool]:
    return lambda: value


VALUES: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "a number of numpy": (np.bool_(0), np.bool_(1), bool),
    "an array": (np.zeros(1), np.ones(1), lambda one: one[0] > 0),
    "bytes": (b"cold", b"warm", lambda one: one == b"warm"),
    "a range": (range(1), range(2), lambda one: len(one) > 1),
    "a class": (float, int, lambda one: one is int),
    "a fraction": (Fraction(1, 4), Fraction(3, 4), lambda one: one > 0.5),
    "a time": (timedelta(0), timedelta(1), lambda one: one > timedelta(0)),
    "a closure": (closure(value=False), closure(value=True), lambda one: one()),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_switch_of_any_kind_is_noticed(name: str) -> None:
    before, after, read = VALUES[name]
    later(lambda net: setattr(net, "value", after), Kinds(before, read))


@pytest.mark.parametrize(
    ("read", "switch"),
    [
        (lambda net: net.form.dim() == 2, lambda net: setattr(net, "form", net.form[None])),
        (
            lambda net: net.form.dtype == torch.float32,
            lambda net: setattr(net, "form", net.form.float()),
        ),
        (
            lambda net: net.rate.param_groups[0]["lr"] < 0.05,
            lambda net: setting(net.rate.param_groups[0], "lr", 0.01),
        ),
        (lambda _: VARIABLE.get(), lambda _: VARIABLE.set(True)),
        (lambda _: getattr(LOCAL, "begun", False), lambda _: setattr(LOCAL, "begun", True)),
    ],
    ids=["shape of a buffer", "dtype of a buffer", "a rate", "a context", "a thread"],
)
def test_a_switch_in_any_place_is_noticed(
    read: Callable[[Any], Any], switch: Callable[[Any], Any]
) -> None:
    token, LOCAL.begun = VARIABLE.set(False), False
    Kinds.switch = read  # type: ignore[method-assign]
    try:
        later(switch, Kinds(None, bool))
    finally:
        VARIABLE.reset(token)
        LOCAL.begun = False


SETTINGS: dict[str, tuple[Callable[[Any], Any], Callable[[], Any], Callable[[], Any]]] = {
    "the environment": (
        lambda _: os.environ.get("BEGUN"),
        lambda: os.environ.pop("BEGUN", None),
        lambda: os.environ.update(BEGUN="1"),
    ),
    "the environment, by a function": (
        lambda _: os.getenv("BEGUN"),
        lambda: os.environ.pop("BEGUN", None),
        lambda: os.environ.update(BEGUN="1"),
    ),
    "the precision of products": (
        lambda _: torch.get_float32_matmul_precision() != "highest",
        lambda: torch.set_float32_matmul_precision("highest"),
        lambda: torch.set_float32_matmul_precision("high"),
    ),
    "the default dtype": (
        lambda _: torch.get_default_dtype() == torch.float64,
        lambda: torch.set_default_dtype(torch.float32),
        lambda: torch.set_default_dtype(torch.float64),
    ),
    "autocast": (
        lambda _: torch.is_autocast_enabled("cpu"),
        lambda: torch.set_autocast_enabled("cpu", enabled=False),
        lambda: torch.set_autocast_enabled("cpu", enabled=True),
    ),
    "threads": (
        lambda _: torch.get_num_threads() > 1,
        lambda: torch.set_num_threads(1),
        lambda: torch.set_num_threads(2),
    ),
    "anomalies": (
        lambda _: torch.is_anomaly_enabled(),
        lambda: torch.autograd.set_detect_anomaly(mode=False),
        lambda: torch.autograd.set_detect_anomaly(mode=True),
    ),
    "deterministic algorithms": (
        lambda _: torch.are_deterministic_algorithms_enabled(),
        lambda: torch.use_deterministic_algorithms(mode=False),
        lambda: torch.use_deterministic_algorithms(mode=True),
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_python_or_torch_is_noticed(name: str) -> None:
    read, before, after = SETTINGS[name]
    Kinds.switch = read  # type: ignore[method-assign]
    before()
    try:
        later(lambda _: after(), Kinds(None, bool))
    finally:
        before()


@pytest.mark.parametrize(
    ("layer", "inputs", "switch"),
    [
        (lambda: nn.Softmax(1), torch.randn, lambda layer: setattr(layer, "dim", 0)),
        (
            lambda: nn.Embedding(9, 6),
            lambda n, k, **_: torch.randint(9, (n, k)),
            lambda layer: setattr(layer, "scale_grad_by_freq", True),
        ),
    ],
    ids=["softmax", "embedding"],
)
def test_a_setting_of_a_layer_of_torch_is_noticed(
    layer: Callable[[], nn.Module], inputs: Callable[..., Tensor], switch: Callable[[Any], None]
) -> None:
    first = layer()
    net = nn.Sequential(first, nn.Flatten(), nn.LazyLinear(3)).double()
    x, y = inputs(11, 6, dtype=torch.double), torch.randint(3, (11,))
    net(x)
    engine = Engine(net, F.cross_entropy, micro_batch=3)
    engine.backward(x, y)
    switch(first)
    with pytest.raises(NotExactError, match="meet in 0"):
        engine.backward(x, y)


class Clip(torch.autograd.Function):
    """A view, whose gradient is normalised once a switch is set."""

    norm = False

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return grad / grad.norm() if Clip.norm else grad


class Clipped(Net):
    """Its hidden layer is clipped in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Clip.apply(self.first(x)))


def test_a_switch_of_a_backward_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Clipped()
    engine = Engine(net, F.cross_entropy, micro_batch=5)
    step(net, engine, 0)
    monkeypatch.setattr(Clip, "norm", True)
    with pytest.raises(NotExactError, match="in the backward of Clip"):
        step(net, engine, 1)


def test_a_backward_that_is_replaced_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Clipped()
    engine = Engine(net, F.cross_entropy, micro_batch=5)
    step(net, engine, 0)
    monkeypatch.setattr(Clip, "backward", staticmethod(lambda _, grad: grad / grad.norm()))
    with pytest.raises(NotExactError, match="in the backward of Clip"):
        step(net, engine, 1)


class Damped(Net):
    """It reads the gradient of the step before."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        grad = self.first.weight.grad
        return self.last(h if grad is None else h / (1 + grad.norm()))


def test_a_forward_that_reads_a_gradient_is_a_doubt() -> None:
    """Its micro-batches are adding to that one."""
    net = Damped()
    x, y = torch.randn(12, 6, dtype=torch.double), torch.randint(3, (12,))
    engine = Engine(net, F.cross_entropy, micro_batch=5)
    engine.backward(x, y)
    assert engine.plan is not None
    assert "code of the model reads .grad" in str(engine.plan.exact)
    net.zero_grad()
    want = undivided(net, F.cross_entropy, x, y)
    assert_exact(state_of(net, Engine(net, F.cross_entropy, micro_batch=12).backward(x, y)), want)


def test_what_changes_nothing_is_familiar() -> None:
    """Hooks that are taken off and put on again, and numbers of a log, cost no claim."""
    net = Net()
    engine = Engine(net, F.cross_entropy, micro_batch=5)
    for seed in range(4):
        handle = net.register_forward_hook(lambda *_: None)
        step(net, engine, seed)
        handle.remove()
        step(net, engine, seed)
        assert engine.plan is not None
        assert engine.plan.exact.step <= 2


TABLE = Loads(own=nn.Tanh)


class Loading(Net):
    """It reads a table of classes that are loaded where they are read, and holds one."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.table, self.norm = Loads(), nn.BatchNorm1d(6).double() if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x)) if len(TABLE) else x


def looked_up(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y) * len(TABLE)


def looked_up_together(outputs: Tensor, y: Tensor) -> Tensor:
    return looked_up(outputs, y) + (outputs.mean(0) ** 2).sum()


@pytest.mark.parametrize("rng", ["batch", "micro_batch"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("loss", [looked_up, looked_up_together])
def test_tables_that_load_their_entries_are_not_read(loss: Any, norm: bool, rng: Any) -> None:
    net = Loading(norm=norm)
    engine = Engine(net, loss, micro_batch=5, rng=rng)
    for seed in range(3):
        step(net, engine, seed, loss)
    assert dict.items(TABLE) == {"own": nn.Tanh}.items()


def of_sample(outputs: Tensor, y: Tensor, begun: Any) -> Tensor:
    """Return losses of samples; once it has begun, with a mean that leaves no trace in a graph."""
    factor = outputs.detach().mean() if begun else torch.tensor(0.5, dtype=torch.double)
    return (outputs - y).square().mean(1) + outputs.sum(1) * factor


class OfModule(nn.Module):
    """A loss of samples that is a module."""

    begun = False
    gate: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gate", torch.zeros(()))

    def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
        return of_sample(outputs, y, self.begun or self.gate > 0)


class OfObject:
    """A loss of samples that is an object, or a method of one."""

    def __init__(self) -> None:
        self.begun, self.module = False, OfModule()

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        return of_sample(outputs, y, self.begun)

    def of_inner(self, outputs: Tensor, y: Tensor) -> Tensor:
        losses: Tensor = self.module(outputs, y)
        return losses


Declared = Callable[[], tuple[Callable[..., Tensor], Callable[[], Any]]]


def a_module() -> Any:
    loss = OfModule()
    return loss, lambda: setattr(loss, "begun", True)


def a_module_in_a_closure() -> Any:
    loss = OfModule()
    return lambda o, y: loss(o, y), lambda: setattr(loss, "begun", True)


def a_mode() -> Any:
    class Loss(OfModule):
        def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
            return of_sample(outputs, y, not self.training)

    loss = Loss()
    return loss, loss.eval


def a_buffer() -> Any:
    loss = OfModule()
    return loss, lambda: loss.gate.fill_(1)


def an_object() -> Any:
    loss = OfObject()
    return loss, lambda: setattr(loss, "begun", True)


def a_method() -> Any:
    loss = OfObject()
    return loss.of_inner, lambda: setattr(loss.module, "begun", True)


def a_dict_in_a_closure() -> Any:
    held = {"begun": False}
    return (
        lambda o, y: of_sample(o, y, held["begun"]),
        lambda: setting(held, "begun", True),
    )


def parsed_arguments() -> Any:
    held = argparse.Namespace(begun=False)
    return lambda o, y: of_sample(o, y, held.begun), lambda: setattr(held, "begun", True)


def a_partial() -> Any:
    held = {"begun": False}

    def loss(o: Tensor, y: Tensor, held: Any) -> Tensor:
        return of_sample(o, y, held["begun"])

    return partial(loss, held=held), lambda: setting(held, "begun", True)


def a_default() -> Any:
    space = SimpleNamespace(begun=False)

    def loss(o: Tensor, y: Tensor, held: Any = space) -> Tensor:
        return of_sample(o, y, held.begun)

    return loss, lambda: setattr(space, "begun", True)


def an_inner_function() -> Any:
    inner = [partial(of_sample, begun=False)]
    return (lambda o, y: inner[0](o, y)), lambda: setting(inner, 0, partial(of_sample, begun=True))


def a_cell() -> Any:
    begun = False

    def switch() -> None:
        nonlocal begun
        begun = True

    return (lambda o, y: of_sample(o, y, begun)), switch


def two_of_a_name() -> Any:
    def make(held: Any) -> Any:
        return lambda: held["begun"]

    one, other = {"begun": False}, {"begun": False}
    first, second = make(one), make(other)
    return (
        lambda o, y: of_sample(o, y, first() or second()),
        lambda: setting(one, "begun", True),
    )


@pytest.mark.product
@pytest.mark.parametrize(
    "inputs",
    [
        a_module,
        a_module_in_a_closure,
        a_mode,
        a_buffer,
        an_object,
        a_method,
        a_dict_in_a_closure,
        parsed_arguments,
        a_partial,
        a_default,
        an_inner_function,
        a_cell,
        two_of_a_name,
    ],
)
@pytest.mark.parametrize("form", ["per_sample", "ratio"])
def test_a_declared_loss_that_changes_later_is_detected(inputs: Declared, form: str) -> None:
    net, (loss, switch) = nn.Linear(6, 3).double(), inputs()
    declared = Loss.per_sample(loss)
    if form == "ratio":
        declared = Loss.ratio(lambda o, y: loss(o, y).sum(), len)
    engine = Engine(net, declared, micro_batch=5)
    for seed in range(4):
        torch.manual_seed(seed)
        x, y = torch.randn(12, 6, dtype=torch.double), torch.randn(12, 3, dtype=torch.double)
        net.zero_grad()
        if seed == 2:
            switch()
        want = undivided(net, lambda o, y: loss(o, y).mean(), x, y)
        if seed < 2:
            assert_exact(state_of(net, engine.backward(x, y)), want)
            assert engine.plan is not None
            assert engine.plan.exact
            continue
        with pytest.raises(NotExactError, match="samples 0 and 1 meet"):
            engine.backward(x, y)


MODES = [
    ("raw", "centred"),
    (None, "centred"),
    (0, 1),
    (0.0, 1.0),
    (False, True),
    ("a" * 100, "b" * 100),
    (torch.tensor(0), torch.tensor(1)),
]


class Moded(nn.Module):
    """Centres its rows without a trace in the graph, where a batch says so."""

    def __init__(self, first: Any) -> None:
        super().__init__()
        self.layer, self.first = nn.Linear(6, 3), [first]

    def forward(self, x: Tensor, mode: Any) -> Tensor:
        rows: Tensor = self.layer(x)
        return rows - (torch.zeros(3) if mode == self.first[0] else rows.detach().mean(0))


@pytest.mark.parametrize("modes", MODES, ids=str)
def test_what_a_batch_says_next_to_its_rows_is_detected(modes: tuple[Any, Any]) -> None:
    net = Moded(modes[0]).double()
    engine = Engine(net, F.mse_loss, micro_batch=5)
    for seed in range(3):
        torch.manual_seed(seed)
        inputs = {"x": torch.randn(12, 6, dtype=torch.double), "mode": modes[seed == 2]}
        y = torch.randn(12, 3, dtype=torch.double)
        net.zero_grad()
        if seed < 2:
            want = undivided(net, F.mse_loss, inputs, y)
            assert_exact(state_of(net, engine.backward(inputs, y)), want)
            continue
        with pytest.raises(NotExactError, match="samples 0 and 1 meet"):
            engine.backward(inputs, y)


@pytest.mark.parametrize("modes", MODES, ids=str)
def test_what_targets_say_next_to_their_rows_is_detected(modes: tuple[Any, Any]) -> None:
    net = nn.Linear(6, 3).double()

    def loss(outputs: Tensor, targets: Any) -> Tensor:
        return of_sample(outputs, targets["y"], targets["mode"] != modes[0])

    engine = Engine(net, Loss.per_sample(loss), micro_batch=5)
    for seed in range(3):
        torch.manual_seed(seed)
        x, y = torch.randn(12, 6, dtype=torch.double), torch.randn(12, 3, dtype=torch.double)
        if seed < 2:
            engine.backward(x, {"y": y, "mode": modes[0]})
            continue
        with pytest.raises(NotExactError, match="samples 0 and 1 meet"):
            engine.backward(x, {"y": y, "mode": modes[1]})


class Numbered(Moded):
    """Is given what differs in every batch."""

    def forward(self, x: Tensor, mode: Any, **others: Any) -> Tensor:
        del others
        return super().forward(x, mode)


def test_what_differs_in_every_batch_is_looked_at_for_a_while() -> None:
    engine = Engine(Numbered(None).double(), F.mse_loss, micro_batch=6)

    def looked(seed: int, mode: Any) -> int:
        x, y = torch.randn(12, 6).double(), torch.randn(12, 3).double()
        engine.backward({"x": x, "mode": mode, "number": seed, "text": f"{seed}" * 99}, y)
        assert engine.plan is not None
        assert engine.plan.exact
        return engine.plan.exact.step

    assert [looked(step, None) for step in range(1, 17)] == [*range(1, 17)]
    assert {looked(step, None) for step in range(17, 25)} == {16}
    with pytest.raises(NotExactError, match="samples 0 and 1 meet"):
        looked(25, "centred")  # what does not differ is still seen
