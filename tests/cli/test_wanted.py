"""`plan --gpus | --speedup | --deadline | --network`: the table, and a line that runs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Command = Callable[..., Result]
PLAN = ("plan", "--model", "cnn:8", "--batch-size", 256, "--threads", 1, "--memory", "4MiB")


def test_a_goal_is_answered_with_a_line_that_trains(command: Command, tmp_path: Path) -> None:
    result = command(*PLAN, "--gpus", 2, "--network", "10Gbit", "--norm", "batch")
    assert result.exit_code == 0, result.output
    assert "seconds a step   speedup   efficiency   Lemma 3.1" in result.output
    assert "2 GPUs, as requested" in result.output
    assert "an epoch of" in result.output
    assert "epochs " in result.output
    (line,) = [row for row in result.output.splitlines() if row.startswith("  run ")]
    words = shlex.split(line)[1:]
    assert words[:5] == ["torchrun", "--nproc-per-node=2", "-m", "anybatch", "train"]
    assert "--network" not in words
    trained = command(*words[4:], "--epochs", 1, "--out", tmp_path / "run")
    assert trained.exit_code == 0, trained.output


def test_json_holds_pace_and_scale(command: Command) -> None:
    result = command(*PLAN, "--speedup", 2, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["pace"]["steps"] >= 1
    assert [row["gpus"] for row in found["scale"]["rows"]][:2] == [1, 2]
    served = command(*PLAN, "--gpus", 2, "--network", "10Gbit", "--servers", "auto", "--json")
    assert served.exit_code == 0, served.output
    assert json.loads(served.stdout)["scale"]["servers"]["workers"] == 2
    plain = json.loads(command(*PLAN, "--json").stdout)
    assert plain["pace"] is plain["scale"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpus", 0), "gpus must be a whole number of at least 1, and it is 0."),
        (("--gpus", 2, "--speedup", 2), "at most one goal can be given"),
        (("--deadline", "soon"), 'deadline must be a time such as "30min"'),
        (("--servers", 2, "--gpus", 2), "give gpus= and network= with servers="),
        (("--servers", "few", "--gpus", 2, "--network", "1Gbit"), 'whole number or "auto"'),
        (("--network", "10GB"), "network must be bits a second"),
        (("--gpus", 257), "gpus must be at most the 256 samples of a mini-batch"),
        (("--gpus", 2, "--states", "file"), "not measured today with offloaded optimizer state"),
    ],
)
def test_what_means_nothing_is_refused(
    command: Command, words: tuple[object, ...], message: str
) -> None:
    result = command(*PLAN, *words)
    assert result.exit_code == 1
    assert message in result.output


def test_where_states_wait_elsewhere_it_is_said_that_steps_were_not_measured(
    command: Command,
) -> None:
    result = command(*PLAN, "--measure", "--states", "file")
    assert result.exit_code == 0, result.output
    assert "full steps were not measured" in result.output
