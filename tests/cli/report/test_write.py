"""The page in a run folder, the commands that write it, and what they refuse."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.report.pages import Node, log_of, read, scaled
from tests.cli.runs import Stopped
from tests.cli.test_run_folder import largest_file
from typer.testing import Result

from anybatch import Plan
from anybatch.cli.faults import RunFolderError, SettingsError
from anybatch.cli.report import record
from anybatch.cli.report.history import Envelope
from anybatch.cli.report.parts import number
from anybatch.cli.report.write import page_of, write_page
from anybatch.cli.run_folder import RunFolder
from anybatch.cli.saved_run import Interrupted
from anybatch.cli.settings import Settings
from anybatch.cli.train import resume, train

Command = Callable[..., Result]
QUICK = Settings(model="cnn:4", batch_size=512, micro_batch=512, epochs=2, threads=1)


def page_in(folder: Path) -> Node:
    return read((folder / "report.html").read_text())


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    """A copy of the run, to spoil."""
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run"


def test_a_run_leaves_a_page_with_its_own_numbers(run: Path) -> None:
    page = page_in(run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [line for line in lines if line["kind"] == "epoch"]
    steps = [line for line in lines if line["kind"] == "step"]
    assert page.by_id("loss-numbers").cells() == [
        [str(row["epoch"]), f"{row['train_loss']:.5g}", f"{row['test_loss']:.5g}"] for row in rows
    ]
    assert len(page.by_id("throughput-numbers").cells()) == len(steps)
    plan = Plan.from_json((run / "plan.json").read_text())
    assert plan.memory is not None
    assert len(page.by_id("candidates").cells()) == len(plan.memory.candidates)
    titles = [one.text for one in page.all("h2")]
    assert titles == [
        *("Figures at the end", "What was run", "Loss and metric", "Throughput", "Memory"),
        *("The plan, and why", "Scale-out"),
    ]
    plain = [step for step in steps if step["peak_bytes"] is None]
    computing = sum(step["computing_seconds"] for step in plain)
    shows = sum(step["seconds"] + step["waiting_seconds"] for step in plain) - computing
    assert shows > 0
    assert f"R_O {number(shows / computing)} " in page.by_id("scale").text
    assert page.by_id("run").text.count("--memory 1MiB") == 1
    assert not [one for one in page.walk() if one.has("missing")]
    assert json.loads((run / "summary.json").read_text())["report"] == "report.html"


def test_a_scale_out_in_the_plan_of_a_run_is_shown(copied: Path) -> None:
    plan = Plan.from_json((copied / "plan.json").read_text())
    (copied / "plan.json").write_text(scaled(plan, " at last").to_json())
    page = read(page_of(record.record_of(copied)))
    assert [row[0] for row in page.by_id("scaling-numbers").cells()] == ["1", "2", "8"]
    assert "twice as fast at last" in page.by_id("scale").text


def test_the_planned_step_is_saved_as_data(run: Path) -> None:
    step = Envelope.from_json((run / "timeline.json").read_text())
    plan = Plan.from_json((run / "plan.json").read_text())
    assert plan.memory is not None
    assert (step.peak, step.budget) == (plan.memory.predicted, plan.memory.budget)
    assert page_in(run).by_id("timeline-figure").all("svg")


def test_the_command_makes_the_same_page_anew(
    command: Command, copied: Path, tmp_path: Path
) -> None:
    before = (copied / "report.html").read_text()
    (copied / "report.html").unlink()
    ended = command("report", copied)
    assert ended.exit_code == 0, ended.output
    assert ended.stdout == f"The report is in {copied / 'report.html'}.\n"
    assert (copied / "report.html").read_text() == before
    other = tmp_path / "other.html"
    assert command("report", copied, "--out", other).exit_code == 0
    assert other.read_text() == before
    assert not list(copied.glob(".*.part"))


def test_a_folder_of_an_older_version_has_a_page_too(command: Command, copied: Path) -> None:
    for name in ("report.html", "timeline.json", "summary.json"):
        (copied / name).unlink()
    with (copied / "metrics.jsonl").open("ab") as log:
        log.write(b'{"kind": "step", "st')
    assert command("report", copied).exit_code == 0
    page = page_in(copied)
    assert "The run has not ended: it goes on, or it was killed." in page.text
    assert "1 line of metrics.jsonl could not be read" in page.text
    assert "The timeline of the planned step was not stored" in page.text
    assert not [one for one in page.all("figure") if one.attributes["id"] == "timeline-figure"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("plan.json", b"{}", "plan.json cannot be explained by this version: a plan must hold"),
        ("plan.json", b"\xff", "plan.json is no text."),
        ("timeline.json", b"[]", "timeline.json cannot be drawn by this version: a step must"),
        ("summary.json", b"{", "summary.json is not in the form that a run writes"),
        ("summary.json", b"7", "summary.json is not in the form that a run writes"),
    ],
)
def test_a_file_that_is_broken_is_named_and_the_rest_is_shown(
    copied: Path, name: str, content: bytes, words: str
) -> None:
    (copied / name).write_bytes(content)
    page = read(page_of(record.record_of(copied)))
    assert words in page.text
    assert page.by_id("loss-numbers").cells()


def test_a_file_that_cannot_be_read_is_named(copied: Path) -> None:
    for name in ("plan.json", "metrics.jsonl"):
        (copied / name).unlink()
        (copied / name).mkdir()
    text = read(page_of(record.record_of(copied))).text
    assert "plan.json cannot be read: Is a directory." in text
    assert "metrics.jsonl cannot be read: Is a directory." in text


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "No such file"), (b"{", "it is no JSON"), (b"[]", "no JSON obj")]
)
def test_what_is_no_run_folder_is_refused(
    content: bytes | None, reason: str, tmp_path: Path, command: Command
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(RunFolderError, match=rf"a report needs a run folder, with .*{reason}"):
        record.record_of(tmp_path)
    ended = command("report", tmp_path)
    assert (ended.exit_code, ended.stderr.count("\n")) == (1, 1)
    assert "Give the folder that a training named." in ended.stderr
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("page.txt", "the report must be a file whose name ends in .html; got"),
        ("gone/page.html", "the report must go to a folder that is there;"),
        ("folder.html", "the report must be a file that can be written;"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_done(
    name: str, message: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder.html").mkdir()
    for words in (("report", tmp_path / "none", "--out"), ("plan", "--model", "no", "--html")):
        ended = command(*words, tmp_path / name)
        assert ended.exit_code == 1
        assert ended.stderr.startswith(f"error: {message}")
    monkeypatch.setattr(os, "access", lambda *_: False)
    ended = command("plan", "--html", tmp_path / "page.html")
    assert ended.stderr.startswith("error: the report must be a file that can be written")


def test_a_full_disk_keeps_the_page_that_was_there(tmp_path: Path) -> None:
    at = tmp_path / "page.html"
    write_page("whole", at)
    with (
        largest_file(100),
        pytest.raises(SettingsError, match=r"cannot be written to .*: File too large. Make room"),
    ):
        write_page("x" * 1000, at)
    assert at.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [at]


def test_a_page_that_fails_does_not_lose_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> str:
        raise ZeroDivisionError("no page today.")

    monkeypatch.setattr("anybatch.cli.run_folder.page_of", broken)
    summary = train(Settings(**{**vars(QUICK), "out": tmp_path / "run"}))
    said = f"not written: no page today; anybatch report {tmp_path / 'run'} writes it"
    assert summary.report == said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["report"] == said
    assert (tmp_path / "run" / "checkpoint.pt").exists()


def test_a_full_disk_does_not_lose_the_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.open({})
    folder.epochs = []
    (tmp_path / "metrics.jsonl").write_bytes(log_of(epochs=1))
    with largest_file(10_000):
        folder.close({"steps": 4})
    folder.release()
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["report"].startswith("not written: report.html cannot be written")
    assert found["steps"] == 4
    assert not (tmp_path / "report.html").exists()
    assert not list(tmp_path.glob(".*.part"))


def test_an_interrupted_run_has_a_page_and_a_resumed_one_the_full_history(tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = Settings(**{**vars(QUICK), "out": out})
    with pytest.raises(Interrupted):
        train(settings, Stopped(at=5))
    page = page_in(out)
    done = len(page.by_id("throughput-numbers").cells())
    assert f"Interrupted after step {done}, 1 whole epochs. Go on with:" in page.text
    summary = resume(out)
    assert summary.report == "report.html"
    page = page_in(out)
    assert len(page.by_id("throughput-numbers").cells()) == summary.steps > done
    assert "resumed 1 time" in page.text
    assert len(page.by_id("loss-numbers").cells()) == 2


def test_a_run_that_fails_after_a_step_has_a_page(tmp_path: Path) -> None:
    class Failing(Stopped):
        def step(self, loss: float, held: object = None) -> None:
            raise RuntimeError("<b>no more</b>")

    with pytest.raises(RuntimeError):
        train(Settings(**{**vars(QUICK), "out": tmp_path}), Failing())
    page = page_in(tmp_path)
    assert "Failed after step 1, 0 whole epochs: RuntimeError: <b>no more</b>" in page.text
    assert not page.all("b")


def test_the_page_is_the_runs_own_when_it_is_overwritten(copied: Path) -> None:
    (copied / "mine.html").write_text("mine")
    folder = RunFolder(copied, overwrite=True)
    folder.open({})
    assert not (copied / "report.html").exists()
    assert not (copied / "timeline.json").exists()
    assert (copied / "mine.html").read_text() == "mine"
    folder.discard()
    assert (copied / "report.html").exists()


def test_a_plan_writes_a_page_only_on_request(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("plan", "--model", "cnn:4", "--threads", 1, "--batch-size", 64, "--memory", "400KiB")
    assert command(*words).exit_code == 0
    assert not list(tmp_path.iterdir())
    ended = command(*words, "--html", "plan.html", "--json")
    assert ended.exit_code == 0, ended.output
    assert "The plan is explained in plan.html.\n" in ended.stderr
    plan = Plan.from_json(ended.stdout)
    page = read((tmp_path / "plan.html").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["plan.html"]
    titles = [one.text for one in page.all("h2")]
    assert titles == ["What was planned", "Memory", "The plan, and why"]
    assert page.all("pre")[0].text == " ".join(str(plan).split())
    assert page.by_id("timeline-figure").all("svg")
    assert "anybatch plan --model cnn:4 --batch-size 64 --memory 400KiB --threads 1" in page.text
    assert "without it a plan writes nothing" in " ".join(
        command("plan", "--help").stdout.replace("│", " ").split()
    )
