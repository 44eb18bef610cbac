"""Branches on the number of samples that call what has no numbers of its own: casts, transposes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.oracle import assert_exact, state_after, undivided
from tests.unit.execution.proof.nets import Body, Net, batch, is_shown
from torch import Tensor
from torch.nn import functional as F

from anybatch import Engine

FORWARD, BACKWARD = [0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0]


def when_many(change: Body) -> Body:
    """Return a body that does something for more than eight samples alone."""
    return lambda h: change(h) if len(h) > 8 else h


def squared(h: Tensor, transform: Callable[[Tensor], Tensor]) -> Tensor:
    """Return features of a matrix for each sample, which `transform` may transpose."""
    return transform(h[:, :, None] * h.tanh()[:, None]).flatten(1)[:, :8]


def lower(h: Tensor) -> Tensor:
    return torch.ones(8, 8).tril().to(h)


BRANCHES: dict[str, Body] = {
    "detach": when_many(lambda h: h.detach()),
    "data": when_many(lambda h: h.data * 1),
    "mT": lambda h: squared(h, lambda m: m.mT if len(h) > 8 else m),
    "mH": lambda h: squared(h, lambda m: m.mH if len(h) > 8 else m),
    "T": lambda h: h @ (lower(h).T if len(h) > 8 else lower(h)),
    "a cast": when_many(lambda h: h.float().double()),
    "a cast by to": when_many(lambda h: h.to(torch.float16).to(torch.float64)),
    "a cast by type": when_many(lambda h: h.type(torch.bfloat16).type(torch.float64)),
    "a cast to whole numbers": when_many(lambda h: h + h.detach().to(torch.long)),
    "a list": lambda h: h[:, BACKWARD if len(h) > 8 else FORWARD],
    "a written list": lambda h: written(h, BACKWARD[:3] if len(h) > 8 else FORWARD[:3]),
    "a tensor of a list": lambda h: h[:, torch.tensor(BACKWARD if len(h) > 8 else FORWARD)],
    "a size by a stride": lambda h: h.relu() if h.detach().t().contiguous().stride(0) > 8 else h,
}


def written(h: Tensor, places: list[int]) -> Tensor:
    h = h * 1
    h[:, places] = 0.0
    return h


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_is_never_shown(name: str, micro_batch: int) -> None:
    net, (x, y) = Net(BRANCHES[name], 0.5).double(), batch()
    assert not is_shown(net, F.cross_entropy, x, y, micro_batch)


HONEST: dict[str, Body] = {
    "detach": lambda h: h + len(h) / len(h) * h.detach(),
    "data": lambda h: h + h.data * (len(h) > 0),
    "T": lambda h: h @ torch.ones(8, 8).tril().to(h).T + 0 * len(h),
    "casts": lambda h: h + h.detach().float().double() * (len(h) > 0),
    "a list": lambda h: h[:, BACKWARD] * (len(h) > 0),
}


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("name", HONEST)
def test_what_is_done_for_any_number_of_samples_is_shown(name: str, micro_batch: int) -> None:
    net, (x, y) = Net(HONEST[name]).double(), batch()
    engines: list[Engine] = []

    def run(model: torch.nn.Module) -> Tensor:
        engines.append(Engine(model, F.cross_entropy, micro_batch=micro_batch))
        return engines[0].backward(x, y)

    assert_exact(state_after(net, run), undivided(net, F.cross_entropy, x, y))
    assert engines[0].plan is not None
    assert engines[0].plan.exact, str(engines[0].plan.exact)
