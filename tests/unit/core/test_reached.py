"""Values that a callable reaches, of every kind: listed, compared, restored and counted exactly."""

from __future__ import annotations

import ctypes
import functools
import queue
import threading
import weakref
from array import array
from collections import ChainMap, Counter, UserDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.oracle import assert_exact, state_after, state_of, undivided
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Engine
from anybatch.core.reached import NONE, Relation, attributes, named, names_of, reached, slots
from anybatch.errors import LossError, NotExactError

FLAG = {"count": 0}


def function(a: Any, b: Any = "default", *, c: Any = "keyword") -> Any:
    return FLAG, a, b, c


function.attribute = "attribute"  # type: ignore[attr-defined]


def of_cell() -> Callable[[], Any]:
    value = "cell"
    return lambda: value


class Holder:
    __slots__ = ("_Holder__private", "slot")

    def __init__(self) -> None:
        self.slot = "slot"

    def method(self) -> None: ...

    part = functools.partialmethod(function, "argument")
    static = staticmethod(function)
    late = functools.cached_property(function)
    read = property(function, function)


@dataclass
class Count(Holder):
    """A number in an attribute, and a slot of its base."""

    count: int = 0


VARIABLE = ContextVar[str]("variable")
holder, count = Holder(), Count()

HOLDS: dict[str, tuple[Any, set[tuple[Relation, str, Any]]]] = {
    "a cell": (of_cell(), {(Relation.CELL, "value", "cell")}),
    "a function": (
        function,
        {
            (Relation.DEFAULT, "b", "default"),
            (Relation.DEFAULT, "c", "keyword"),
            (Relation.ATTRIBUTE, "attribute", "attribute"),
        },
    ),
    "a method": (
        holder.method,
        {(Relation.PART, "", Holder.method), (Relation.OBJECT, "", holder)},
    ),
    "a partial": (
        functools.partial(function, "argument"),
        {
            (Relation.PART, "", function),
            (Relation.ARGUMENT, "a", "argument"),
            (Relation.PART, "", "{}"),
        },
    ),
    "a partial method": (
        vars(Holder)["part"],
        {
            (Relation.PART, "", function),
            (Relation.PART, "", ("argument",)),
            (Relation.PART, "", "{}"),
        },
    ),
    "a static method": (vars(Holder)["static"], {(Relation.PART, "", function)}),
    "a class method": (classmethod(function), {(Relation.PART, "", function)}),
    "a property": (vars(Holder)["read"], {(Relation.PART, "", function)}),
    "a cached property": (vars(Holder)["late"], {(Relation.PART, "", function)}),
    "a cached function": (functools.cache(function), {(Relation.PART, "", function)}),
    "a method of C": ([].append, {(Relation.PART, "", "[]")}),
    "a function of C": (len, set()),
    "a view": (MappingProxyType({}), {(Relation.PART, "", "{}")}),
    "a context variable": (VARIABLE, {(Relation.PART, "", None)}),
    "a weak reference": (weakref.ref(count), {(Relation.PART, "", "Count(count=0)")}),
    "a view of memory": (memoryview(b"bytes"), {(Relation.PART, "", b"bytes")}),
    "a number": (3, set()),
}


@pytest.mark.parametrize("name", HOLDS)
def test_what_a_callable_holds_is_listed(name: str) -> None:
    value, want = HOLDS[name]
    found = {
        (one.link, one.name, repr(one.value) if one.value.__hash__ is None else one.value)
        for one in reached(value)
    }
    assert found == want


def test_names_of_code_are_those_of_functions_inside_it_too() -> None:
    def outer() -> Any:
        return lambda: getattr(FLAG, "count")  # noqa: B009

    assert {"FLAG", "getattr"} <= names_of(outer.__code__)
    assert "count" in names_of(outer.__code__, texts=True) - names_of(outer.__code__)
    assert [one.value for one in named(function, {"FLAG", "missing"})] == [FLAG]


