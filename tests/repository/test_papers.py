"""The map from the papers to the code: every number once, every file and name there."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from scripts.papers import faults, numbers, papers, papers_page

COUNTS = {  # equations, algorithms, lemmas, tables, figures: counted in the papers
    "MBS": (20, 1, 0, 5, 3),
    "AGBN": (11, 6, 0, 0, 5),
    "Out-of-core": (2, 0, 0, 1, 5),
    "Guide": (13, 0, 2, 2, 4),
    "u-cuDNN": (4, 1, 0, 1, 14),
}


def test_every_item_of_every_paper_is_somewhere_or_says_why_not() -> None:
    assert list(faults(papers())) == []


def test_it_knows_as_many_items_as_the_papers_have() -> None:
    kinds = ("Equation", "Algorithm", "Lemma", "Table", "Figure")
    found = {
        paper["name"]: tuple(
            sum(numbered == one for item in paper["item"] for one, _ in numbers(item))
            for numbered in kinds
        )
        for paper in papers()
    }
    assert found == COUNTS


def moved(map_: list[dict[str, Any]]) -> None:
    map_[0]["item"][0]["where"] = ["src/anybatch/core/batch.py::gone", "docs/gone.md"]


def forgotten(map_: list[dict[str, Any]]) -> None:
    map_[1]["item"][0]["Equation"] = ["1"]


def twice(map_: list[dict[str, Any]]) -> None:
    map_[3]["item"][0]["Lemma"] = ["3.1"]


def nowhere(map_: list[dict[str, Any]]) -> None:
    del map_[2]["item"][0]["where"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            moved,
            [
                "MBS: Equation 1: there is no src/anybatch/core/batch.py::gone",
                "MBS: Equation 1: there is no docs/gone.md",
            ],
        ),
        (forgotten, ["AGBN: Equation 2 is missing"]),
        (twice, ["Guide: Lemma 3.1 comes once too often"]),
        (nowhere, ["Out-of-core: Equation 1 must be somewhere, or say why not"]),
    ],
)
def test_what_is_wrong_with_a_map_is_said(spoil: Any, said: list[str]) -> None:
    spoilt = deepcopy(papers())
    spoil(spoilt)
    assert list(faults(spoilt)) == said


def test_the_page_names_what_is_left_out() -> None:
    page = papers_page()
    assert "| Table 1 | the cloud machines that were rented | - | hardware" in page
    assert "[`stream`](../src/anybatch/execution/streaming.py)" in page
