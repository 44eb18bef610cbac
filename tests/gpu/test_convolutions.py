"""Convolutions of a CUDA device: right, within their workspace, and counted."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anybatch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def net() -> nn.Module:
    torch.manual_seed(0)
    large = nn.Conv2d(16, 16, 21, padding=10, groups=16)
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), large, nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(16, 5)).cuda()


def far(mine: torch.Tensor, its: torch.Tensor) -> float:
    return float((mine - its).double().norm() / its.double().norm())


def test_a_step_is_right_and_every_kernel_keeps_to_its_workspace() -> None:
    model, x = net(), torch.randn(32, 3, 24, 24, device="cuda")
    y = torch.randint(5, (32,), device="cuda")
    true = copy.deepcopy(model).double()
    F.cross_entropy(true(x.double()), y).backward()
    with anybatch.convolutions("2MiB", cache=False) as found:
        F.cross_entropy(model(x), y).backward()
    there = [problem for problem, _ in found.chosen if problem.device == "cuda"]
    assert len(there) == 5  # the stand-in's kernels are those of the CPU, and may be chosen, too
    assert all(c.workspace <= 2 << 20 for c in found.configurations)
    for mine, its in zip(model.parameters(), true.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        assert far(mine.grad, its.grad) < 1e-3  # TF32 where torch allows it


def test_an_engine_counts_the_workspace() -> None:
    model, x = net(), torch.randn(64, 3, 24, 24, device="cuda")
    y = torch.randint(5, (64,), device="cuda")
    engine = anybatch.Engine(model, nn.CrossEntropyLoss(), memory="400MiB", workspace="2MiB")
    for _ in range(2):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()  # or a step that holds no more than before has none
        engine.backward(x, y)
        assert engine.last is not None
        assert engine.last.peak_bytes is not None
        assert engine.last.peak_bytes <= 400 << 20
    assert engine.plan is not None
    assert engine.plan.convolutions is not None
