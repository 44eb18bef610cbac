"""The memory monger's benchmark finds the largest batch that fits, and no larger one does."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from benchmarks.outofcore.monger.rows import monger
from benchmarks.outofcore.monger.run import WAYS, largest
from tests.unit.offloading.traces import network

from anybatch.offloading.schedule import Trace


def traced(n: int) -> Trace:
    """A step of `n` samples: states are as large for each."""
    one = network(9, Random(4))
    sizes = (v if v.after else replace(v, size=v.size * n) for v in one.variables)
    functions = (
        replace(f, flops=1e12, touched=10, backward=f.name[0] in "bu") for f in one.functions
    )
    return Trace(tuple(sizes), tuple(functions))


@pytest.mark.parametrize("way", WAYS)
def test_it_is_the_largest_that_fits(way: str) -> None:
    for budget in (300, 1000, 2777):
        found = largest(way, traced, budget)

        def needed(n: int) -> int:
            step = WAYS[way](traced(n))
            return step.floor if way == "offload" else step.peak

        assert found["batch"] == max(n for n in range(1, 200) if needed(n) <= budget)
        assert found["bytes"] == needed(found["batch"])
        assert found["seconds"] >= 1


def test_the_table_has_the_papers_figures() -> None:
    one = {"batch": 4, "bytes": 8 << 30, "seconds": 1.0}
    text = monger({"budget": 11 << 30, "ways": {"in memory": one, "cheap": one}})
    assert "| in memory | 4 | 8.0 of 11 | 1.00 | 3 |" in text
