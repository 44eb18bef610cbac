"""What a call of forward leaves on a model is refused where a later call computes with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_after, state_of, undivided
from tests.unit.execution.proof.nets import batch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine
from anybatch.errors import NotExactError

Body = Callable[[Any, Tensor], Tensor]


class Keeps(nn.Module):
    """A body that may leave something in `stored`.

    Attributes:
        stored: what is left.
    """

    def __init__(self, body: Body, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), norm, nn.Linear(8, 3)
        self.body, self.stored = body, dict[Any, Any]()
        self.state: Any = None
        self.bank = deque[Tensor](maxlen=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self, self.norm(self.first(x)).tanh()))


class Box:
    """An object that is no module."""

    state: Any = None
    calls = 0


def of_a_shape(h: Tensor, stored: Any) -> Tensor:
    return h if stored is None or stored.shape != h.shape else h + stored


def attribute(net: Keeps, h: Tensor) -> Tensor:
    before, net.state = net.state, h.detach()
    return of_a_shape(h, before)


def by_size(net: Keeps, h: Tensor) -> Tensor:
    before, net.stored[len(h)] = net.stored.get(len(h)), h.detach()
    return of_a_shape(h, before)


def in_a_tuple(net: Keeps, h: Tensor) -> Tensor:
    before, net.state = net.state, ([h.detach()],)
    return of_a_shape(h, None if before is None else before[0][0])


def in_an_object(net: Keeps, h: Tensor) -> Tensor:
    box = net.stored.setdefault("box", Box())
    before, box.state = box.state, h.detach()
    return of_a_shape(h, before)


def a_switch(net: Keeps, h: Tensor) -> Tensor:
    before, net.state = net.state, h.detach()
    return h * (1.0 if before is None or before.shape != h.shape else 2.0)


def with_its_graph(net: Keeps, h: Tensor) -> Tensor:
    net.state = h if net.state is None else 0.5 * net.state + h
    return net.state.sigmoid()


def of_a_layer(net: Keeps, h: Tensor) -> Tensor:
    before, net.first.stored = getattr(net.first, "stored", None), h.detach()
    return of_a_shape(h, before)


def of_a_parameter(net: Keeps, h: Tensor) -> Tensor:
    weight: Any = net.first.weight
    before, weight.stored = getattr(weight, "stored", None), h.detach()
    return of_a_shape(h, before)


class Slot:
    """An object without a dict."""

    __slots__ = ("state",)

    state: Any


def in_slots(net: Keeps, h: Tensor) -> Tensor:
    slot = net.stored.setdefault("slot", Slot())
    before, slot.state = getattr(slot, "state", None), h.detach()
    return of_a_shape(h, before)


@cache
def remembered(_: int) -> list[Any]:
    return [None]


def in_a_cache(net: Keeps, h: Tensor) -> Tensor:
    held = remembered(id(net))
    before, held[0] = held[0], h.detach()
    return of_a_shape(h, before)


def of_a_class(_: Keeps, h: Tensor) -> Tensor:
    before, Box.state = Box.state, h.detach()
    return of_a_shape(h, before)


def in_a_default(net: Keeps, h: Tensor, held: Any = {}) -> Tensor:  # noqa: B006
    before, held[id(net)] = held.get(id(net)), h.detach()
    return of_a_shape(h, before)


def far_inside(net: Keeps, h: Tensor) -> Tensor:
    held = net.stored.setdefault("deep", [[[[[[[[None]]]]]]]])
    while isinstance(held[0], list):
        held = held[0]
    before, held[0] = held[0], h.detach()
    return of_a_shape(h, before)


def in_a_generator(net: Keeps, h: Tensor) -> Tensor:
    def keeping() -> Any:
        before = None
        while True:
            before = yield before

    if "generator" not in net.stored:
        net.stored["generator"] = keeping()
        next(net.stored["generator"])
    made, net.stored["generator"] = net.stored["generator"], None
    before = made.gi_frame.f_locals["before"]
    made.send(h.detach())
    net.stored["generator"] = made
    return of_a_shape(h, before)


def its_outputs(net: Keeps, h: Tensor) -> Tensor:
    before, net.first.stored = getattr(net.first, "stored", None), h.detach()
    return h + 0.1 * of_a_shape(h, before)


REFUSED: dict[str, Body] = {
    "an attribute of a layer": of_a_layer,
    "an attribute of a parameter": of_a_parameter,
    "slots": in_slots,
    "a cache": in_a_cache,
    "a class": of_a_class,
    "a default": in_a_default,
    "a list in lists": far_inside,
    "a generator": in_a_generator,
    "what is returned": its_outputs,
    "an attribute": attribute,
    "a dict by size": by_size,
    "a list in a tuple": in_a_tuple,
    "an object": in_an_object,
    "a switch": a_switch,
    "an attribute with its graph": with_its_graph,
}


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("norm", [nn.Identity, partial(nn.BatchNorm1d, 8)])
@pytest.mark.parametrize("micro_batch", [1, 5])
@pytest.mark.parametrize("name", REFUSED)
def test_state_that_is_used_at_only_one_size_is_refused(
    name: str, micro_batch: int, norm: Callable[[], nn.Module]
) -> None:
    net, (x, y) = Keeps(REFUSED[name], norm()).double(), batch(12)
    Box.state = None
    with pytest.raises(NotExactError, match=r"another call|called again"):
        Engine(net, F.cross_entropy, micro_batch=micro_batch).backward(x, y)
    assert net.state is None, "a look is no call"


def a_bank(net: Keeps, h: Tensor) -> Tensor:
    if len(net.bank) == net.bank.maxlen:
        h = h - torch.stack([*net.bank]).mean(0)
    net.bank.append(h.detach().mean(0))
    return h


def another_function(net: Keeps, h: Tensor) -> Tensor:
    before, net.state = net.state, h.detach()
    return h if before is None or before.shape != h.shape else h.relu()


def a_bank_of_a_layer(net: Keeps, h: Tensor) -> Tensor:
    bank = net.first.__dict__.setdefault("bank", deque(maxlen=4))
    if len(bank) == bank.maxlen:
        h = h - torch.stack([*bank]).mean(0)
    bank.append(h.detach().mean(0))
    return h


def a_counter(of: Callable[[Keeps], Any]) -> Body:
    def body(net: Keeps, h: Tensor) -> Tensor:
        held = of(net)
        held.calls = getattr(held, "calls", 0) + 1
        return h.detach() if held.calls > 6 else h

    return body


def a_counter_of_a_class(_: Keeps, h: Tensor) -> Tensor:
    Box.calls += 1
    return h.detach() if Box.calls > 6 else h


MOVED = "each call of forward moves"

DOUBTS: dict[str, tuple[Body, str]] = {
    "a counter of a layer": (a_counter(lambda net: net.first), MOVED),
    "a counter of a parameter": (a_counter(lambda net: net.first.weight), MOVED),
    "a counter of its class": (a_counter_of_a_class, MOVED),
    "a bank of a layer": (a_bank_of_a_layer, "puts samples into a tensor that no attribute"),
    "a bank that is used when it is full": (a_bank, "puts samples into bank"),
    "another function": (another_function, "second call on the same rows builds another graph"),
}


@pytest.mark.parametrize("name", DOUBTS)
def test_what_may_use_state_leaves_a_doubt(name: str) -> None:
    body, said = DOUBTS[name]
    net, (x, y) = Keeps(body, nn.Identity()).double(), batch(12)
    engine = Engine(net, F.cross_entropy, micro_batch=5)
    engine.backward(x, y)
    assert engine.plan is not None
    assert not engine.plan.exact
    assert said in str(engine.plan.exact)


def only_stored(net: Keeps, h: Tensor) -> Tensor:
    net.state, net.stored["last"] = [h.detach(), h], h.mean(1)
    return h


def stored_on_a_layer(net: Keeps, h: Tensor) -> Tensor:
    net.first.stored = h.exp()
    return h + net.first.stored


def stored_in_a_cycle(_: Keeps, h: Tensor) -> Tensor:
    held = [h.detach()]
    held.append(held)
    return h


def stored_for_this_call(net: Keeps, h: Tensor) -> Tensor:
    net.state = h.exp()
    return h + net.state


@pytest.mark.product
@pytest.mark.parametrize("norm", [nn.Identity, partial(nn.BatchNorm1d, 8)])
@pytest.mark.parametrize(
    "body", [only_stored, stored_for_this_call, stored_on_a_layer, stored_in_a_cycle]
)
def test_what_is_only_saved_is_shown(body: Body, norm: Callable[[], nn.Module]) -> None:
    net, (x, y) = Keeps(body, norm()).double(), batch(12)
    engines = []

    def run(model: nn.Module) -> Tensor:
        engines.append(Engine(model, F.cross_entropy, micro_batch=5))
        return engines[0].backward(x, y)

    assert_exact(state_after(net, run), undivided(net, F.cross_entropy, x, y))
    assert engines[0].plan is not None
    assert engines[0].plan.exact


GRIDS: dict[int, Tensor] = {}


def a_mask_made_once(net: Keeps, h: Tensor) -> Tensor:
    if net.state is None:
        net.state = torch.ones(8, 8, dtype=h.dtype).tril()
    return h @ net.state


def a_grid(h: Tensor) -> Tensor:
    return torch.arange(8, dtype=h.dtype)[None].repeat(len(h), 1)


def a_grid_of_the_last_size(net: Keeps, h: Tensor) -> Tensor:
    if net.state is None or net.state.shape != h.shape:
        net.state = a_grid(h)
    return h * net.state


def grids_by_size(_: Keeps, h: Tensor) -> Tensor:
    if len(h) not in GRIDS:
        GRIDS[len(h)] = a_grid(h)
    return h * GRIDS[len(h)]


@pytest.mark.parametrize("micro_batch", [1, 5])
@pytest.mark.parametrize(
    ("body", "shown"),
    [(a_mask_made_once, True), (a_grid_of_the_last_size, True), (grids_by_size, False)],
)
def test_what_is_built_once_is_exact(body: Body, shown: bool, micro_batch: int) -> None:
    GRIDS.clear()
    net = Keeps(body, nn.Identity()).double()
    engine = Engine(net, F.cross_entropy, micro_batch=micro_batch)
    for seed in range(2):
        torch.manual_seed(seed)
        x, y = torch.randn(14, 6, dtype=torch.double), torch.randint(3, (14,))
        net.zero_grad()
        want = undivided(net, F.cross_entropy, x, y)
        assert_exact(state_of(net, engine.backward(x, y)), want)
        assert engine.plan is not None
        assert bool(engine.plan.exact) is shown, str(engine.plan.exact)
    assert all(type(grid) is Tensor for grid in GRIDS.values())


class KeepsOnItsClass(nn.Module):
    """Keeps samples where a copy of it keeps them, too."""

    stored: Any = None
    several: list[Any] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor, held: Any = {}) -> Tensor:  # noqa: B006
        rows: Tensor = self.layer(x)[: len(x)]
        cls: Any = type(self)
        cls.stored = cls.new = held["x"] = rows.detach()
        cls.several[:] = [rows.detach()]
        return rows


def test_tensors_without_data_remain_nowhere() -> None:
    net, (x, y) = KeepsOnItsClass().double(), batch(12)
    Engine(net, F.cross_entropy, micro_batch=5).backward(x, y)
    cls: Any = KeepsOnItsClass
    held = cls.forward.__defaults__[0]["x"]
    assert {type(one) for one in (cls.stored, cls.new, held, *cls.several)} == {Tensor}
