"""The loops that are compared with: right where they should be, wrong where a page says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "accelerate", reason="pip install 'anybatch[transformers]' is needed for these tests"
)
pytest.importorskip(
    "lightning.pytorch", reason="pip install 'anybatch[lightning]' is needed for these tests"
)

from benchmarks.integrations.accelerate import errors as of_accelerate
from benchmarks.integrations.lightning import errors as of_lightning
from benchmarks.integrations.problems import PROBLEMS

from anybatch.tools.exactness import tolerance

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "integrations"
RIGHT = {
    "accumulated": {"an even split"},
    "counted": {"an even split", "a ragged tail", "padded tokens"},
    "anybatch": {problem.name for problem in PROBLEMS},
}
REFUSED = {"Dice", "InfoNCE"}
"""By a callback of Lightning: they are no weighted sum of torch's own losses."""


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
@pytest.mark.parametrize("way", RIGHT)
def test_accelerate_is_right_where_it_should_be(problem: Any, way: str) -> None:
    found = of_accelerate.error(problem, way, 3)
    if isinstance(found, str):
        assert problem.total is None
    else:
        assert (found <= tolerance(None)) == (problem.name in RIGHT[way])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
@pytest.mark.parametrize("way", of_lightning.WAYS)
def test_lightning_is_right_where_it_should_be(problem: Any, way: str) -> None:
    found = of_lightning.error(problem, way, 3)
    if isinstance(found, str):
        assert problem.name in REFUSED
    else:
        assert (found <= tolerance(None)) == (problem.name in RIGHT[way])


@pytest.mark.parametrize("name", ["accelerate", "lightning"])
def test_what_is_published_says_so_too(name: str) -> None:
    results = json.loads((BENCHMARKS / name / "results.json").read_text())["errors"]
    assert results.keys() == {"1", "2"}
    for found in results.values():
        for problem, errors in found.items():
            for way, error in errors.items():
                if not isinstance(error, str):
                    assert (error <= tolerance(None)) == (problem in RIGHT[way])
