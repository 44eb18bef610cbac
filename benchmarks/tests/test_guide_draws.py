"""Random draws under a hard limit: none fails, and a refusal is true."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.guide.draws import run
from benchmarks.guide.draws.draws import Draw
from benchmarks.guide.draws.rows import ended, guide_draws, guide_draws_asked, guide_draws_summary


@pytest.mark.large(of="tiny runs of benchmarks", few=2)
def test_no_draw_fails_under_the_limit(counted: Callable[..., int]) -> None:
    for seed in range(counted(30, 30)):
        found = run.drawn(seed)
        assert ended(found) in ("in budget", "refused"), found


def test_a_draw_is_made_by_its_seed_only() -> None:
    one, other = Draw(3), Draw(3)
    assert (one.network, one.requests, one.share) == (other.network, other.requests, other.share)
    assert len({Draw(seed).network for seed in range(60)}) == 9


def test_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"seed": 0, "network": "a", "asked": {}, "ended": "in budget", "peaks": [9], "budget": 10},
        {"seed": 1, "network": "a", "asked": {}, "ended": "refused", "true": False},
        {"seed": 2, "ended": "killed", "why": "gone"},
        {"seed": 3, "network": "a", "ended": "refused", "true": True, "as needed": False},
    ]
    monkeypatch.setattr(run, "QUICK", range(4))
    monkeypatch.setattr(run, "drawn", rows.__getitem__)
    run.main(quick=True, out=tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert "| a | 3 | 1 | 0 | 1 | 1 | 0 | 0 | 0 | 90.0% of its budget |" in guide_draws(results)
    assert "| all | 4 | 1 | 0 | 1 | 1 | 0 | 0 | 1 |" in guide_draws(results)
    assert "| all | 4 | 1 | 0 | 1 | 1 | 0 | 0 | 1 |" in guide_draws_summary(results)
    assert "| nothing | 4 |" in guide_draws_asked(results)
