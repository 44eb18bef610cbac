"""The benchmark of plans against every candidate: a tiny run, and its tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.guide.plans import cells, run
from benchmarks.guide.plans.rows import guide_plans, guide_plans_foreseen, guide_plans_summary


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cells.PROBLEMS, "LSTM", lambda: cells.lstm(6))


@pytest.mark.large(of="tiny runs of benchmarks", few=2)
@pytest.mark.usefixtures("small")
def test_a_tiny_run(tmp_path: Path) -> None:
    run.main(quick=True, out=tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    (cell,) = results["cells"]
    assert cell["planned"]
    chosen, *others = cell["candidates"]
    assert chosen["peak"] <= chosen["predicted"] <= cell["budget"]
    assert others
    assert all(one["seconds"] > 0 for one in cell["candidates"])
    assert {"largest_that_fits", "halving"} <= set(cell["peers"])
    sizes = {one["micro_batch"] for one in cell["candidates"]}
    assert {size for size in cell["peers"].values() if size} <= sizes
    assert "| anybatch |" in guide_plans_summary(results)
    assert guide_plans(results).count("\n") == 2
    assert "| all |" in guide_plans_foreseen(results)
    none = {**cell, "planned": False}
    assert "none fits" in guide_plans({"cells": [none]})
