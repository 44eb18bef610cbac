"""The benchmark of contrastive training: its ways compute one gradient, and it can be written."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from benchmarks.integrations.contrastive import learns, rows, run, steps
from benchmarks.integrations.contrastive.ways import MODULES
from benchmarks.results import read

from anybatch.tools.exactness import tolerance

PEERS = {way for way, module in MODULES.items() if find_spec(module) is not None}


def test_all_ways_but_accumulation_have_the_gradient_of_the_batch(tmp_path: Path) -> None:
    run.main(quick=True, out=tmp_path, only="errors")
    results = read(tmp_path / "results.json")
    assert results is not None
    (found,) = results["errors"].values()
    assert found.pop("naive") > 0.1
    assert set(found) == {"anybatch, matrix", "anybatch, joint", "anybatch", *PEERS}
    assert max(found.values()) <= tolerance()
    assert rows.contrastive(results)


def test_dropout_is_that_of_the_batch_where_that_is_requested() -> None:
    (found,) = steps.errors(["sentences, dropout"], 12, 5).values()
    assert found["anybatch, rng batch"] <= tolerance()
    assert found["anybatch"] > 0.1


def test_a_training_of_the_engine_is_the_undivided_one(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    run.main(quick=True, out=tmp_path, only="learns")
    results = read(tmp_path / "results.json")
    assert results is not None
    assert rows.contrastive_summary(results)
    assert (tmp_path / "curves.png").exists()
    last = {one["arm"]: one["loss"][-1] for one in results["learns"]}
    assert set(last) == set(learns.ARMS)
    difference = {arm: abs(loss - last["undivided"]) for arm, loss in last.items()}
    assert difference["anybatch"] < difference["accumulated"]


def test_no_number_is_tested_twice() -> None:
    _, others = learns.digits()
    _, texts = learns.tested(others, 50)
    assert len(torch.unique(texts, dim=0)) == 50
