"""The matrix of versions: what it counts, which rows it keeps, and a pair that is not there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from benchmarks.platforms.matrix.rows import matrix
from scripts import matrix as script
from scripts.matrix import ROOT, TESTS, counted, installed, merged, outcome, pins

REPORT = """<testsuites><testsuite tests="5" failures="1" errors="1" skipped="1"/>
<testsuite tests="2" failures="0" errors="0" skipped="0"/></testsuites>"""


def test_it_counts_what_a_report_says() -> None:
    assert counted(REPORT) == {"passed": 4, "failed": 2, "skipped": 1}


def test_every_file_it_runs_is_there() -> None:
    assert [name for name in TESTS if not (ROOT / name).is_file()] == []


def test_a_file_of_tests_is_run_and_its_versions_are_reported(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert False\n"
        "@pytest.mark.skip(reason='no')\ndef test_c(): pass\n"
    )
    found = outcome(Path(sys.executable), (str(tmp_path / "test_one.py"),))
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 1)
    assert found["python"] == sys.version.split()[0]
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 4\n")  # as pytest does where an option means nothing
    python.chmod(0o755)
    assert outcome(python) == {"reason": "the tests did not start"}


def test_a_new_row_takes_the_place_of_its_pair() -> None:
    rows = [
        {"python": "3.12.1", "torch": "2.12.0+cpu", "passed": 1},
        {"python": "3.13.0", "torch": "2.13.0", "passed": 2},
    ]
    new = {"python": "3.12", "torch": "2.12.0", "reason": "no python3.12 here"}
    assert merged(rows, new) == [new, rows[1]]
    first = {"python": "3.11.7", "torch": "2.13.0", "passed": 3}
    assert merged(rows, first) == [first, *rows]


def test_a_python_that_is_not_there_is_a_row_that_says_so(tmp_path: Path) -> None:
    reason = installed("3.99", "2.13.0", tmp_path)
    assert reason == "no python3.99 here"
    table = matrix({"cells": [{"python": "3.99", "torch": "2.13.0", "reason": reason}]})
    assert "| 3.99 | 2.13.0 | no python3.99 here |" in table
    assert "torch" not in pins()


def test_a_name_that_stands_for_no_python_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = tmp_path / "python3.98"
    name.write_text("#!/bin/sh\nexit 127\n")
    name.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert installed("3.98", "2.13.0", tmp_path) == "no python3.98 here"


def test_the_pairs_are_those_that_the_package_is_for() -> None:
    pythons = {cell.partition(":")[0] for cell in script.CELLS}
    assert pythons == {"3.11", "3.12", "3.13"}
    assert (
        f'"torch>={script.CELLS[0].partition(":")[2][:4]}"' in (ROOT / "pyproject.toml").read_text()
    )
