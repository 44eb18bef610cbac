"""Kernels that no rule knows are asked with NaN, and with other values: NaN may leave no trace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.oracle import assert_exact, state_after, undivided
from tests.unit.execution.proof.nets import Body, Net, batch
from torch import Tensor
from torch.nn import functional as F

from anybatch import Engine
from anybatch.errors import NotExactError


def own_kernel(name: str, dtype: torch.dtype | None = None) -> Callable[[Body], Body]:
    """Return what makes a kernel of an extension of a function of one tensor."""

    def make(body: Body) -> Body:
        def kernel(x: Tensor) -> Tensor:
            return body(x)

        def fake(x: Tensor) -> Tensor:
            return body(x).to(dtype or x.dtype)

        made = torch.library.custom_op(f"anybatch_tests::{name}", kernel, mutates_args=())
        made.register_fake(fake)
        return lambda x: made(x)

    return make


rank = own_kernel("rank", torch.long)(lambda x: x.argsort(0).argsort(0))
above = own_kernel("above", torch.bool)(lambda x: x > x.mean(0))
level = own_kernel("level", torch.long)(lambda x: (x > 0).long().sum(1))
centre = own_kernel("centre")(lambda x: torch.nan_to_num(x).mean(0) * 1)
clipped = own_kernel("clipped")(lambda x: x.nan_to_num().clamp(-1, 1) - x.nan_to_num().amax(0))
finite = own_kernel("finite")(lambda x: torch.nan_to_num(x).clamp(-1, 1))
noisy = own_kernel("noisy")(lambda x: x.nan_to_num() + 0 * torch.rand_like(x))
newest = own_kernel("newest")(lambda ids: ids.max() - ids)
doubled = own_kernel("doubled")(lambda ids: ids * 2)


def quantised(h: Tensor, scale: Tensor) -> Tensor:
    """Round to a scale; the gradient goes straight through."""
    x = h.detach().float()
    rounded = torch.quantize_per_tensor(x, scale.float(), torch.tensor(0), torch.qint8)
    return h + (rounded.dequantize().to(h) - h).detach()


def table(places: Tensor, h: Tensor) -> Tensor:
    return h + F.one_hot(places % 8, 8).to(h)


MEETINGS: dict[str, Body] = {
    "a scale of the batch": lambda h: quantised(h, h.detach().abs().max() / 127),
    "a rank in the batch": lambda h: table(rank(h[:, 0].detach().contiguous()), h),
    "above the mean": lambda h: h * above(h.detach()),
    "a largest distance": lambda h: h + torch.cdist(h, h, p=float("inf")).sum(1, keepdim=True),
    "a mean that takes NaN": lambda h: h - centre(h.detach()),
    "a largest number that takes NaN": lambda h: h - clipped(h.detach()),
}


@pytest.mark.product
@pytest.mark.parametrize("gate", [None, 0.0])
@pytest.mark.parametrize("name", MEETINGS)
def test_what_meets_without_a_trace_of_nan_is_refused(name: str, gate: float | None) -> None:
    net, (x, y) = Net(MEETINGS[name], gate).double(), batch()
    with pytest.raises(NotExactError, match="samples .* meet in"):
        Engine(net, F.cross_entropy, micro_batch=3).backward(x, y)


HONEST: dict[str, Body] = {
    "a scale that is given": lambda h: quantised(h, torch.tensor(0.1)),
    "an order of its own": lambda h: table(level(h.detach()), h),
    "distances to parameters": lambda h: (
        h + torch.cdist(h, torch.eye(8, dtype=h.dtype), p=float("inf"))
    ),
    "rows that take NaN": lambda h: h + finite(h.detach()),
    "whole numbers": lambda h: table(doubled(h.detach().argmax(1)), h),
}


def trained(name: str, body: Body, micro_batch: int) -> Engine:
    """Train a net with this body, and compare it with the undivided batch."""
    net, (x, y) = Net(body).double(), batch()
    made: list[Engine] = []

    def run(model: torch.nn.Module) -> Tensor:
        made.append(Engine(model, F.cross_entropy, micro_batch=micro_batch))
        return made[0].backward(x, y)

    assert_exact(state_after(net, run), undivided(net, F.cross_entropy, x, y))
    assert made[0].plan is not None, name
    return made[0]


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 3])
@pytest.mark.parametrize("name", HONEST)
def test_kernels_that_keep_rows_separate_are_shown(name: str, micro_batch: int) -> None:
    plan = trained(name, HONEST[name], micro_batch).plan
    assert plan is not None
    assert plan.exact, str(plan.exact)


def test_a_kernel_that_draws_is_run_again_with_what_it_drew() -> None:
    plan = trained("noisy", lambda h: h + noisy(h.detach()), 3).plan
    assert plan is not None
    assert "seed" not in str(plan.exact)
    assert "could not be followed" not in str(plan.exact)


def test_integers_that_move_the_rows_of_others_are_not_shown() -> None:
    body = lambda h: table(newest(h.detach().argmax(1)), h)  # noqa: E731
    net, (x, y) = Net(body, 0.0).double(), batch()
    engine = Engine(net, F.cross_entropy, micro_batch=3)
    engine.backward(x, y)
    assert engine.plan is not None
    assert not engine.plan.exact
    assert "newest in Net could not be followed" in str(engine.plan.exact)