def test_slots_of_bases_and_private_ones_are_attributes() -> None:
    assert set(slots(Count)) == {"slot", "_Holder__private"}
    assert attributes(count).keys() == {"slot", "_Holder__private", "count"}


# A number of every kind, which a model, a loss and a coupled function compute with.

Read, Write = Callable[[], int], Callable[[int], Any]
PACKAGE, INNER = ModuleType("package"), ModuleType("package.inner")
PACKAGE.inner = INNER  # type: ignore[attr-defined]


def of_item(held: Any, key: Any = "count") -> tuple[Read, Write]:
    return lambda: int(held[key]), lambda to: held.__setitem__(key, to)


def of_attribute(held: Any, name: str = "count") -> tuple[Read, Write]:
    return lambda: getattr(held, name), lambda to: setattr(held, name, to)


def of_class() -> tuple[Read, Write]:
    class Config:
        count = 0

    return lambda: Config.count, lambda to: setattr(Config, "count", to)


def of_meta() -> tuple[Read, Write]:
    class Meta(type):
        number = 0

        @property
        def count(cls) -> int:
            return cls.number

    class Config(metaclass=Meta): ...

    return lambda: Config.count, lambda to: setattr(Meta, "number", to)


def of_package() -> tuple[Read, Write]:
    INNER.count = 0  # type: ignore[attr-defined]
    return lambda: PACKAGE.inner.count, lambda to: setattr(INNER, "count", to)


def of_descriptor(kind: Any) -> tuple[Read, Write]:
    """A property, a cached one, a partial method or a descriptor that reads a global."""
    FLAG["count"] = 0

    class Config:
        count = kind(lambda *_: FLAG["count"])

    found: Any = Config
    if kind is functools.partialmethod:
        return lambda: found().count(), lambda to: FLAG.update(count=to)
    return lambda: found().count, lambda to: FLAG.update(count=to)


class Descriptor:
    def __init__(self, read: Callable[..., int]) -> None:
        self.read = read

    def __get__(self, *_: Any) -> int:
        return self.read()


def of_cache() -> tuple[Read, Write]:
    FLAG["count"] = 0
    cached = functools.cache(lambda: FLAG["count"])

    def write(to: int) -> None:
        FLAG["count"] = to
        cached.cache_clear()

    return cached, write


def of_method(special: bool) -> tuple[Read, Write]:
    class Config:
        def read(self) -> int:
            return FLAG["count"]

        def __getitem__(self, _: int) -> int:
            return FLAG["count"]

    FLAG["count"], config = 0, Config()
    read = (lambda: config[0]) if special else (lambda: config.read())
    return read, lambda to: FLAG.update(count=to)


def of_views() -> tuple[Read, Write]:
    held = {"count": 0}
    view = MappingProxyType(held)
    return lambda: view["count"], of_item(held)[1]


def of_reference() -> tuple[Read, Write]:
    one = Count()
    reference = weakref.ref(one)
    return lambda: reference().count, lambda to, one=one: setattr(one, "count", to)  # type: ignore[union-attr, misc]


def of_queue() -> tuple[Read, Write]:
    held = queue.Queue[int]()
    held.put(0)
    return lambda: held.queue[0], lambda to: held.queue.__setitem__(0, to)


def of_local() -> tuple[Read, Write]:
    held = threading.local()
    held.count = 0
    return of_attribute(held)


def of_slot() -> tuple[Read, Write]:
    one = Count()
    one.slot = 0  # type: ignore[assignment]
    return of_attribute(one, "slot")


def of_key() -> tuple[Read, Write]:
    held: dict[int, None] = {0: None}

    def write(to: int) -> None:
        held.clear()
        held[to] = None

    return lambda: next(iter(held)), write


def of_frozen() -> tuple[Read, Write]:
    held = [frozenset([("count", 0)])]
    return lambda: dict(held[0])["count"], lambda to: setitem(held, 0, frozenset([("count", to)]))


