"""The table of peaks of lanes, and a step of its benchmark."""

from __future__ import annotations

import pytest
import torch
from benchmarks.guide.lanes import run
from benchmarks.guide.lanes.rows import guide_lanes
from benchmarks.guide.plans.cells import PROBLEMS, cells
from benchmarks.mbs.prediction.models import densenet
from benchmarks.mbs.problem import Problem
from torch import nn


def small() -> Problem:
    """The benchmark's DenseNet with fewer layers."""
    inputs, targets = torch.randn(24, 3, 16, 16), torch.randint(10, (24,))
    model = densenet((2, 2), growth=8)
    return Problem(model, nn.CrossEntropyLoss(), None, inputs, targets, 24)


@pytest.mark.large(of="tiny runs of benchmarks", few=2)
def test_what_is_foreseen_of_lanes_is_no_less_than_they_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(PROBLEMS, "small", small)
    cell = next(iter(cells(["small"], 1, 0)))
    found = run.run(cell, 8)
    assert found is not None
    assert found["held"] <= found["predicted"] <= cell.budget
    assert run.run(cell, cell.problem.batch) is None


def test_the_table_says_how_far_above_it_was_foreseen() -> None:
    row = {"training": "a", "budget": 10, "leaves": "while it runs"}
    rows = [row | {"predicted": 10, "held": 8}, row | {"predicted": 10, "held": 11}]
    assert "| a | while it runs | 2 | -9.1% | 8.0% | 25.0% | 1 |" in guide_lanes({"rows": rows})
