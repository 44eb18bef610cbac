"""What a call of forward leaves on a model is refused where a later call computes with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_after, undivided
from tests.unit.proof.nets import batch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine, NotExactError

Body = Callable[[Any, Tensor], Tensor]


class Keeps(nn.Module):
    """A body that may leave something in `kept`.

    Attributes:
        kept: what is left.
    """

    def __init__(self, body: Body, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), norm, nn.Linear(8, 3)
        self.body, self.kept = body, dict[Any, Any]()
        self.state: Any = None
        self.bank = deque[Tensor](maxlen=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self, self.norm(self.first(x)).tanh()))


class Box:
    """An object that is no module."""

    state: Any = None


def of_a_shape(h: Tensor, kept: Any) -> Tensor:
    return h if kept is None or kept.shape != h.shape else h + kept


def attribute(net: Keeps, h: Tensor) -> Tensor:
    before, net.state = net.state, h.detach()
    return of_a_shape(h, before)


def by_size(net: Keeps, h: Tensor) -> Tensor:
    before, net.kept[len(h)] = net.kept.get(len(h)), h.detach()
    return of_a_shape(h, before)


def in_a_tuple(net: Keeps, h: Tensor) -> Tensor:
    before, net.state = net.state, ([h.detach()],)
    return of_a_shape(h, None if before is None else before[0][0])


def in_an_object(net: Keeps, h: Tensor) -> Tensor:
    box = net.kept.setdefault("box", Box())
    before, box.state = box.state, h.detach()
    return of_a_shape(h, before)


def a_switch(net: Keeps, h: Tensor) -> Tensor:
    before, net.state = net.state, h.detach()
    return h * (1.0 if before is None or before.shape != h.shape else 2.0)


def with_its_graph(net: Keeps, h: Tensor) -> Tensor:
    net.state = h if net.state is None else 0.5 * net.state + h
    return net.state.sigmoid()


REFUSED: dict[str, Body] = {
    "an attribute": attribute,
    "a dict by size": by_size,
    "a list in a tuple": in_a_tuple,
    "an object": in_an_object,
    "a switch": a_switch,
    "an attribute with its graph": with_its_graph,
}


@pytest.mark.parametrize("norm", [nn.Identity, partial(nn.BatchNorm1d, 8)])
@pytest.mark.parametrize("micro_batch", [1, 5])
@pytest.mark.parametrize("name", REFUSED)
def test_state_that_is_used_at_one_size_alone_is_refused(
    name: str, micro_batch: int, norm: Callable[[], nn.Module]
) -> None:
    net, (x, y) = Keeps(REFUSED[name], norm()).double(), batch(12)
    with pytest.raises(NotExactError, match=r"one call what another|called again"):
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


DOUBTS: dict[str, tuple[Body, str]] = {
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


def only_kept(net: Keeps, h: Tensor) -> Tensor:
    net.state, net.kept["last"] = [h.detach(), h], h.mean(1)
    return h


def kept_for_this_call(net: Keeps, h: Tensor) -> Tensor:
    net.state = h.exp()
    return h + net.state


@pytest.mark.parametrize("norm", [nn.Identity, partial(nn.BatchNorm1d, 8)])
@pytest.mark.parametrize("body", [only_kept, kept_for_this_call])
def test_what_is_only_kept_is_shown(body: Body, norm: Callable[[], nn.Module]) -> None:
    net, (x, y) = Keeps(body, norm()).double(), batch(12)
    engines = []

    def run(model: nn.Module) -> Tensor:
        engines.append(Engine(model, F.cross_entropy, micro_batch=5))
        return engines[0].backward(x, y)

    assert_exact(state_after(net, run), undivided(net, F.cross_entropy, x, y))
    assert engines[0].plan is not None
    assert engines[0].plan.exact
