"""`anybatch plan --timeline`: the chart that it prints, and the step in a run folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.unit.offloading.test_course_recording import recording
from typer.testing import Result

from anybatch.cli.report.history import Envelope
from anybatch.cli.run_folder import RunFolder
from anybatch.cli.timeline import color_of, colored
from anybatch.core.plan_sections import Link
from anybatch.memory.ledger import Phase, Timeline
from anybatch.memory.lockstep_budget import WAITING
from anybatch.offloading.course import set_course
from anybatch.offloading.unroll import OWNERS, of_course
from anybatch.reports import StepTimeline
from anybatch.units import show_bytes

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


def test_every_owner_has_a_colour_of_its_own() -> None:
    assert all(map(color_of, (*OWNERS, WAITING)))
    assert len({color_of(name) for name in OWNERS}) == len(OWNERS)


def test_colours_of_the_terminal_change_no_letter() -> None:
    for step in (ordered(), timed()):
        text = colored(step).plain
        assert text.splitlines()[:-1] == str(step).splitlines()
        assert step.facts in text
        for owner, size in step.ledger.at_peak().items():
            assert f"{owner} {show_bytes(size)}" in text.splitlines()[-1]


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_a_chart_is_no_wider_than_its_terminal(width: int) -> None:
    for step in (ordered(), timed()):
        chart = [line for line in colored(step, width).plain.splitlines() if "│" in line]
        assert max(map(len, chart)) <= width
        assert chart


def test_the_command_prints_a_chart(command: Command) -> None:
    ended = command(*PLAN, "--timeline")
    assert ended.exit_code == 0, ended.output
    assert "micro-batches of" in ended.stdout
    assert "│" in ended.stdout
    assert "at the peak  █ " in ended.stdout


def test_a_plan_is_printed_in_one_way(command: Command) -> None:
    for words, message in (
        (("--timeline", "--json"), "--timeline and --json were given. Leave 1 of them out"),
        (
            ("--timeline", "--json", "--convolutions"),
            "--timeline and --convolutions and --json were given. Leave 2 of them out",
        ),
    ):
        ended = command(*PLAN, *words)
        assert ended.exit_code == 1
        assert ended.stdout == ""
        assert ended.stderr.startswith(f"error: a plan is printed in one way at a time; {message}")
        assert ended.stderr.count("\n") == 1


def test_a_run_folder_has_the_step_of_its_plan(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.open({})
    folder.keep_step(None)
    assert not (tmp_path / "run" / "timeline.json").exists()
    folder.keep_step(ordered())
    kept = Envelope.from_json((tmp_path / "run" / "timeline.json").read_text())
    assert kept == Envelope.of(ordered())
    folder.release()
    RunFolder(None).keep_step(ordered())