def setitem(held: Any, key: Any, value: Any) -> None:
    held[key] = value


def deep(number: int) -> tuple[Read, Write]:
    inner = held = {"count": 0}
    for _ in range(number):
        held = {"in": held}  # type: ignore[dict-item]

    def read() -> int:
        one: Any = held
        while "in" in one:
            one = one["in"]
        return int(one["count"])

    return read, of_item(inner)[1]


KINDS: dict[str, Callable[[], tuple[Read, Write]]] = {
    "a class in a cell": of_class,
    "a class in a dict": lambda: of_attribute({"a": type("Config", (), {"count": 0})}["a"]),
    "a class of a class": of_meta,
    "a file in a file": of_package,
    "a property": lambda: of_descriptor(property),
    "a descriptor": lambda: of_descriptor(Descriptor),
    "a cached property": lambda: of_descriptor(functools.cached_property),
    "a partial method": lambda: of_descriptor(functools.partialmethod),
    "a cached function": of_cache,
    "a method of an object": lambda: of_method(special=False),
    "a special method": lambda: of_method(special=True),
    "a view": of_views,
    "a weak reference": of_reference,
    "a queue": of_queue,
    "a thread's own": of_local,
    "a slot of a base": of_slot,
    "a key": of_key,
    "a frozen set": of_frozen,
    "four dicts in each other": lambda: deep(3),
    "six dicts in each other": lambda: deep(5),
    "a user's dict": lambda: of_item(UserDict(count=0)),
    "a chain of dicts": lambda: of_item(ChainMap({"count": 0})),
    "a counter": lambda: of_item(Counter(count=0)),
    "a deque": lambda: of_item(deque([0]), 0),
    "an object in an object": lambda: of_attribute(SimpleNamespace(a=Count()).a),
    "an array": lambda: of_item(array("i", [0]), 0),
    "an array of numpy": lambda: of_item(np.zeros(1), 0),
    "a number of C": lambda: of_attribute(ctypes.c_int(0), "value"),
    "bytes": lambda: of_item(bytearray(1), 0),
    "a view of bytes": lambda: of_item(memoryview(bytearray(1)), 0),
}

OF_LOSS = [one for one in KINDS if one not in ("a cached function", "a frozen set")]
"""Others are written to by a function that is no count."""


class Net(nn.Module):
    """Two layers, and a number that is read, or counted, between them."""

    def __init__(self, between: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.between = nn.Linear(6, 4), nn.Linear(4, 3), between
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x)
        dim = self.between(x)
        # Without a gradient: no graph shows along which dimension.
        return self.last((hidden - hidden.detach().tanh().mean(dim, keepdim=True)).tanh())


def rows() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 6, dtype=torch.double), torch.randint(3, (8,))


@pytest.mark.parametrize("name", KINDS)
def test_a_switch_that_no_graph_shows_is_noticed(name: str) -> None:
    read, write = KINDS[name]()
    net, (x, y) = Net(lambda _: 1 - read()), rows()
    engine = Engine(net, F.cross_entropy, micro_batch=3)
    for _ in range(2):
        net.zero_grad()
        want = undivided(net, F.cross_entropy, x.clone(), y)
        assert_exact(state_of(net, engine.backward(x, y)), want)
    write(1)
    with pytest.raises(NotExactError, match="samples 0 and 1 meet"):
        engine.backward(x, y)


@pytest.mark.parametrize("name", OF_LOSS)
def test_an_inspection_restores_what_forward_counts(name: str) -> None:
    read, write = KINDS[name]()

    def between(_: Tensor) -> int:
        write(read() + 1)
        return 1

    net, (x, y) = Net(between), rows()
    engine, counts = Engine(net, F.cross_entropy, micro_batch=4), [read()]
    for _ in range(2):
        engine.backward(x, y)
        counts.append(read())
    assert counts == [0, 2, 4]


