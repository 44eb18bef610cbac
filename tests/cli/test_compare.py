"""With and without anybatch, under one limit."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tests.cli.conftest import Make
from tests.cli.runs import rows
from torch import Tensor, nn
from typer.testing import Result

from anybatch.cli import allocator, compare, limited
from anybatch.cli.compare import table, train_in_subprocess
from anybatch.cli.faults import SettingsError, TrainingError
from anybatch.cli.limited import Ended, train_limited
from anybatch.cli.settings import Settings
from anybatch.cli.train import train

MIB = 2**20
DIGITS = Settings(model="cnn:4", batch_size=600, threads=1, memory=2 * MIB)


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process go without the limit."""
    monkeypatch.setattr(limited, "_limit", lambda device, budget: contextlib.nullcontext)


@pytest.mark.large(few=1)
@pytest.mark.usefixtures("unlimited")
@pytest.mark.parametrize("loss", [None, "bce+dice-per-image"])
def test_both_are_the_training_of_the_run(loss: str | None, tmp_path: Path, masks: Make) -> None:
    settings = DIGITS
    if loss is not None:
        settings = Settings(data=str(masks(count=9)), model="unet:2", batch_size=4, crop=16)
        settings = dataclasses.replace(settings, loss=loss, memory="9MiB", threads=1)  # type: ignore[arg-type]
    settings = dataclasses.replace(settings, epochs=2)
    of_run = dataclasses.replace(settings, memory=None, micro_batch=600, out=tmp_path / "run")
    train(of_run)
    losses = [row["loss"] for row in rows(tmp_path / "run") if row["kind"] == "step"]
    for plain in (True, False):
        ended = train_limited(settings, 4, plain=plain)
        assert ended.error == ""
        assert ended.steps == 4
        assert ended.loss == pytest.approx(losses[3], rel=1e-4)
        assert ended.peak is not None


@pytest.mark.usefixtures("unlimited")
def test_one_holds_the_batch_and_the_other_the_budget() -> None:
    full, ours = (train_limited(DIGITS, 2, plain=plain) for plain in (True, False))
    assert full.peak is not None
    assert ours.peak is not None
    assert ours.peak <= 2 * MIB < full.peak
    assert train_limited(dataclasses.replace(DIGITS, epochs=1), 20, plain=True).steps == 3


@pytest.mark.large(of="a limit, for real", few=1)
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is Linux's")
def test_a_batch_that_does_not_fit_fails_for_real(
    command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in allocator.settings_of("tight", allocator.glibc()).items():
        monkeypatch.setenv(name, value)  # as the command's own process would
    words = ("train", "--model", "cnn:64", "--batch-size", 1400, "--threads", 1)
    ended = command(*words, "--memory", "16MiB", "--compare", "--compare-steps", 2)
    assert ended.exit_code == 0, ended.output
    cells = [[cell.strip() for cell in line.split("│")] for line in ended.stdout.splitlines()]
    found = {row[1]: row[2:] for row in cells if len(row) > 2}
    assert found["plain loop"][0] == "fails in step 1"
    assert found["anybatch"][0] == "fits, 2 steps"
    assert "plain loop: RuntimeError: " in ended.stdout
    assert "can't allocate memory" in ended.stdout
    assert "batch 1400 under 16.0 MiB" in ended.stdout


class Aborting(nn.Module):
    """Is ended by the system under a limit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY:
            os.abort()
        return self.weight * x.flatten(1)[:, :10]


def test_a_process_that_the_system_ends_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    settings = dataclasses.replace(DIGITS, model="tests.cli.test_compare:Aborting")
    ended = train_in_subprocess(settings, 2, plain=True)
    assert ended.error.startswith("ended by SIGABRT")
    assert ended.steps == 0


def test_a_training_that_does_not_begin_is_an_error() -> None:
    settings = dataclasses.replace(DIGITS, data="nowhere")
    with pytest.raises(
        TrainingError, match=r"that of the anybatch did not begin \(exit code 1: .*nowhere"
    ):
        train_in_subprocess(settings, 2, plain=False)


@pytest.mark.usefixtures("unlimited")
def test_an_error_is_reported_by_its_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = dataclasses.replace(DIGITS, memory="1KiB")
    arguments = {"settings": dataclasses.asdict(tiny), "steps": 2, "plain": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["limited", json.dumps(arguments)])
        limited.main()
    ready, line = capsys.readouterr().out.splitlines()
    assert ready == limited.READY
    ended = Ended(**json.loads(line))
    assert ended.error.startswith("BudgetError: a step must fit in memory")
    assert (ended.steps, ended.seconds, ended.loss) == (0, None, None)


def test_the_table_says_what_is_recorded() -> None:
    text = io.StringIO()
    found = table({"a": Ended(error="X: [bold] y"), "b": Ended(steps=3, seconds=0.5)}, 7, 64 * MIB)
    Console(file=text, width=120).print(found)
    for part in ("batch 7 under 64.0 MiB", "fails in step 1", "fits, 3 steps", "0.5", "57.3 MiB"):
        assert part in text.getvalue()


def test_a_system_without_limits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare.sys, "platform", "darwin")
    with pytest.raises(SettingsError, match=r"cuda, or cpu on Linux; got cpu on darwin"):
        compare.compare(dataclasses.replace(DIGITS, device="cpu"), 2)
