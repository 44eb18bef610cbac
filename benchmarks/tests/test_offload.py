"""The benchmark of offloading runs, and its table says what it found."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from benchmarks.mbs.models import ResNet
from benchmarks.mbs.problem import Problem
from benchmarks.outofcore.offload import rows
from benchmarks.outofcore.offload.steps import Step, measured, ways


def test_every_way_is_measured_and_told() -> None:
    x, y = torch.randn(6, 3, 16, 16), torch.randint(10, (6,))
    model = ResNet(blocks=(1,), width=16)
    step = Step(Problem(model, torch.nn.CrossEntropyLoss(), None, x, y, 6))
    in_memory = step.peak(nullcontext())
    found = {way: measured(step, one, 2) for way, one in ways(step, (0.9, 0.01), None).items()}
    assert list(found) == ["0.9 of the peak", "all that may leave"]
    assert all(row["exact"] and row["peak"] <= row["budget"] for row in found.values())
    steps = {"resnet": {"in memory": in_memory, "ways": found}}
    text = rows.offload({"modes": {"default": {"steps": steps}}})
    assert "| default | 0.9 of the peak |" in text
    assert text.count("\n") == 3
