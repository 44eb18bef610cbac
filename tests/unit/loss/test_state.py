"""A loss with state is called once a step; one that reads what forward left is refused."""

from __future__ import annotations

import functools
import gc
import itertools
import random
import types
from collections import deque
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.oracle import assert_exact, call, copy_of, same, snapshot, state_of, undivided
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Engine
from anybatch.errors import LossError
from anybatch.loss.state import LossState

N = 11
LossFn = Callable[..., Tensor]
Read = Callable[[], Any]
"""Returns what a loss has counted and kept."""


def net(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(1)
    layer = nn.BatchNorm1d(8) if norm else nn.Identity()
    return nn.Sequential(nn.Linear(5, 8), layer, nn.Tanh(), nn.Linear(8, 3)).double()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(N, 5).double(), torch.randint(0, 3, (N,))


class Annealed:
    """A weight that rises by calls, and the value of a term."""

    calls = 0
    observed: Any = None

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        self.observed = ce = F.cross_entropy(out, y)
        return ce + self.calls / 10 * F.mse_loss(out, torch.zeros_like(out))

    def method(self, out: Tensor, y: Tensor) -> Tensor:
        return self(out, y)

    def read(self) -> Any:
        return self.calls, self.observed.detach()


def of_object() -> tuple[LossFn, Read]:
    loss = Annealed()
    return loss, loss.read


def of_method() -> tuple[LossFn, Read]:
    loss = Annealed()
    return loss.method, loss.read


def of_object_in_a_lambda() -> tuple[LossFn, Read]:
    loss = Annealed()
    return lambda o, y: loss(o, y), loss.read


def of_object_in_a_partial() -> tuple[LossFn, Read]:
    loss = Annealed()
    return functools.partial(lambda o, y, fn: fn(o, y), fn=loss), loss.read


def of_coupled_object() -> tuple[LossFn, Read]:
    loss = Annealed()
    return lambda o, y: loss(o - o.mean(0), y), loss.read


def of_cell() -> tuple[LossFn, Read]:
    calls = 0

    def loss(o: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return F.cross_entropy(o, y) * (1 + calls)

    return loss, lambda: calls


COUNT = 0


def of_global() -> tuple[LossFn, Read]:
    global COUNT  # noqa: PLW0603
    COUNT = 0

    def loss(o: Tensor, y: Tensor) -> Tensor:
        global COUNT  # noqa: PLW0603
        COUNT += 1
        return F.cross_entropy(o, y) * (1 + COUNT)

    return loss, lambda: COUNT


def of_list() -> tuple[LossFn, Read]:
    log: list[Tensor] = []

    def loss(o: Tensor, y: Tensor) -> Tensor:
        found = F.cross_entropy(o, y)
        log.append(found.detach())
        return found * len(log)

    return loss, lambda: torch.stack(log)


def of_append() -> tuple[LossFn, Read]:
    log: list[int] = []
    append = log.append

    def loss(o: Tensor, y: Tensor) -> Tensor:
        append(len(o))
        return F.cross_entropy(o, y)

    return loss, lambda: list(log)


def of_nested_dict() -> tuple[LossFn, Read]:
    stored = {"a": {"calls": 0}, "recent": deque[float](maxlen=2)}

    def loss(o: Tensor, y: Tensor) -> Tensor:
        stored["a"]["calls"] += 1  # type: ignore[index]
        stored["recent"].append(o.shape[0])  # type: ignore[attr-defined]
        return F.cross_entropy(o, y) * stored["a"]["calls"]  # type: ignore[index]

    return loss, lambda: (stored["a"]["calls"], list(stored["recent"]))  # type: ignore[index]


def of_default() -> tuple[LossFn, Read]:
    def loss(o: Tensor, y: Tensor, log: list[int] = []) -> Tensor:  # noqa: B006
        log.append(1)
        return F.cross_entropy(o, y) * len(log)

    return loss, lambda: len(loss.__defaults__[0])  # type: ignore[index]


def of_function() -> tuple[LossFn, Read]:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        loss.calls += 1  # type: ignore[attr-defined]
        return F.cross_entropy(o, y) * loss.calls  # type: ignore[attr-defined]

    loss.calls = 0  # type: ignore[attr-defined]
    return loss, lambda: loss.calls  # type: ignore[attr-defined]


def of_class() -> tuple[LossFn, Read]:
    class Counts:
        calls = 0

        @classmethod
        def count(cls) -> int:
            cls.calls += 1
            return cls.calls

    return lambda o, y: F.cross_entropy(o, y) * Counts.count(), lambda: Counts.calls


def of_slots() -> tuple[LossFn, Read]:
    class Counts:
        __slots__ = ("calls",)

        def __init__(self) -> None:
            self.calls = 0

        def up(self) -> int:
            self.calls += 1
            return self.calls

    counts = Counts()
    return lambda o, y: F.cross_entropy(o, y) * counts.up(), lambda: counts.calls


def of_namespace() -> tuple[LossFn, Read]:
    stored = SimpleNamespace(calls=0)

    def loss(o: Tensor, y: Tensor) -> Tensor:
        stored.calls += 1
        return F.cross_entropy(o, y) * stored.calls

    return loss, lambda: stored.calls


def of_array() -> tuple[LossFn, Read]:
    calls = np.zeros(2)

    def loss(o: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        return F.cross_entropy(o, y) * float(calls[0])

    return loss, lambda: calls.tolist()


def of_tensor() -> tuple[LossFn, Read]:
    calls = torch.zeros(())

    def loss(o: Tensor, y: Tensor) -> Tensor:
        calls.add_(1)
        return F.cross_entropy(o, y) * float(calls)

    return loss, calls.clone


def of_module(buffer: bool) -> tuple[LossFn, Read]:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls: Any = 0
            if buffer:
                del self.calls
                self.register_buffer("calls", torch.zeros(()))

        def forward(self, o: Tensor, y: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return F.cross_entropy(o, y)

    loss = Module()
    return loss, lambda: float(loss.calls)


def of_iterator() -> tuple[LossFn, Read]:
    counter = itertools.count(1)
    return lambda o, y: F.cross_entropy(o, y) * next(counter), lambda: next(counter)


def of_draws() -> tuple[LossFn, Read]:
    rng = random.Random(3)
    return lambda o, y: F.cross_entropy(o, y) * rng.random(), rng.random


def of_global_draws() -> tuple[LossFn, Read]:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)

    def loss(o: Tensor, y: Tensor) -> Tensor:
        weight = random.random() + np.random.rand() + torch.rand(1).item()
        return F.cross_entropy(o, y) * weight

    return loss, lambda: (random.random(), np.random.rand(), float(torch.rand(1)))


def of_per_sample() -> tuple[LossFn, Read]:
    calls = [0]

    def each(o: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        return F.cross_entropy(o, y, reduction="none") * calls[0]

    def mean(o: Tensor, y: Tensor) -> Tensor:
        return each(o, y).mean()

    mean.declared = anybatch.Loss.per_sample(each)  # type: ignore[attr-defined]
    return mean, lambda: calls[0]


def of_ratio() -> tuple[LossFn, Read]:
    ema = torch.zeros((), dtype=torch.double)

    def num(o: Tensor, y: Tensor) -> Tensor:
        found = F.cross_entropy(o, y, reduction="sum")
        ema.mul_(0.5).add_(found.detach())
        return found

    def mean(o: Tensor, y: Tensor) -> Tensor:
        return num(o, y) / len(y)

    mean.declared = anybatch.Loss.ratio(num, len)  # type: ignore[attr-defined]
    return mean, ema.clone


STATEFUL: dict[str, Callable[[], tuple[LossFn, Read]]] = {
    "object": of_object,
    "method": of_method,
    "object in a lambda": of_object_in_a_lambda,
    "object in a partial": of_object_in_a_partial,
    "coupled object": of_coupled_object,
    "cell": of_cell,
    "global": of_global,
    "list": of_list,
    "list.append": of_append,
    "nested dict": of_nested_dict,
    "default argument": of_default,
    "function attribute": of_function,
    "class": of_class,
    "slots": of_slots,
    "namespace": of_namespace,
    "array": of_array,
    "tensor": of_tensor,
    "module": functools.partial(of_module, buffer=False),
    "module with a buffer": functools.partial(of_module, buffer=True),
    "iterator": of_iterator,
    "generator": of_draws,
    "global generators": of_global_draws,
    "per_sample": of_per_sample,
    "ratio": of_ratio,
}


def three_steps(model: nn.Module, step: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    """Train for three steps, and return the state after the last."""
    x, y = batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        step(x, y)
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model, step(x, y))


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return not a.is_meta and torch.allclose(a, b, rtol=1e-12, atol=0)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("micro_batch", [1, 4, 5])
@pytest.mark.parametrize("name", STATEFUL)
def test_a_loss_with_state_is_called_once_a_step(name: str, micro_batch: int, norm: bool) -> None:
    truth, ours = net(norm=norm), net(norm=norm)
    if norm and micro_batch == 1:
        micro_batch = 2
    loss, read = STATEFUL[name]()

    def plain(x: Tensor, y: Tensor) -> Tensor:
        found = loss(truth(x), y)
        found.backward()
        return found

    want, has = three_steps(truth, plain), read()
    loss, read = STATEFUL[name]()
    engine = Engine(ours, getattr(loss, "declared", loss), micro_batch=micro_batch)
    assert_exact(three_steps(ours, engine.backward), want)
    assert alike(read(), has)


@pytest.mark.parametrize("name", [n for n in STATEFUL if n != "iterator"])
def test_a_rehearsal_restores_the_state_of_a_loss(name: str) -> None:
    truth, ours = net(), net()
    loss, read = STATEFUL[name]()

    def plain(x: Tensor, y: Tensor) -> Tensor:
        found = loss(truth(x), y)
        found.backward()
        return found

    want, has = three_steps(truth, plain), read()
    loss, read = STATEFUL[name]()
    engine = Engine(ours, getattr(loss, "declared", loss), memory="1MiB")
    assert_exact(three_steps(ours, engine.backward), want)
    assert alike(read(), has)


def test_a_rehearsal_with_an_iterator_in_the_loss_is_refused() -> None:
    loss, _ = of_iterator()
    with pytest.raises(LossError, match=r"an iterator \(counter\): give micro_batch="):
        Engine(net(), loss, memory="1MiB").backward(*batch())


@pytest.mark.parametrize("micro_batch", [4, N])
def test_a_step_that_fails_leaves_the_state_of_its_loss(micro_batch: int) -> None:
    loss, (x, y) = Annealed(), batch()
    engine = Engine(net(), loss, micro_batch=micro_batch)
    engine.backward(x, y)
    before = loss.calls, loss.observed

    def observe(*_: Any) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        engine.backward(x, y, observe=observe)
    assert (loss.calls, loss.observed) == (before[0], before[1])


def test_no_tensor_without_data_stays_anywhere() -> None:
    @functools.cache
    def cached(o: Tensor) -> Tensor:
        return o * 2

    loss, _ = of_list()
    for fn in (lambda o, y: F.cross_entropy(cached(o), y), loss, Annealed()):
        Engine(net(), fn, micro_batch=4).backward(*batch())
        gc.collect()
        assert not [o for o in gc.get_objects() if isinstance(o, Tensor) and o.is_meta]


def test_check_says_that_a_loss_has_state_and_does_not_move_it() -> None:
    loss = Annealed()
    report = anybatch.check(net(), lambda o, y: loss(o, y), batch())
    assert report.exact
    assert "state of its own (loss.calls, loss.observed), so it is called once a step" in str(
        report
    )
    assert loss.calls == 0
    assert "state of its own" in str(anybatch.check(net(), Annealed(), batch()))
    assert "state of its own" not in str(anybatch.check(net(), of_coupled, batch()))


def of_coupled(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o - o.mean(0), y)


# What forward leaves.

EXTRA: dict[str, Any] = {}


class Leaves(nn.Module):
    """Leaves things in attributes, a dict, a list, a global and an object while it runs."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.body, self.head, self.what = nn.Linear(5, 8), nn.Linear(8, 3), what
        self.config = {"scale": 2.0}
        self.stats: dict[str, Any] = {}
        self.log: list[Any] = []
        self.held = SimpleNamespace(scale=1.0)
        self.scale: Any = 1.0
        self.tensor = torch.zeros((), dtype=torch.double)
        self.calls = 0
        self.bound = functools.partial(int)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 5] -> [n, 3]."""
        h = self.body(x).tanh()
        scale = h.detach().std(unbiased=False) + 1
        self.calls += self.what == "calls"
        if self.what == "attribute":
            self.scale = scale
        if self.what == "number":
            self.scale = float(scale)
        bearers: dict[str, Any] = {
            "of a child": self.head,
            "object": self.held,
            "of a parameter": self.head.weight,
            "of a buffer": self.tensor,
            "of a partial": self.bound,
        }
        if self.what in bearers:
            bearers[self.what].scale = scale
        if self.what == "dict":
            self.stats["scale"] = scale
        if self.what == "list":
            self.log.append(scale)
        if self.what == "in place":
            self.tensor.copy_(scale)
        if self.what == "global":
            EXTRA["scale"] = scale
        if self.what == "features":
            self.features = h.detach()
        return self.head(h)


def by_default(held: dict[str, Any]) -> LossFn:
    def loss(o: Tensor, y: Tensor, stats: dict[str, Any] = held) -> Tensor:
        return F.cross_entropy(o / float(stats["scale"]), y)

    return loss


def by_keyword(held: dict[str, Any]) -> LossFn:
    def loss(o: Tensor, y: Tensor, *, stats: dict[str, Any] = held) -> Tensor:
        return F.cross_entropy(o / float(stats["scale"]), y)

    return loss


def by_view(view: Any) -> LossFn:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        scale = view["scale"] if isinstance(view, Mapping) else next(iter(view))
        return F.cross_entropy(o / float(scale), y)

    return loss


READS: dict[str, tuple[str, Callable[[Any], LossFn], str]] = {
    "attribute": (
        "attribute",
        lambda m: lambda o, y: F.cross_entropy(o / m.scale, y),
        r"reads m\.scale, which forward stored elsewhere",
    ),
    "number": ("number", lambda m: lambda o, y: F.cross_entropy(o / m.scale, y), r"m\.scale"),
    "by name": (
        "number",
        lambda m: lambda o, y: F.cross_entropy(o / getattr(m, "sca" + "le"), y),
        r"m\.scale",
    ),
    "by vars": (
        "number",
        lambda m: lambda o, y: F.cross_entropy(o / vars(m)["scale"], y),
        r"m\.scale",
    ),
    "of a child": (
        "of a child",
        lambda m: lambda o, y: F.cross_entropy(o / m.head.scale, y),
        r"m\.head\.scale",
    ),
    "dict": ("dict", lambda m: lambda o, y: F.cross_entropy(o / m.stats["scale"], y), r"m\.stats"),
    "dict itself": (
        "dict",
        lambda m: functools.partial(
            lambda o, y, stats: F.cross_entropy(o / stats["scale"], y), stats=m.stats
        ),
        "stats",
    ),
    "a default": ("dict", lambda m: by_default(m.stats), "stats"),
    "a default of a keyword": ("dict", lambda m: by_keyword(m.stats), "stats"),
    "bound by place": (
        "dict",
        lambda m: functools.partial(
            lambda stats, o, y: F.cross_entropy(o / stats["scale"], y), m.stats
        ),
        "stats",
    ),
    "bound twice": (
        "dict",
        lambda m: functools.partial(
            functools.partial(lambda _, stats, o, y: F.cross_entropy(o / stats["scale"], y), 1.0),
            m.stats,
        ),
        "stats",
    ),
    "a proxy": ("dict", lambda m: by_view(types.MappingProxyType(m.stats)), "view"),
    "a view": ("dict", lambda m: by_view(m.stats.values()), "view"),
    "of a parameter": (
        "of a parameter",
        lambda m: lambda o, y: F.cross_entropy(o / m.head.weight.scale, y),
        "scale",
    ),
    "of a buffer": (
        "of a buffer",
        lambda m: lambda o, y: F.cross_entropy(o / float(m.tensor.scale), y),
        "scale",
    ),
    "of a partial": (
        "of a partial",
        lambda m: lambda o, y: F.cross_entropy(o / m.bound.scale, y),
        "scale",
    ),
    "list": ("list", lambda m: lambda o, y: F.cross_entropy(o / m.log[-1], y), r"m\.log"),
    "object": (
        "object",
        lambda m: lambda o, y: F.cross_entropy(o / m.held.scale, y),
        r"m\.held\.scale",
    ),
    "in place": (
        "in place",
        lambda m: lambda o, y: F.cross_entropy(o / m.tensor, y),
        r"m\.tensor",
    ),
    "global": (
        "global",
        lambda _: lambda o, y: F.cross_entropy(o / EXTRA["scale"], y),
        "EXTRA",
    ),
    "counter": ("calls", lambda m: lambda o, y: F.cross_entropy(o, y) / m.calls, r"m\.calls"),
    "method": (
        "number",
        lambda m: (
            type(
                "T", (), {"m": m, "loss": lambda s, o, y: F.cross_entropy(o / s.m.scale, y)}
            )().loss
        ),
        r"scale",
    ),
    "per_sample": (
        "number",
        lambda m: anybatch.Loss.per_sample(
            lambda o, y: F.cross_entropy(o / m.scale, y, reduction="none")
        ),
        r"m\.scale",
    ),
    "coupled": (
        "number",
        lambda m: lambda o, y: F.cross_entropy((o - o.mean(0)) / m.scale, y),
        r"m\.scale",
    ),
}  # type: ignore[assignment]


@pytest.mark.product
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("micro_batch", [2, 4])
@pytest.mark.parametrize("name", READS)
def test_a_loss_that_reads_what_forward_left_is_refused(
    name: str, micro_batch: int, norm: bool
) -> None:
    what, loss, message = READS[name]
    model = Leaves(what).double()
    EXTRA.clear()
    if norm:
        model.body = nn.Sequential(model.body, nn.BatchNorm1d(8).double())  # type: ignore[assignment]
    x, y = batch()
    before = snapshot(model)
    for _ in range(2):
        with pytest.raises(LossError, match=message):
            Engine(model, loss(model), micro_batch=micro_batch).backward(x, y)
        assert same(before, snapshot(model))


def test_what_forward_begins_to_store_later_is_refused_then() -> None:
    for coupled in (False, True):
        model, (x, y) = Leaves("nothing").double(), batch()

        def loss(o: Tensor, y: Tensor, m: Any = model, coupled: bool = coupled) -> Tensor:
            return F.cross_entropy((o - o.mean(0) if coupled else o) / m.scale, y)

        engine = Engine(model, loss, micro_batch=4)
        engine.backward(x, y)
        model.what = "number"
        with pytest.raises(LossError, match="scale, which forward stored"):
            engine.backward(x, y)


def penalty(m: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in m.parameters()]).sum()


EXACT: dict[str, tuple[str, Callable[[Any], LossFn]]] = {
    "penalty, nothing left": ("nothing", lambda m: lambda o, y: F.cross_entropy(o, y) + penalty(m)),
    "penalty, features left": (
        "features",
        lambda m: lambda o, y: F.cross_entropy(o, y) + 0.1 * penalty(m),
    ),
    "constants, features left": (
        "features",
        lambda m: lambda o, y: F.cross_entropy(o, y) * m.config["scale"] * m.scale,
    ),
    "a global left, named and not read": (
        "global",
        lambda _: lambda o, y: F.cross_entropy(o / EXTRA["scale"] if len(o) < 0 else o, y),
    ),
    "constants, a list left": (
        "list",
        lambda m: lambda o, y: F.cross_entropy(o, y) * m.config["scale"] * m.scale,
    ),
    "a counter left": ("calls", lambda m: lambda o, y: F.cross_entropy(o * m.scale, y)),
    "of a child, another read": (
        "of a child",
        lambda m: lambda o, y: F.cross_entropy(o * m.head.weight.std(), y),
    ),
    "mode read": ("number", lambda m: lambda o, y: F.cross_entropy(o, y) * (1 + m.training)),
}


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("name", EXACT)
def test_a_loss_that_reads_only_what_stays_is_exact(name: str, micro_batch: int) -> None:
    what, made = EXACT[name]
    torch.manual_seed(4)
    model = Leaves(what).double()
    x, y = batch()
    truth, ours = copy_of(model), copy_of(model)
    loss = made(truth)(truth(x), y)
    loss.backward()
    engine = Engine(ours, made(ours), micro_batch=micro_batch)
    assert_exact(state_of(ours, engine.backward(x, y)), state_of(truth, loss))
    if "constants" in name or "mode" in name:
        assert engine.plan is not None
        assert engine.plan.mechanism == "streaming"


def test_a_write_before_a_read_is_no_read_of_what_forward_left() -> None:
    torch.manual_seed(4)
    model, (x, y) = Leaves("number").double(), batch()

    def made(m: Any) -> LossFn:
        def loss(o: Tensor, y: Tensor) -> Tensor:
            m.scale = 3.0
            return F.cross_entropy(o / m.scale, y)

        return loss

    truth, ours = copy_of(model), copy_of(model)
    loss = made(truth)(truth(x), y)
    loss.backward()
    got = Engine(ours, made(ours), micro_batch=4).backward(x, y)
    assert_exact(state_of(ours, got), state_of(truth, loss))


# Modules that a loss reaches.


def reached(way: str, norm: nn.Module, head: nn.Module) -> LossFn:
    def own(o: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(head(norm(o)), y)

    class Object:
        def __init__(self) -> None:
            self.parts = {"norm": [norm], "head": head}

        def __call__(self, o: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.parts["head"](self.parts["norm"][0](o)), y)  # type: ignore[operator,index]

        def loss(self, o: Tensor, y: Tensor) -> Tensor:
            return self(o, y)

    EXTRA["norm"], EXTRA["head"] = norm, head
    return {
        "closure": own,
        "closure of a closure": lambda o, y: own(o, y),
        "partial": functools.partial(
            lambda o, y, n, h: F.cross_entropy(h(n(o)), y), n=norm, h=head
        ),
        "object": Object(),
        "bound method": Object().loss,
        "default": lambda o, y, n=norm, h=head: F.cross_entropy(h(n(o)), y),
        "method of the module": functools.partial(
            lambda o, y, f, g: F.cross_entropy(g(f(o)), y), f=norm.forward, g=head.forward
        ),
        "global": lambda o, y: F.cross_entropy(EXTRA["head"](EXTRA["norm"](o)), y),
    }[way]


WAYS = (
    "closure",
    "closure of a closure",
    "partial",
    "object",
    "bound method",
    "default",
    "method of the module",
    "global",
)


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("momentum", [None, 0.1])
@pytest.mark.parametrize("way", WAYS)
def test_statistics_that_a_loss_reaches_move_once_a_step(
    way: str, momentum: float | None, lanes: bool
) -> None:
    def parts() -> tuple[nn.Module, nn.Module, nn.Module]:
        torch.manual_seed(6)
        norm = nn.BatchNorm1d(3, momentum=momentum).double()
        return net(norm=lanes), norm, nn.Linear(3, 3).double()

    def run(micro_batch: int | None) -> dict[str, Tensor]:
        model, norm, head = parts()
        loss = reached(way, norm, head)
        engine = None if micro_batch is None else Engine(model, loss, micro_batch=micro_batch)
        every = nn.ModuleDict({"model": model, "norm": norm, "head": head})
        for k in range(3):
            every.zero_grad()
            x, y = batch()
            if engine is not None:
                found = engine.backward(x * (k + 1), y)
            else:
                found = loss(model(x * (k + 1)), y)
                found.backward()
        return state_of(every, found)

    want = run(None)
    assert int(want["norm.num_batches_tracked (buffer)"]) == 3
    for micro_batch in (2, 4):
        assert_exact(run(micro_batch), want)


# Lengths.


class Padded(nn.Module):
    """As ``pad_packed_sequence``: outputs as long as the longest row; or of a fixed length."""

    def __init__(self, total: int | None = None) -> None:
        super().__init__()
        self.f, self.total = nn.Linear(4, 3), total

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """[n, T, 4] -> [n, longest, 3]."""
        return self.f(x[:, : self.total or int(lengths.max())])


def cut(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o.flatten(0, 1), y[:, : o.shape[1]].flatten(), ignore_index=-100)


def cut_classes(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o.transpose(1, 2), y[:, : o.shape[1]], ignore_index=-100)


def cut_squares(o: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(o[..., 0], y[:, : o.shape[1]].double())


def cut_sum(o: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(o[..., 0], y[:, : o.shape[1]].double(), reduction="sum")


def sequences() -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(7)
    lengths = torch.tensor([3, 4, 3, 4, 5, 6, 5, 6, 7, 7, 8])
    x, y = torch.randn(N, 8, 4).double(), torch.randint(0, 3, (N, 8))
    y[torch.arange(8)[None] >= lengths[:, None]] = -100
    return {"x": x, "lengths": lengths}, y


@pytest.mark.product
@pytest.mark.parametrize("loss", [cut, cut_classes, cut_squares, cut_sum])
@pytest.mark.parametrize("micro_batch", [2, 4, 5])
def test_a_denominator_is_not_counted_with_the_lengths_of_other_rows(
    loss: LossFn, micro_batch: int
) -> None:
    (x, y), model = sequences(), Padded().double()
    before = snapshot(model)
    with pytest.raises(
        anybatch.errors.AnybatchError, match=r"pad_packed_sequence\(\.\.\., total_length="
    ):
        Engine(model, loss, micro_batch=micro_batch).backward(x, y)
    assert same(before, snapshot(model))
    fixed = Padded(8).double()
    ours = copy_of(fixed)
    got = state_of(ours, Engine(ours, loss, micro_batch=micro_batch).backward(x, y))
    assert_exact(got, undivided(fixed, loss, x, y))


# Labels of all samples.

LABELS = torch.randn(N, 3).double()
OF = torch.tensor([0, 0, 3, 9, 10])


class Reads(nn.Linear):
    """Cannot be rehearsed without data."""

    def forward(self, x: Tensor) -> Tensor:
        """[n, 5] -> [n, 3]."""
        assert float(x.sum()) < 1e9
        return super().forward(x)


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("class_", [nn.Linear, Reads])
@pytest.mark.parametrize(
    "loss",
    [
        lambda o: (o[OF] - LABELS[OF]).square().sum() / LABELS.abs().sum(),
        lambda o: F.mse_loss(o, LABELS),
        lambda o: (LABELS.abs() * o).square().mean(),
    ],
)
@pytest.mark.parametrize("options", [{"micro_batch": 3}, {"memory": "1MiB"}, {}])
def test_a_loss_over_the_labels_of_all_samples_is_exact_under_any_plan(
    options: dict[str, Any], loss: LossFn, class_: type[nn.Module]
) -> None:
    torch.manual_seed(8)
    model, (x, _) = class_(5, 3).double(), batch()
    ours = copy_of(model)
    got = state_of(ours, Engine(ours, loss, **options).backward(x))
    assert_exact(got, undivided(model, loss, x, None))


# What is listed.


def test_a_function_without_state_is_not_compared() -> None:
    assert not LossState([F.cross_entropy])
    assert not LossState([lambda o, y: F.cross_entropy(o, y) + 0.5 * F.mse_loss(o, o)])
    assert not LossState([call, of_coupled])


def test_a_place_that_holds_another_object_is_listed_anew() -> None:
    first, second = Annealed(), Annealed()

    def made() -> tuple[LossFn, Callable[[Any], None]]:
        inner = first

        def put(other: Any) -> None:
            nonlocal inner
            inner = other

        return lambda o, y: inner(o, y), put

    loss, put = made()
    model, (x, y) = net(), batch()
    engine = Engine(model, loss, micro_batch=4)
    engine.backward(x, y)
    put(second)
    for _ in range(2):
        engine.backward(x[1:], y[1:])
    assert (first.calls, second.calls) == (1, 2)


def by_gradient(model: nn.Module, variant: str) -> Any:
    """Return a loss that is weighed by the gradient of a parameter."""
    weight = model.get_parameter("0.weight")

    def size() -> float:
        return 1.0 if weight.grad is None else 1 + float(weight.grad.norm())

    each = functools.partial(F.cross_entropy, reduction="none")
    return {
        "plain": lambda o, y: F.cross_entropy(o, y) * size(),
        "coupled": lambda o, y: each(o, y).mean().sqrt() * size(),
        "per_sample": anybatch.Loss.per_sample(lambda o, y: each(o, y) * size()),
        "ratio": anybatch.Loss.ratio(lambda o, y: each(o, y).sum() * size(), len),
    }[variant]


@pytest.mark.product
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("variant", ["plain", "coupled", "per_sample", "ratio"])
def test_a_loss_that_reads_gradients_is_refused_where_they_are_added_up(
    variant: str, norm: bool
) -> None:
    norms = [nn.BatchNorm1d(8)] if norm else []
    model = nn.Sequential(nn.Linear(5, 8), *norms, nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = batch()
    with pytest.raises(LossError, match=r"reads \.grad of a parameter"):
        Engine(model, by_gradient(model, variant), micro_batch=4).backward(x, y)
    Engine(model, by_gradient(model, variant), micro_batch=N).backward(x, y)


def test_a_loss_that_differentiates_reads_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = batch()

    def loss(o: Tensor, t: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(o.logsumexp(1).sum(), o, create_graph=True)
        decay = model.get_parameter("0.weight").square().sum()
        return (F.cross_entropy(o, t) + slope.square().mean()).sqrt() + 0.1 * decay

    full = loss(model(x), y)
    full.backward()
    want = state_of(model, full)
    model.zero_grad()
    engine = Engine(model, loss, micro_batch=4)
    assert_exact(state_of(model, engine.backward(x, y)), want)
