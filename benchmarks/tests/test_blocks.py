"""The table of blocks that are computed again, and a small run."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from benchmarks.outofcore.blocks import run
from benchmarks.outofcore.blocks.rows import blocks, blocks_cuda
from benchmarks.outofcore.blocks.shown import shown
from benchmarks.outofcore.offload.steps import Step

from anybatch.core.plan_sections import Link
from anybatch.offloading import recorder


@pytest.mark.parametrize("tells", [True, False])
def test_blocks_are_computed_again_where_copies_are_slow(
    tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "Link", lambda out, back: Link(1e3, 1e3))
    torch.manual_seed(0)
    with nullcontext() if tells and run.TELLS else shown():
        found = run.ways(Step(run.QUICK()), 2, (0.6,))
    assert found["checkpoint"]["peak"] < found["in memory"]["peak"]
    moved, again = (found[f"checkpoint: {way}"] for way in ("moved", "moved or computed again"))
    assert moved["out"] > 4 * again["out"]
    assert again["again"] > 0 == moved["again"]
    for one in (moved, again):
        assert one["exact"]
        assert one["peak"] <= one["budget"] == found["checkpoint"]["peak"]


def test_the_tables_show_mebibytes_and_the_fastest_first() -> None:
    row = {"peak": 1 << 20, "wall": [1.0, 1.5, 2.0], "exact": True}
    moved = row | {"out": 2 << 20, "again": 3 << 20, "wall": [1.0, 1.25, 2.0], "exact": False}
    steps = {"net": {"in memory": {"peak": 4 << 20}, "checkpoint": row, "0.5: moved": moved}}
    lines = blocks({"steps": steps}).splitlines()
    assert lines[2:] == [
        "| net | 0.5: moved | 1 | 0.25 | 2 | 3 | 1.25 (1.00 to 2.00) | no |",
        "| net | checkpoint | 1 | 0.25 |  |  | 1.50 (1.00 to 2.00) | yes |",
    ]
    where = {"gpu": "a GPU", "torch": "2", "cuda": "13"}
    assert blocks_cuda({"environment": where, "steps": steps}).startswith("a GPU, torch 2, CUDA")
