"""The picture of one step in five ways: what is counted, and what is drawn of it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from benchmarks.concepts.memory.picture import draw, picture
from benchmarks.concepts.memory.rows import concepts_memory
from benchmarks.concepts.memory.run import WAYS, counted, most_of_each
from benchmarks.results import MECHANISMS, folder, read

RESULTS = read(folder("concepts/memory") / "results.json")


@pytest.mark.parametrize("name", [name for name in WAYS if "memory" not in WAYS[name]])
def test_a_step_is_counted_kernel_by_kernel(name: str) -> None:
    way = WAYS[name] | ({"micro_batch": 6} if name == "undivided" else {})
    found = counted(way, 6, 16)
    word = name.partition(",")[0].partition(" ")[0]
    assert found["mechanism"] == MECHANISMS.get(word, word)
    assert found["exact"]
    assert max(found["live"]) == found["peak"] > 0
    assert len(found["live"]) <= found["kernels"]
    assert (found["moved"] > 0) == name.startswith("lanes")


def test_no_stretch_loses_its_peak() -> None:
    live = np.arange(1000) % 37
    for points in (1, 7, 400, 5000):
        found = most_of_each(live, points)
        assert len(found) == min(points, 1000)
        assert max(found) == 36


def test_every_way_is_described_and_keeps_its_budget(tmp_path: Path) -> None:
    assert RESULTS is not None
    ways = RESULTS["ways"]
    assert [way["name"] for way in ways] == list(WAYS)
    assert all(way["peak"] <= way["budget"] for way in ways if way["budget"] is not None)
    peaks = {way["name"]: way["peak"] for way in ways}
    assert max(peaks, key=lambda name: peaks[name]) == "undivided"
    lines = concepts_memory(RESULTS).splitlines()
    assert len(lines) == 2 + len(ways)
    panels = picture(ways).axes
    assert [panel.get_title(loc="left").partition(": peak")[0] for panel in panels] == list(WAYS)
    assert all(one.get_ylim() == other.get_ylim() for one, other in pairwise(panels))
    draw(RESULTS, tmp_path)
    assert (tmp_path / "memory.png").stat().st_size > 0
