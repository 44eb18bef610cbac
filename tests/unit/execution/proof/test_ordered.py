"""Rows that samples have put in an order, or have chosen, and that are not brought back."""

from __future__ import annotations

import pytest
import torch
from tests.oracle import assert_exact, state_after, undivided
from tests.unit.execution.proof.nets import Body, Net
from torch import Tensor
from torch.nn import functional as F

from anybatch import Engine


def batch() -> tuple[Tensor, Tensor]:
    """Return rows of which the first are alike: an order of few of them moves none."""
    rows = torch.cat([torch.ones(5, 6), -torch.randn(6, 6).abs()]).double()
    return rows, torch.randint(0, 3, (11,))


def order(h: Tensor) -> Tensor:
    return h.detach()[:, 0].round(decimals=3).argsort(stable=True)


def inverse(o: Tensor) -> Tensor:
    return torch.zeros_like(o).scatter(0, o, torch.arange(len(o)))


def written(h: Tensor, o: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[o] = h[o].tanh()
    return out


LEFT: dict[str, Body] = {
    "an index": lambda h: h[order(h)],
    "index_select": lambda h: h.index_select(0, order(h)),
    "gather": lambda h: h.gather(0, order(h)[:, None].expand_as(h)),
    "parts": lambda h: torch.cat([h[h[:, 0] > -9], h[h[:, 0] <= -9]]),
    "places": lambda h: h[(h.detach()[:, 0] > -9).nonzero()[:, 0]],
    "an order twice": lambda h: h[order(h)][order(h)],
}
BACK: dict[str, Body] = {
    "an order of the order": lambda h: h[order(h)].tanh()[order(h).argsort()],
    "index_select": lambda h: h[order(h)].tanh().index_select(0, order(h).argsort()),
    "an inverse": lambda h: h[order(h)].tanh()[inverse(order(h))],
    "gather": lambda h: h[order(h)].gather(0, inverse(order(h))[:, None].expand_as(h)),
    "written": lambda h: written(h, order(h)),
    "a choice written back": lambda h: torch.zeros_like(h).masked_scatter(
        (h.detach() > 0).any(1, keepdim=True), h[(h.detach() > 0).any(1)].tanh()
    ),
    "features in an order": lambda h: h.sort(1)[0],
}


def engine_of(body: Body) -> Engine:
    net, (x, y) = Net(body).double(), batch()
    engine = Engine(net, F.cross_entropy, micro_batch=4)
    engine.backward(x, y)
    return engine


@pytest.mark.parametrize("name", LEFT)
def test_rows_that_are_left_in_an_order_are_not_shown(name: str) -> None:
    engine = engine_of(LEFT[name])
    assert engine.plan is not None
    assert not engine.plan.exact
    assert "in an order, or a choice, that the samples make" in str(engine.plan.exact)


@pytest.mark.parametrize("name", BACK)
def test_rows_that_are_brought_back_are_shown(name: str) -> None:
    net, (x, y) = Net(BACK[name]).double(), batch()
    engines: list[Engine] = []

    def run(model: torch.nn.Module) -> Tensor:
        engines.append(Engine(model, F.cross_entropy, micro_batch=4))
        return engines[0].backward(x, y)

    assert_exact(state_after(net, run), undivided(net, F.cross_entropy, x, y))
    assert engines[0].plan is not None
    assert engines[0].plan.exact, str(engines[0].plan.exact)
