"""README: in lanes a step of a model with BatchNorm holds what a micro-batch needs, not the batch.

In sixteen lanes whose storages leave: a tenth of what the undivided batch holds, plus a set of
gradients; and as for plain micro-batching, the fewer samples in one, the less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tests.networks import UNet, resnet20
from tests.peaks import metered
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine

BATCH = 64


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def masks(out: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(out[:, 0].mean((1, 2)), y.float())


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor, Tensor], Tensor], int]] = {
    "ResNet-20": (lambda: resnet20(norm="batch", blocks=2), F.cross_entropy, 32),
    "U-Net": (lambda: UNet(width=4, norm="batch"), masks, 48),
}


def peak(model: nn.Module, step: Callable[[], object]) -> int:
    """The live bytes at the peak of a step that is not the first."""
    step()
    model.zero_grad()
    with metered({"parameters": model.parameters(), "buffers": model.buffers()}) as meter:
        step()
    model.zero_grad()
    return int(meter.peak)


@pytest.mark.large(few=1)
@pytest.mark.parametrize("name", NETS)
def test_sixteen_lanes_hold_a_tenth_and_fewer_samples_less(name: str) -> None:
    make, loss, side = NETS[name]
    model = make()
    x, y = torch.randn(BATCH, 3, side, side), torch.randint(2, (BATCH,))

    def lanes(count: int) -> int:
        engine = Engine(model, loss, micro_batch=BATCH // count)
        return peak(model, lambda: engine.backward(x, y))

    full = peak(model, lambda: torch.autograd.backward(loss(model(x), y)))
    gradients = sum(p.nbytes for p in model.parameters())
    held = {count: lanes(count) for count in (2, 4, 8, 16)}
    assert held[16] - gradients <= 0.10 * full, (held, full, gradients)
    assert list(held.values()) == sorted(held.values(), reverse=True)


def test_where_all_fit_nothing_is_watched_and_nothing_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a dispatch mode")

    monkeypatch.setattr("anybatch.lockstep.lockstep.Paging", never)
    make, loss, side = NETS["ResNet-20"]
    model = make()
    x, y = torch.randn(8, 3, side, side), torch.randint(2, (8,))
    engine = Engine(model, loss, memory="100GiB", micro_batch=2)
    engine.backward(x, y)
    assert engine.plan is not None
    assert engine.plan.memory is not None
    assert engine.last is not None
    assert (engine.plan.mechanism, engine.plan.memory.waiting_capacity) == ("lockstep", None)
    assert engine.last.moved_bytes == 0
