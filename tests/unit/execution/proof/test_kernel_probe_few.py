"""Rows that are chosen by their values are few among those that are looked at."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.oracle import assert_exact, state_after, undivided
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine, Loss
from anybatch.errors import NotExactError

Chosen = Callable[[Tensor, Tensor], Tensor]


class Choosing(nn.Module):
    """A body that is given rows and a choice among them."""

    def __init__(self, body: Chosen) -> None:
        super().__init__()
        self.first, self.last, self.body = nn.Linear(6, 8), nn.Linear(8, 3), body

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        found: Tensor = self.last(self.body(self.first(x), chosen))
        return found


def put(to: Callable[[Tensor], Tensor]) -> Chosen:
    """Return a body that does something to the chosen rows, and puts them back."""

    def body(h: Tensor, chosen: Tensor) -> Tensor:
        h = h.clone()
        h[chosen] = to(h[chosen])
        return h

    return body


def fused(z: Tensor) -> Tensor:
    of = z[None, None]
    return F.scaled_dot_product_attention(of, of, of)[0, 0]


def by_places(h: Tensor, chosen: Tensor) -> Tensor:
    places = chosen.nonzero()[:, 0]
    z = h.index_select(0, places)
    return h.index_add(0, places, z - z.mean(0))


def by_elements(h: Tensor, chosen: Tensor) -> Tensor:
    z = h.masked_select(chosen[:, None])
    return h.masked_scatter(chosen[:, None], z / (1 + z.norm()))


def loose_first(h: Tensor, chosen: Tensor) -> Tensor:
    z = h[chosen]
    return h + (z[0] if len(z) else 0.0)


MEETINGS: dict[str, Chosen] = {
    "centred": put(lambda z: z - z.mean(0)),
    "attention": put(lambda z: (z @ z.mT).softmax(1) @ z),
    "fused attention": put(fused),
    "softmax": put(lambda z: z * z.softmax(0)),
    "sorted": put(lambda z: z.sort(0)[0]),
    "a cumulative sum": put(lambda z: z.cumsum(0)),
    "turned": put(lambda z: z.flip(0)),
    "a norm": put(lambda z: z / (1 + z.norm())),
    "renormed": put(lambda z: z.renorm(2, 1, 0.1) * z),
    "added to all": lambda h, chosen: h + h[chosen].sum(0),
    "its product with ones": lambda h, chosen: h + h[chosen].mT.sum(1),
    "by places": by_places,
    "by elements": by_elements,
    "the first of them": loose_first,
}

LATE = {
    "none of the first": torch.arange(12) >= 5,
    "one of the first": torch.arange(12) % 3 == 1,
}


@pytest.mark.product
@pytest.mark.parametrize("which", LATE)
@pytest.mark.parametrize("name", MEETINGS)
def test_chosen_rows_that_meet_are_not_shown(name: str, which: str) -> None:
    net = Choosing(MEETINGS[name]).double()
    x, y = torch.randn(12, 6, dtype=torch.float64), torch.randint(0, 3, (12,))
    engine = Engine(net, F.cross_entropy, micro_batch=5)
    try:
        engine.backward((x, LATE[which]), y)
    except NotExactError:
        return
    assert engine.plan is not None
    assert not engine.plan.exact


def by_experts(h: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    for at, selected in enumerate((chosen, ~chosen)):
        places = selected.nonzero().squeeze(1)
        scaled = F.layer_norm(h[places], (8,)).softmax(1) * (at + 1)
        out = out.index_add(0, places, scaled @ torch.eye(8, dtype=h.dtype))
    return out


def adding_experts(h: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    for at, selected in enumerate((chosen, ~chosen)):
        (places,) = torch.where(selected)
        out[places] += h[places].tanh() * (at + 1)
    return out


HONEST: dict[str, Chosen] = {
    "multiplied": put(lambda z: z * 2),
    "normalised by themselves": put(lambda z: F.layer_norm(z, (8,))),
    "a softmax of their own": put(lambda z: z.softmax(1) * z.norm(dim=1, keepdim=True)),
    "filled": lambda h, chosen: h.masked_fill(chosen[:, None], 0.5),
    "either": lambda h, chosen: torch.where(chosen[:, None], h.tanh(), h),
    "features": lambda h, _: h + h[:, torch.arange(8) == 1].sum(1, keepdim=True),
    "experts": by_experts,
    "experts that add to their rows": adding_experts,
}


@pytest.mark.product
@pytest.mark.parametrize("which", LATE)
@pytest.mark.parametrize("name", HONEST)
def test_chosen_rows_that_remain_separate_are_shown(name: str, which: str) -> None:
    net = Choosing(HONEST[name]).double()
    x = torch.randn(12, 6, dtype=torch.float64), LATE[which]
    y = torch.randint(0, 3, (12,))
    engine: Engine | None = None

    def run(model: nn.Module) -> Tensor:
        nonlocal engine
        engine = Engine(model, F.cross_entropy, micro_batch=5)
        return engine.backward(x, y)

    assert_exact(state_after(net, run), undivided(net, F.cross_entropy, x, y))
    assert engine is not None
    assert engine.plan is not None
    assert engine.plan.exact, str(engine.plan.exact)


class Losing(nn.Module):
    """A model that computes its loss itself, of the chosen rows."""

    def __init__(self, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.last, self.loss = nn.Linear(6, 3), loss

    def forward(self, x: Tensor, y: Tensor, chosen: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(self.last(x), y, chosen)}


def ignored(z: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    return F.cross_entropy(z, y.masked_fill(~chosen, -100))


def of_chosen(z: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    return ((z[chosen] - F.one_hot(y[chosen], 3)) ** 2).sum(1).mean()


INSIDE = {
    "ignored": (ignored, None),
    "declared": (of_chosen, Loss.inside(count=lambda inputs, _: inputs[2].sum())),
}


@pytest.mark.parametrize("name", INSIDE)
def test_a_loss_of_chosen_rows_inside_the_model_has_no_doubt_of_them(name: str) -> None:
    loss, declared = INSIDE[name]
    net = Losing(loss).double()
    x, y = torch.randn(12, 6, dtype=torch.float64), torch.randint(0, 3, (12,))
    engine = Engine(net, declared, micro_batch=5)
    engine.backward((x, y, LATE["one of the first"]))
    assert engine.plan is not None
    assert "chosen by their values" not in str(engine.plan.exact)
