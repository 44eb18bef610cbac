"""A benchmark that starts itself again in both modes of malloc."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from benchmarks.environment import MALLOC
from benchmarks.modes import in_both_modes

MODULE = """
import json, os, sys
if "fail" in sys.argv:
    sys.exit(3)
found = {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")}
threads = os.environ["OMP_NUM_THREADS"]
print(json.dumps({"words": sys.argv[1:], "malloc": found, "threads": threads}))
"""


@pytest.fixture
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prints_where_it_is.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")  # of the caller, who is not asked


@pytest.mark.usefixtures("_module")
def test_each_mode_is_a_process_that_was_started_in_it() -> None:
    found = in_both_modes("prints_where_it_is", "--rounds", "2")
    assert list(found) == list(MALLOC)
    for mode, one in found.items():
        assert one == {
            "words": ["--here", "--rounds", "2"],
            "malloc": MALLOC[mode],
            "threads": "1",
        }


@pytest.mark.usefixtures("_module")
def test_one_that_fails_is_an_error() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        in_both_modes("prints_where_it_is", "fail")
