"""The table of peaks of lanes, and a step of its benchmark."""

from __future__ import annotations

import torch
from benchmarks.guide.lanes import run
from benchmarks.guide.lanes.rows import guide_lanes
from benchmarks.guide.plans.cells import cells


def test_what_is_foreseen_of_lanes_is_no_less_than_they_hold() -> None:
    torch.set_num_threads(1)
    cell = next(iter(cells(["DenseNet, BatchNorm"], 1, 0)))
    found = run.run(cell, 8)
    assert found is not None
    assert found["held"] <= found["predicted"] <= cell.budget
    assert run.run(cell, cell.problem.batch) is None


def test_the_table_says_how_far_above_it_was_foreseen() -> None:
    row = {"training": "a", "budget": 10, "leaves": "while it runs"}
    rows = [row | {"predicted": 10, "held": 8}, row | {"predicted": 10, "held": 11}]
    assert "| a | while it runs | 2 | -9.1% | 8.0% | 25.0% | 1 |" in guide_lanes({"rows": rows})
