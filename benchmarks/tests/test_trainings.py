"""Every recorded training runs, on tiny images, and its results say what its run folder says."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import tables
from benchmarks.mbs import rows, trainings
from benchmarks.mbs.cifar import run as cifar
from benchmarks.mbs.demo import run as demo
from benchmarks.mbs.membrane import run as membrane
from benchmarks.mbs.training_rows import CURVES, HEAD
from PIL import Image
from tests.cli.conftest import save

from anybatch.cli.settings import Settings


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    """Bright and dark squares; the test set has 3 of one and 5 of the other."""
    draw = np.random.default_rng(0)
    for part, counts in (("train", (7, 6)), ("test", (3, 5))):
        for level, count in enumerate(counts):
            for index in range(count):
                pixels = draw.integers(0, 90, (32, 32, 3)) + 150 * level
                path = tmp_path / "images" / part / str(level) / f"{index}.jpg"
                save(path, pixels.astype(np.uint8))
    return tmp_path / "images"


@pytest.fixture
def masks(tmp_path: Path) -> Path:
    """Grey noise with a bright bar of its own width on each image."""
    draw = np.random.default_rng(1)
    for index in range(5):
        mask = np.zeros((32, 32), np.uint8)
        mask[:, : 3 + 5 * index] = 255
        image = draw.integers(0, 80, (32, 32)).astype(np.uint8) + mask // 2
        save(tmp_path / "pairs" / "image" / f"{index}.png", image)
        save(tmp_path / "pairs" / "label" / f"{index}.png", mask)
    return tmp_path / "pairs"


def check(folder: Path, run: Path, expected: dict[str, Any]) -> str:
    """Compare a results file with the run folder it is of; return its table."""
    text = (folder / "results.json").read_text()
    assert not re.search(r'"[^"]*/[^"]*/', text), "a path"
    results = json.loads(text)
    found = results["runs"][0]
    assert {name: found[name] for name in expected} == expected
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    summary = json.loads((run / "summary.json").read_text())
    assert found["test_metric"] == [line[f"test_{found['metric']}"] for line in epochs]
    assert found["train_loss"] == [line["train_loss"] for line in epochs]
    assert found["last"] == summary["last"] == found["test_metric"][-1]
    assert all(math.isfinite(value) for value in found["train_loss"] + found["test_loss"])
    return tables.table(folder.name)


def test_the_images_are_trained_on_and_recorded(
    classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "HERE", tmp_path)
    out, runs = tmp_path / "mbs" / "cifar", tmp_path / "runs"
    for _ in range(2):  # again: the run folder of the first time is replaced
        cifar.main(data=classes, quick=True, out=out, runs=runs)
    expected = {"metric": "accuracy", "epochs": 2, "steps": 2, "train": 13, "test": 8}
    table = check(out, runs / "cifar-0", expected)
    assert "- constant answer: 0.625" in table  # 5 of 8
    assert "| epoch 2 |" in table
    assert (out / "curves.png").stat().st_size < 60 * 2**10
    with Image.open(out / "curves.png") as picture:
        assert picture.width == 640
    head, _, *rows = tables.trainings().splitlines()
    assert head == f"| {' | '.join(HEAD)} |"
    assert [row.count("|") for row in rows] == [len(HEAD) + 1] * 3
    assert "resnet20 on 13 CIFAR-10 images" in rows[1]
    assert "run `python -m benchmarks.mbs.membrane.run --data DIR`" in rows[2]


def test_the_masks_are_trained_on_and_recorded(
    masks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "HERE", tmp_path)
    out, runs = tmp_path / "mbs" / "membrane", tmp_path / "runs"
    membrane.main(data=masks, quick=True, out=out, runs=runs)
    expected = {"metric": "iou", "epochs": 2, "steps": 2, "train": 4, "test": 1}
    assert "test IoU" in check(out, runs / "membrane-0", expected)
    assert (out / "curves.png").stat().st_size < 60 * 2**10


def test_all_foreground_is_measured_on_the_images_held_out(masks: Path) -> None:
    found = trainings.constant(Settings(data=str(masks), model="unet:2", crop=16))
    assert found in [(3 + 5 * index) / 32 for index in range(5)]


def test_the_digits_are_trained_on_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "HERE", tmp_path)
    out, runs = tmp_path / "mbs" / "demo", tmp_path / "runs"
    demo.main(quick=True, runs=runs)
    assert not out.exists()  # only --out writes results
    demo.main(quick=True, out=out, runs=runs)
    expected = {"metric": "accuracy", "epochs": 2, "steps": 4, "train": 1437, "test": 360}
    assert "loss cross-entropy" in check(out, runs / "demo-0", expected)


def test_without_images_nothing_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in (cifar, membrane):
        run.main(out=tmp_path, runs=tmp_path)
        assert "give --data DIR to train" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("epochs", "chosen"), [(1, [1]), (3, [1, 2, 3]), (23, [1, *range(2, 23, 2), 23])]
)
def test_a_table_holds_the_first_and_the_last_epoch_of_each_seed(
    epochs: int, chosen: list[int]
) -> None:
    curve = [epoch / 100 for epoch in range(1, epochs + 1)]
    run = {"epochs": epochs, "steps": 5, "metric": "iou", "train": 4, "seconds": 61.4}
    run |= {"last": curve[-1], **dict.fromkeys(CURVES, curve)}
    runs = [{**run, "seed": seed} for seed in (3, 4)]
    sizes = {"batch": 16, "micro_batch": 4}
    results = {"what": "cells", "sizes": sizes, "recipe": {"model": "unet"}, "constant": 0.5}
    table = rows.training({**results, "runs": runs})
    found = re.findall(r"^\| seed (\d), epoch (\d+) \| ([\d.]+) ", table, re.MULTILINE)
    assert [(int(s), int(e)) for s, e, _ in found] == [(s, e) for s in (3, 4) for e in chosen]
    assert all(float(value) == int(epoch) / 100 for _, epoch, value in found)
    assert f"- test figure: IoU {curve[-1]:.3f} and {curve[-1]:.3f}" in table
    assert "- seconds: 61 and 61" in table
