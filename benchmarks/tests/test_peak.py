"""The benchmark of peaks by batch size runs, and its table and picture say what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.mbs.peak import picture, rows, run


@pytest.mark.large(of="tiny runs of benchmarks", few=2)
def test_a_row_is_counted_described_and_drawn(tmp_path: Path) -> None:
    found = [run.row(samples, 16) for samples in (4, 8)]
    for row in found:
        assert row["exact"]
        assert 0 < row["ours"] <= 1.01 * row["undivided"]
    text = rows.peak({"budget": run.BUDGET, "rows": found})
    assert text.count("\n") == 1 + len(found)
    picture.draw({"budget": run.BUDGET, "rows": found}, tmp_path)
    assert (tmp_path / "peak.png").stat().st_size > 0


def test_the_results_keep_the_budget_where_the_batch_itself_does_not() -> None:
    results = json.loads((run.HERE / "results.json").read_text())
    assert [row["batch"] for row in results["rows"]] == list(run.BATCHES)
    for row in results["rows"]:
        assert row["exact"]
        assert row["ours"] <= 16 << 20
    assert results["rows"][-1]["undivided"] > 10 * (16 << 20)
