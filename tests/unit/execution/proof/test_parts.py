"""What is written to a part of a tensor leaves the masks of its other parts as they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.unit.execution.proof.nets import Body, Net, batch
from torch import Tensor
from torch.nn import functional as F

from anybatch import Engine
from anybatch.errors import NotExactError
from anybatch.execution.proof.masks import Masks, total

Write = Callable[[Tensor, Tensor], None]


def own(out: Tensor, h: Tensor) -> None:
    out[:, :4] = h[:, :4]


def again(out: Tensor, h: Tensor) -> None:
    out[:, :4] = h[:, :4].tanh()


def changed(out: Tensor, h: Tensor) -> None:
    out[:, :4].add_(h[:, :4])


def mixed(out: Tensor, h: Tensor) -> None:
    out[:, 4:] = h[:, 4:].mean(0)


ORDERS: dict[str, tuple[Write, ...]] = {
    "the first part again": (own, mixed, again),
    "the first part in place": (own, mixed, changed),
    "the first part twice again": (own, mixed, again, again),
    "the other part last": (own, again, mixed),
    "the other part first": (mixed, own, again),
}


def body(writes: tuple[Write, ...]) -> Body:
    def run(h: Tensor) -> Tensor:
        out = torch.zeros_like(h)
        for write in writes:
            write(out, h)
        return out

    return run


@pytest.mark.parametrize("order", ORDERS)
def test_a_part_that_is_written_again_does_not_hide_another(order: str) -> None:
    net, (x, y) = Net(body(ORDERS[order]), 0.0).double(), batch()
    with pytest.raises(NotExactError, match="samples 0 and 1 meet in Net, in mean"):
        Engine(net, F.cross_entropy, micro_batch=3).backward(x, y)


def test_a_part_that_is_overwritten_holds_what_was_written_last() -> None:
    def twice(h: Tensor) -> Tensor:
        out = torch.zeros_like(h)
        for write in (own, mixed, again):
            write(out, h)
        out[:, 4:] = h[:, 4:]
        return out

    net, (x, y) = Net(twice).double(), batch()
    engine = Engine(net, F.cross_entropy, micro_batch=3)
    engine.backward(x, y)
    assert engine.plan is not None
    assert engine.plan.exact, str(engine.plan.exact)


def test_a_tensor_that_is_fully_overwritten_forgets_what_it_was() -> None:
    masks, x = Masks(), torch.zeros(4, 6)
    masks.put(x, torch.full((1, 1), 3, dtype=torch.uint8))
    masks.write(x, torch.tensor([[1], [2], [4], [8]], dtype=torch.uint8))
    found = masks.of(x[2:3, 4:])
    assert found is not None
    assert total(found) == 4


@pytest.mark.parametrize(("n", "micro_batch"), [(8, 2), (16, 4), (5, 1), (12, 6)])
def test_samples_that_are_channels_are_refused(n: int, micro_batch: int) -> None:
    """Each was normalised by itself; lanes merged the channels of several: wrong, and shown."""
    net = Net(lambda h: F.batch_norm(h.T, None, None, training=True).T).double()
    with pytest.raises(NotExactError, match="normalises a part"):
        Engine(net, F.cross_entropy, micro_batch=micro_batch).backward(*batch(n))
