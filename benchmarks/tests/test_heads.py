"""The tables of heads in chunks, and a small run."""

from __future__ import annotations

import pytest
from benchmarks.ucudnn.heads import run
from benchmarks.ucudnn.heads.rows import heads, heads_cuda, heads_divided, heads_floors

from anybatch.planner import memory_model


@pytest.mark.large(of="tiny runs of benchmarks", few=2)
def test_a_head_is_measured_in_every_way_and_a_block_at_its_floor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_model, "CHUNKS", (64 << 10,))
    found = run.measured((400, 4, 32), 1, "cpu", "float32")
    assert {"at once", "chosen", "16", "32"} <= set(found["seconds"])
    assert found["peaks"]["16"] < found["peaks"]["at once"]
    floors = [run.least((128, 4), 2000, "cpu", way, steps=1) for way in run.RUNGS]
    assert floors[0]["chunk"] == 0 < floors[1]["chunk"]
    assert floors[1]["budget"] < floors[0]["budget"]
    assert floors[1]["peak"] <= floors[1]["budget"]


def test_the_tables_show_ratios_and_mebibytes() -> None:
    seconds = {"at once": 2.0, "chosen": 1.0, "16": 3.0}
    peaks = {"at once": 4 << 20, "chosen": 1 << 20, "16": 1 << 20}
    row = {"shape": (1000, 8, 64), "seconds": seconds, "peaks": peaks}
    assert "| 1,000 x 8, 64 | 2.000 | 4 | 0.50 | 1 | 1.50 | - | - |" in heads({"heads": [row]})
    one = {"budget": 3 << 20, "peak": 2 << 20, "seconds": 1.0, "micro_batch": 1, "chunk": 1 << 20}
    one["offloads"] = False
    floor = {"tokens": 8, "features": 4, "at once": {**one, "chunk": 0}, "chunks": one}
    each = {"micro_batch": 1, "seconds": 2.0, "first": 3.0, "budget": 4 << 20, "offloads": False}
    ways = {"at once": {**each, "chunk": 0}, "chunks": {**each, "chunk": 1 << 20}}
    both = {"tokens": 8, "features": 4, "ratio": 0.5, **ways}
    wanted = "| 8, 4 | 4 | 1 | 2.00 | 3.0 | 1, 1 MiB | 2.00 | 3.0 | 0.50 |"
    assert wanted in heads_divided({"divided": [both]})
    assert "not been measured" in heads_divided({})
    every = {name: dict.fromkeys(("at once", "chosen", "64"), 2.0) for name in ("seconds", "peaks")}
    cuda = {"shape": (1000, 8, 64), "precision": "bfloat16", "errors": every["peaks"], **every}
    where = {"gpu": "a GPU", "torch": "2", "cuda": "13"}
    wanted = "| 1,000 x 8, 64 | bfloat16 | 2000 | 0 | 2.0e+00 | 1.00 | 0 | 2.0e+00 | - | - | - |"
    assert wanted in heads_cuda({"environment": where, "heads": [cuda]})
    table = heads_floors({"floors": [floor]})
    assert "| 8, 4 | at once | 3.0 | 2.0 | 1 | 1.00 |" in table
    assert "| 8, 4 | chunks, 1 MiB | 3.0 | 2.0 | 1 | 1.00 |" in table
