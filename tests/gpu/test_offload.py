"""What autograd saves on a CUDA device waits in pinned host memory, within a budget."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

import anybatch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def test_a_step_is_exact_and_keeps_its_budget() -> None:
    layers = [layer for _ in range(12) for layer in (nn.Linear(512, 512), nn.Tanh())]
    model, x = nn.Sequential(*layers).cuda(), torch.randn(2048, 512, device="cuda")
    plain = copy.deepcopy(model)
    plain(x).square().mean().backward()
    wanted = [p.grad for p in plain.parameters()]
    found = []
    for _ in range(2):
        off = anybatch.offload(memory=1 << 40)
        with off:
            model(x).square().mean().backward()
        model.zero_grad()
        assert off.last is not None
        found.append(off.last.predicted_bytes)
    low = found[0]
    assert low is not None
    memory = low + (32 << 20)
    off = anybatch.offload(memory=memory)
    for variant in ("recorded", "planned", "planned"):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        with off:
            model(x).square().mean().backward()
        for a, b in zip(model.parameters(), wanted, strict=True):
            assert a.grad is not None
            assert b is not None
            assert torch.equal(a.grad, b)
        assert off.last is not None
        assert off.last.mode == variant
        assert torch.cuda.max_memory_allocated() <= memory + (16 << 20)  # workspace of kernels
    assert off.last is not None
    assert off.last.out_bytes > 0


class Scratch(nn.Module):
    """A kernel with memory of its own, which no dispatch mode hears of."""

    def forward(self, x: Tensor) -> Tensor:
        with _disable_current_modes():
            torch.empty(8 << 20, dtype=torch.uint8, device=x.device)
        return x


def test_memory_of_kernels_is_learned_from_planned_steps() -> None:
    layers = [layer for _ in range(12) for layer in (nn.Linear(512, 512), nn.Tanh(), Scratch())]
    model, x = nn.Sequential(*layers).cuda(), torch.randn(1024, 512, device="cuda")
    model(x[:1]).sum().backward()  # workspaces that stay are counted from here on
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    off = anybatch.offload(memory=torch.cuda.memory_allocated() + (30 << 20))
    peaks = []
    for _ in range(6):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        with off:
            model(x).square().mean().backward()
        peaks.append(torch.cuda.max_memory_allocated())
    assert off.last is not None
    assert off.last.mode == "planned"
    assert peaks[1] > off.memory, "else there is nothing to learn"
    assert max(peaks[-2:]) <= off.last.predicted_bytes <= off.memory  # type: ignore[operator]
