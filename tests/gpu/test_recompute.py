"""Saved tensors that a device computes again are those that forward saved, or the step says so."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.networks import Clipped
from tests.offloads import slow_link, small_leave
from torch import Tensor

import anybatch
from anybatch.errors import NotReproducibleError

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.skipif(
        not hasattr(torch._C._autograd.SavedTensor, "data"),
        reason="this torch does not say what hooks have given a node",
    ),
]


def step(net: Clipped, x: Tensor) -> list[Tensor]:
    net.zero_grad()
    net(x).square().sum().backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def errors(net: Clipped, other: Clipped, x: Tensor, memory: int) -> int:
    """Return the errors of steps, of which later ones are beyond bounds; others are right."""
    found, off, again = 0, anybatch.offload(memory=memory, device="cuda"), 0
    for number in range(6):
        net.most = other.most = 9.0 if number < 3 else 0.01
        try:
            with off:
                gradients = step(net, x)
        except NotReproducibleError:
            found += 1
            continue
        assert all(map(torch.equal, gradients, step(other, x)))
        assert off.last is not None
        again += off.last.remade_bytes
        assert not (found and off.last.remade_bytes)
    assert again > 0
    return found


def test_what_is_computed_again_on_a_device_is_compared_once_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow_link(monkeypatch)
    small_leave(monkeypatch)
    net = Clipped(64, 6).cuda()
    other, x = copy.deepcopy(net), torch.randn(1024, 64, device="cuda")
    step(net, x)
    held = torch.cuda.memory_allocated()
    found = [errors(net, other, x, held + count * x.nbytes) for count in (10, 12, 14, 16)]
    assert max(found) == 1
