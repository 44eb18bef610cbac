"""The trainings with large and long windows: both arms see the same, and the tables are written."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.ucudnn.training import arms, curves, rows, run, tasks
from PIL import Image
from tests.cli.conftest import save

TINY = tasks.Size(batch=4, steps=2, epochs=2, tests=8, compared=4)


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "LENGTH", 64)
    monkeypatch.setattr(tasks, "DELAYS", (3, 5, 7, 9))


@pytest.mark.usefixtures("_short")
def test_the_class_of_a_sequence_is_the_delay_of_its_echo() -> None:
    x, classes = tasks.echoes(40, torch.Generator().manual_seed(0))
    delays = (3, 5, 7, 9)
    corr = torch.stack([(x * x.roll(d, 2)).mean((1, 2)) for d in delays], 1)
    assert (corr.argmax(1) == classes).float().mean() > 0.9
    assert len(set(classes.tolist())) == 4


@pytest.mark.usefixtures("_short")
def test_mini_batches_are_of_the_seed_and_the_epoch() -> None:
    task = tasks.sequences(TINY)
    first, again, other = (list(task.batches(4, 0, epoch)) for epoch in (0, 0, 1))
    assert [len(x) for x, _ in first] == [4, 4]
    assert len(list(task.batches(2, 0, 0))) == 4
    assert torch.equal(first[1][0], again[1][0])
    assert not torch.equal(first[1][0], other[1][0])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    for part in ("train", "test"):
        for index in range(10):
            pixels = draw.integers(0, 255, (32, 32, 3)).astype(np.uint8)
            save(tmp_path / part / str(index) / "0.png", pixels)
    return tmp_path


@pytest.mark.usefixtures("_short")
def test_it_trains_and_its_tables_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arms, "ORDERS", (0, 1, 2))
    task = replace(tasks.sequences(TINY), make=partial(tasks.hyena, 2, 9, 1))
    made = {"sequences": lambda: task}
    found = run.measured(made, 2, (0, 1), "cpu")
    for task in found["tasks"].values():
        same = task["agreement"]
        assert same["float64"]["apart"]["worst"] <= 1e-9
        assert same["float32"]["allowed"]["all"] > 0  # orders differ
        assert same["to_float64"]["least"]["all"] <= same["to_float64"]["most"]["all"] < 1e-5
        torchs, ours = (rows.of(task, arm) for arm in ("torch", "ours"))
        for a, b in zip(torchs, ours, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)
            assert (len(a["loss"]), len(a["test_loss"])) == (2 * 2, 2)
            assert a["divided"] == 0
    assert rows.conv_training(found).count("\n") == 1 + 2
    text = rows.conv_training_same(found)
    assert "of 1.0e-09: within" in text
    assert "float32, from torch in float64" in text
    curves.draw(found, tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.width > 600


def test_the_images_fill_every_step_and_the_network_takes_them(folder: Path) -> None:
    size = tasks.Size(batch=5, steps=2, epochs=1, tests=10, compared=5)
    task = tasks.images(folder, size)
    assert [x.shape for x, _ in task.batches(5, 0, 0)] == [(5, 3, 32, 32)] * 2
    assert [len(part) for part in task.tests] == [10, 10]
    made = tasks.replknet((4, 6), (9, 7))
    assert made(task.tests[0][:2]).shape == (2, 10)


def test_an_end_outside_the_seeds_is_reported() -> None:
    def training(arm: str, seed: int, end: float) -> dict[str, object]:
        return {"arm": arm, "seed": seed} | {key: [9.0, end] for key in rows.ENDS}

    runs = [training("torch", 0, 0.2), training("torch", 1, 0.4)]
    for end, word in ((0.3, "within"), (0.5, "outside")):
        ours = [training("ours", seed, end) for seed in (0, 1)]
        text = rows.ends({"title": "one", "runs": [*ours, *runs]})
        assert all(f"the mean is {word} torch's seeds'" in line for line in text)


def test_without_images_or_cuda_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run.main(out=tmp_path)
    assert "give --images DIR" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run.main(device="cuda", out=tmp_path)
    assert list(tmp_path.iterdir()) == []
