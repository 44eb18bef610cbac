"""The benchmark of floors: each way has the gradient of all tokens, and is measured and told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.outofcore.floors import cell, networks, rows, run
from benchmarks.outofcore.floors.cell import Cell
from benchmarks.outofcore.floors.peers import Flags

LEAST = 4 << 20
"""Bytes that a limit of the test refuses."""
FLAGS = [
    Flags(checkpoint=True),
    Flags(head=(16, 3000)),
    Flags(head="torch"),
    Flags(shards=16),
    Flags(checkpoint=True, head=(4096, 1024), shards=16),
]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_a_peer_has_the_gradient_of_all_tokens(tmp_path: Path, flags: Flags) -> None:
    path = str(tmp_path / "truth")
    cell.truth("Llama", 40, torch.float64, path)
    found = cell.run(Cell("Llama", 40, flags, truth=path))
    assert found is not None
    assert found["error"] < 1e-4  # of float32: no claim of exactness, but no other gradient


@pytest.mark.large(of="tiny runs of benchmarks", few=2)
def test_every_way_is_measured_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def here(function: Any, *args: Any) -> Any:
        (one,) = args if isinstance(args[0], Cell) else (None,)
        if one is None or one.limit is None:
            return function(*args)
        return None if one.limit < LEAST else function(replace(one, limit=None))

    monkeypatch.setattr(run, "apart", here)
    monkeypatch.setattr(networks, "VOCABULARY", 500)
    one = run.row("block", 24, 1)
    ways = one["ways"]
    assert [*ways] == ["plain", "checkpoint", "fused head", "torch's op", "all flags", "anybatch"]
    for way in ways.values():
        assert way["limit"] >= LEAST
        assert way["error"] < 1e-4
    equal = {"fits": True, "refused": False, "processor": 1.0, "wall": 1.2}
    ways["all flags"]["equal"] = equal
    results = {"rows": [one]}
    assert "| block, 24 tokens |" in rows.floors(results)
    assert "| as the peer | 1.00 | 1.20 |" in rows.floors_equal(results)
    assert rows.floors_live(results).count("\n") == 2
    assert "in 1 of 1 comparisons" in rows.floors_claims(results)


def test_a_process_that_its_limit_refuses_memory_says_so() -> None:
    flags = Flags()
    assert run.apart(cell.run, Cell("block", 256, flags, flags, limit=8 << 20)) is None
