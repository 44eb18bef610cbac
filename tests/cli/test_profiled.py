"""`anybatch profile`: the table, JSON, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import Result

from anybatch.cli import profiled
from anybatch.tools.profiled import STAGES

Command = Callable[..., Result]
PROFILE = ("profile", "--batch-size", 128, "--steps", 2, "--threads", 1)


def test_the_seven_steps_are_printed_and_nothing_is_written(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command(*PROFILE, "--micro-batch", 32)
    assert result.exit_code == 0, result.output
    for name in STAGES:
        assert name in result.output
    assert "2 steps of 128 samples" in result.output
    assert "R_O" in result.output
    assert profiled.DONE in result.output
    assert list(tmp_path.iterdir()) == []


def test_json_is_the_profile_and_only_that(command: Command) -> None:
    result = command(*PROFILE, "--memory", "8MiB", "--workers", 1, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [one["name"] for one in found["stages"]] == list(STAGES)
    assert sum(one["share"] for one in found["stages"]) == pytest.approx(1)
    low, high = found["interval"]
    assert low <= found["overhead"] <= high


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--steps", 0), "steps must be at least 1; got 0."),
        (("--memory", "1KiB"), "a step must fit in memory"),
        (("--micro-batch", 0), "micro-batch must be at least 1; got 0."),
        (("--data", "nowhere"), "data must be 'digits' or a folder that exists"),
    ],
)
def test_what_cannot_be_profiled_is_refused(
    command: Command, words: tuple[object, ...], message: str
) -> None:
    result = command(*PROFILE, *words)
    assert result.exit_code == 1
    assert message in result.output


def pictures(folder: Path, *, broken: bool) -> None:
    for number in range(8):
        at = folder / "train" / f"class{number % 2}" / f"{number}.png"
        at.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), number).save(at)
    for name in ("class0", "class1"):
        (folder / "test" / name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(folder / "test" / name / "0.png")
    if broken:
        (folder / "train" / "class0" / "0.png").write_bytes(b"no picture")


def test_a_broken_file_is_named_or_left_out(command: Command, tmp_path: Path) -> None:
    pictures(tmp_path, broken=True)
    words = ("profile", "--data", tmp_path, "--batch-size", 8, "--steps", 1, "--micro-batch", 4)
    result = command(*words)
    assert result.exit_code == 1
    assert "0.png" in result.output
    result = command(*words, "--skip-corrupt")
    assert result.exit_code == 0, result.output
    assert "1 steps of 7 samples" in result.output
