"""The table of trainings on many lengths, and a short one."""

from __future__ import annotations

import pytest
from benchmarks.guide.lengths import run
from benchmarks.guide.lengths.rows import guide_lengths


def test_a_training_is_run_in_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SIZES", (8, 16))
    found = run.run(2, 80 << 20)
    assert set(found["by_hand"]) == {"8", "16"}
    assert 0 < found["predicted"] <= 80 << 20
    assert found["total"] >= found["first"] > 0
    assert "| 2 | 80 MiB |" in guide_lengths({"rows": [found]})
