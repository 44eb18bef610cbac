"""`anybatch plan --timeline`: what it prints, the picture it writes, and what it refuses before."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.unit.offload.test_course_recording import recording
from typer.testing import Result

from anybatch import Plan
from anybatch.cli.faults import SettingsError
from anybatch.cli.picture import draw_step, style_of
from anybatch.cli.run_folder import RunFolder
from anybatch.cli.timeline import colored, write_picture
from anybatch.core.plan_sections import Link
from anybatch.core.units import show_bytes
from anybatch.memory.ledger import Phase, Timeline
from anybatch.memory.lockstep_budget import WAITING
from anybatch.offload.course import set_course
from anybatch.offload.unroll import OWNERS, of_course
from anybatch.reports import StepTimeline

Command = Callable[..., Result]
PLAN = ("plan", "--model", "cnn:4", "--threads", 1, "--batch-size", 64, "--memory", "400KiB")


def ordered(rows: int = 40, budget: int = 4 << 20) -> StepTimeline:
    """A step whose order is known and whose times are not, with an owner of no known name."""
    live = np.random.default_rng(0).integers(1 << 18, 1 << 20, (rows, 4))
    owners = ("somebody's", "optimizer", "activations", "parameters")
    ledger = Timeline(owners, tuple(map(str, range(rows))), live)
    return StepTimeline("in order", ledger, budget, (Phase("look", 0), Phase("step", 9)))


def timed(memory: int = 16) -> StepTimeline:
    return of_course(set_course(recording(), memory, Link(3.0, 5.0)))


def opened(picture: bytes) -> Image.Image:
    found = Image.open(io.BytesIO(picture))
    assert found.format == "PNG"
    return found


@pytest.mark.parametrize(
    "step",
    [ordered(), ordered(1), ordered(budget=1 << 40), timed(), timed(36)],
    ids=["order", "one event", "far budget", "times", "nothing leaves"],
)
def test_a_picture_is_as_high_as_what_it_shows(step: StepTimeline) -> None:
    picture = opened(draw_step(step))
    heights = 5.0 + 1.8 * bool(step.moves) + 0.9 * (step.seconds is not None)
    assert picture.width == pytest.approx(8.5 * 110, abs=2)
    assert picture.height == pytest.approx((1.0 + 0.62 * heights) * 110, abs=2)
    colors = np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)
    assert len(colors) > 20


def test_every_owner_has_a_colour_of_its_own_in_the_picture() -> None:
    pixels = np.asarray(opened(draw_step(timed())).convert("RGB")).reshape(-1, 3)
    there = {f"#{r:02x}{g:02x}{b:02x}" for r, g, b in np.unique(pixels, axis=0).tolist()}
    shown = [name for name, most in zip(OWNERS, timed().ledger.live.max(0), strict=True) if most]
    assert len(shown) >= 5
    assert {style_of(name) for name in shown} <= there
    assert all(map(style_of, (*OWNERS, WAITING)))
    assert len({style_of(name) for name in OWNERS}) == len(OWNERS)


def test_colours_of_the_terminal_change_no_letter() -> None:
    for step in (ordered(), timed()):
        text = colored(step).plain
        assert text.splitlines()[:-1] == str(step).splitlines()
        assert step.facts in text
        for owner, size in step.ledger.at_peak().items():
            assert f"{owner} {show_bytes(size)}" in text.splitlines()[-1]


def test_the_command_prints_a_chart_and_says_where_the_picture_is(
    command: Command, tmp_path: Path
) -> None:
    at = tmp_path / "step.png"
    ended = command(*PLAN, "--timeline", at)
    assert ended.exit_code == 0, ended.output
    assert f"The step is drawn in {at}.\n" in ended.stdout
    assert "micro-batches of" in ended.stdout
    assert "│" in ended.stdout
    assert "at the peak  █ " in ended.stdout
    assert opened(at.read_bytes()).width > 300
    ended = command(*PLAN, "--json", "--timeline", at)
    plan = Plan.from_json(ended.stdout)
    assert plan.memory is not None
    assert f"The step is drawn in {at}.\n" in ended.stderr
    assert "│" not in ended.output


def refused(command: Command, *words: object) -> str:
    ended = command(*PLAN, *words)
    assert ended.exit_code == 1
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1
    return ended.stderr


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_planned(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    for words, message in (
        (("--timeline", "a/b.png"), "the picture must go to a folder that is there; 'a' is none"),
        (("--timeline", "step.jpg"), "the picture must be a file whose name ends in .png; got"),
        (("--timeline", "folder.png"), "the picture must be a file that can be written; 'folder"),
        (("step.png",), "a file is for the picture of --timeline or --convolutions; 'step.png'"),
        (("--timeline", "--json"), "json prints the plan and nothing else; --timeline was given"),
    ):
        assert refused(command, *words).startswith(f"error: {message}")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "must be a file that can be written" in refused(command, "--timeline", "step.png")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_without_matplotlib_a_picture_is_refused_and_the_chart_is_not(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = refused(command, "--timeline", tmp_path / "step.png")
    assert "pip install 'anybatch[report]'" in message
    ended = command(*PLAN, "--timeline")
    assert ended.exit_code == 0, ended.output
    assert "│" in ended.stdout
    folder = RunFolder(tmp_path / "run")
    folder.open({})
    folder.draw_step(ordered())
    assert folder.timeline == "not installed: pip install 'anybatch[report]'"
    folder.close({"timeline": folder.timeline})
    folder.release()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["timeline"] == folder.timeline


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot be written to .*: No such file .*Name anothe"):
        write_picture(ordered(1), tmp_path / "gone" / "step.png")


def test_a_run_folder_has_the_picture_of_its_plan(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.open({})
    folder.draw_step(None)
    assert folder.timeline is None
    folder.draw_step(ordered())
    assert folder.timeline == "timeline.png"
    assert opened((tmp_path / "run" / "timeline.png").read_bytes()).height > 300
    folder.release()
    again = RunFolder(tmp_path / "run", resumed=True)
    assert again.timeline == "timeline.png"
    RunFolder(None).draw_step(ordered())