@pytest.mark.parametrize("name", OF_LOSS)
def test_a_loss_that_counts_is_exact(name: str) -> None:
    results = []
    for micro_batch in (3, None):
        read, write = KINDS[name]()

        def loss(o: Tensor, y: Tensor, read: Read = read, write: Write = write) -> Tensor:
            write(read() + 1)
            return F.cross_entropy(o, y) * (1 + read())

        net, (x, y) = Net(lambda _: 1), rows()
        engine = Engine(net, loss, micro_batch=micro_batch) if micro_batch else None
        for _ in range(3):
            net.zero_grad()
            result = engine.backward(x, y) if engine else undivided(net, loss, x, y)
        results.append(state_of(net, result) if engine else result)
    assert_exact(*results)


class Reads(nn.Module):
    """A coupled loss that reads a number which forward makes of one micro-batch."""

    def __init__(self, read: Read, write: Write) -> None:
        super().__init__()
        self.layer, self.read, self.write = nn.Linear(6, 3).double(), read, write

    def forward(self, x: Tensor) -> Tensor:
        self.write(int(x[0, 0] > 0))
        return anybatch.coupled(lambda o: o.mean(0).square().sum() * (1 + self.read()))(
            self.layer(x)
        )


def backward_of(net: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = net(x)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("name", [n for n in KINDS if n not in ("a key", "a frozen set")])
def test_a_coupled_function_reads_no_number_of_one_micro_batch(name: str) -> None:
    net, (x, _) = Reads(*KINDS[name]()), rows()
    x[:, 0] = x[:, 0].abs()  # the same in all micro-batches, at first
    engine = Engine(net, micro_batch=3)
    want = state_after(net, lambda one: backward_of(one, x))
    assert_exact(state_of(net, engine.backward(x)), want)
    x[6, 0] = -1
    with pytest.raises(LossError, match="must be the same in all micro-batches"):
        engine.backward(x)


class Refuses:
    """Raises where it is asked for its signature, or for a name that it does not have."""

    __slots__ = ("empty",)

    def __call__(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def released() -> memoryview:
    view = memoryview(bytearray(b"1"))
    view.release()
    return view


def with_more_defaults() -> Callable[[], Any]:
    def one(argument: Any) -> Any:
        return argument

    one.__defaults__ = ("unused", "default")
    return one


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (released(), [""]),
        (functools.partial(Refuses(), 1), ["", "", ""]),
        (with_more_defaults(), ["argument"]),
    ],
    ids=["a released view", "a partial of what has no name", "more defaults than arguments"],
)
def test_a_value_that_cannot_be_asked_is_followed_as_far_as_it_can(
    value: Any, names: list[str]
) -> None:
    assert [one.name for one in reached(value)] == names


def test_attributes_that_raise_are_none() -> None:
    assert attributes(Refuses()) == {"empty": NONE}


def test_a_loss_that_holds_a_sparse_tensor_is_exact() -> None:
    torch.manual_seed(0)
    model, near = nn.Linear(4, 3).double(), torch.eye(3).double().to_sparse()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.sparse.mm(near, out.T).T, y)

    x, y = torch.randn(7, 4).double(), torch.arange(7) % 3
    want = undivided(model, loss, x, y)
    engine = Engine(model, loss, micro_batch=3)
    assert_exact(state_of(model, engine.backward(x, y)), want)


def test_a_loss_that_takes_the_name_of_a_function_of_torch_is_followed() -> None:
    torch.manual_seed(0)
    model, calls = nn.Linear(4, 3).double(), [0]

    @functools.wraps(F.cross_entropy)
    def loss(out: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        return F.cross_entropy(out, y) * calls[0]

    x, y = torch.randn(7, 4).double(), torch.arange(7) % 3
    want = undivided(model, loss, x, y)
    calls[0] = 0
    engine = Engine(model, loss, micro_batch=3)
    assert_exact(state_of(model, engine.backward(x, y)), want)
    assert calls == [1]
