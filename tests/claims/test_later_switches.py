"""A model that computes something else from a later step on is looked at again, before its step.

What changes here leaves no trace in the autograd graph: the inputs are moved before it begins.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_of, undivided
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook

from anybatch import Engine, NotExactError

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


class Kind(enum.Enum):
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
        self.number, self.nothing, self.pair, self.kind = 0, None, (0,), Kind.BEFORE
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
    "an enum": attribute("kind", Kind.AFTER, lambda net: net.kind is Kind.AFTER),
    "a dtype": attribute("dtype", torch.half, lambda net: net.dtype is torch.half),
    "an attribute that is gone": (
        lambda net: not hasattr(net, "number"),
        lambda net: delattr(net, "number"),
    ),
    "an attribute of a layer": (
        lambda net: hasattr(net.last, "begun"),
        lambda net: setattr(net.last, "begun", True),
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


def hooks(net: Any, kind: str) -> None:
    setting(getattr(net, kind), 77, lambda _, given: (centred(*given),))


def in_place(_: Any, given: tuple[Tensor]) -> None:
    given[0].data.sub_(given[0].mean(0))


def forward(net: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(centred(x), net.weight, net.bias)


CODE: dict[str, Callable[[Any], Any]] = {
    "a function for another": attribute("call", centred, bool)[1],
    "an argument": attribute("call", partial(centred, begun=True), bool)[1],
    "a list of functions": lambda net: net.calls.append(centred),
    "a hook": lambda net: net.register_forward_pre_hook(lambda _, given: (centred(*given),)),
    "a hook by hand": lambda net: hooks(net, "_forward_pre_hooks"),
    "a hook that writes": lambda net: net.register_forward_pre_hook(in_place),
    "a hook of a layer": lambda net: net.first.register_forward_pre_hook(in_place),
    "a hook of every module": lambda net: register_module_forward_pre_hook(
        lambda module, given: (centred(*given),) if module is net else None
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
    for owner, name in ((Net, "begun"), (Net, "forward"), (Net, "switch"), (Of, "begun")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setitem(globals(), "BEGUN", False)
    monkeypatch.setitem(HELD["a"], "begun", False)
    every = torch.nn.modules.module._global_forward_pre_hooks
    monkeypatch.setattr(torch.nn.modules.module, "_global_forward_pre_hooks", every.copy())


def step(net: Net, engine: Engine, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = torch.randn(12, 6, dtype=torch.double), torch.randint(3, (12,))
    net.zero_grad()
    want = undivided(net, F.cross_entropy, x.clone(), y)
    assert_exact(state_of(net, engine.backward(x, y)), want)
    assert engine.plan is not None
    assert engine.plan.exact


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_that_is_set_later_is_seen(name: str) -> None:
    read, turn = SWITCHES[name]
    Net.switch = read  # type: ignore[method-assign]
    later(turn)


@pytest.mark.parametrize("name", CODE)
def test_code_that_comes_later_is_seen(name: str) -> None:
    later(CODE[name])


def later(turn: Callable[[Any], Any]) -> None:
    net = Net()
    engine = Engine(net, F.cross_entropy, micro_batch=5)
    for seed in range(3):
        step(net, engine, seed)
    turn(net)
    with pytest.raises(NotExactError, match="samples 0 and 1 meet"):
        step(net, engine, 3)


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
