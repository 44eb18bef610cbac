"""A soak goes on where it was interrupted, counts what it ran, and keeps nothing of a part."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from benchmarks.mbs.rows import soak as table
from scripts import soak

FILES = ["tests/a.py", "tests/b.py", "tests/limits/test_no_trace.py"]
OUTCOMES = {"passed": 3, "failed": 0, "error": 0, "skipped": 0, "xfailed": 0}

Ran = Callable[..., list[str]]


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    """Run a soak of files that are not there; return which it ran."""
    monkeypatch.setattr(soak, "RESULTS", tmp_path / "new" / "results.json")
    monkeypatch.setattr(soak, "files", lambda: FILES)

    def run(*, anew: bool = False, until: str = "", fails: str = "") -> list[str]:
        observed: list[str] = []

        def one(file: str) -> dict[str, Any]:
            if file == until:
                raise KeyboardInterrupt
            observed.append(file)
            counted = {f"{file}::test_ctrl_c_at_every_line[lanes]": 7} if "no_trace" in file else {}
            outcomes = OUTCOMES | {"error": int(file == fails)}
            return {"outcomes": outcomes, "counted": counted, "cases": {}, "examples": 1000}

        monkeypatch.setattr(soak, "soaked", one)
        soak.main(anew=anew)
        return observed

    return run


def test_an_interrupted_soak_goes_on_and_a_complete_one_begins_anew(ran: Ran) -> None:
    with pytest.raises(KeyboardInterrupt):
        ran(until=FILES[1])
    assert json.loads(soak.RESULTS.read_text())["whole"] is False
    assert ran() == FILES[1:]
    assert json.loads(soak.RESULTS.read_text())["whole"] is True
    assert ran() == FILES
    with pytest.raises(KeyboardInterrupt):
        ran(until=FILES[2])
    assert ran(anew=True) == FILES


def test_a_failure_is_reported_at_the_end_and_in_the_table(ran: Ran) -> None:
    with pytest.raises(typer.Exit):
        ran(fails=FILES[0])
    text = table(json.loads(soak.RESULTS.read_text()))
    assert "| their tests passed, failed | 9, 1 |" in text
    assert "| test files that have some, run in full | 3 of 3 |" in text
    assert "interrupted by a real signal | 7 |" in text


def test_a_file_that_did_not_reach_its_end_has_no_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "PYTEST", (sys.executable, "-c", "raise SystemExit(2)"))
    with pytest.raises(typer.Exit) as found:
        soak.soaked("tests/a.py")
    assert found.value.exit_code == 2
