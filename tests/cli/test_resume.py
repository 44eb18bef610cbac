"""A run that is resumed ends as the one that was never stopped; what cannot go on is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.cli.conftest import Make
from tests.cli.runs import Stopped, checkpoint, equal, rows, same_end
from tests.pool import PROCESSES
from torch import nn
from typer.testing import Result

from anybatch.cli.checkpoint import AtomicStep
from anybatch.cli.faults import DataError, RunFolderError, SettingsError, Terminated, terminable
from anybatch.cli.progress import Gauge, RunLog, lines_until
from anybatch.cli.run_folder import Lock
from anybatch.cli.saved_run import Interrupted
from anybatch.cli.settings import Settings
from anybatch.cli.train import resume, train
from anybatch.cli.views import Key, View, Views

pytestmark = pytest.mark.usefixtures("undrawn")

DIGITS = Settings(
    model="tests.cli.runs:drawing",
    batchnorm="local",
    epochs=2,
    batch_size=600,
    micro_batch=256,
    threads=1,
)
MICRO_BATCHES = 7  # of an epoch: steps of 3, 3 and 1


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that nothing stopped."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(dataclasses.replace(DIGITS, out=out))
    return out


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """Return the folder of a run that was stopped in its fifth step, of the second epoch."""
    with pytest.raises(Interrupted):
        train(dataclasses.replace(DIGITS, out=tmp_path / "stopped"), Stopped(11))
    return tmp_path / "stopped"


@pytest.mark.large(few=4)
@pytest.mark.parametrize("at", range(1, 2 * MICRO_BATCHES + 1))
def test_an_interrupt_anywhere_changes_nothing(at: int, tmp_path: Path, full_run: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(Interrupted) as caught:
        train(dataclasses.replace(DIGITS, out=out), Stopped(at))
    steps = caught.value.summary.steps
    assert steps == len([row for row in rows(out) if row["kind"] == "step"])
    resumed = 1
    if at < MICRO_BATCHES:  # and once more
        resumed = 2
        with pytest.raises(Interrupted):
            resume(out, progress=Stopped(MICRO_BATCHES + 1))
    summary = resume(out)
    assert same_end(out, full_run)
    assert (summary.resumed, summary.interrupted) == (resumed, False)
    unbroken = json.loads((full_run / "summary.json").read_text())
    for name in ("images", "steps", "epochs", "best", "last", "train_last", "skipped"):
        assert getattr(summary, name) == unbroken[name]


@pytest.mark.large(few=1)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_masks_crops_and_a_coupled_loss_go_on(optimizer: str, tmp_path: Path, masks: Make) -> None:
    settings = Settings(
        data=str(masks(count=8)),
        model="unet:2",
        epochs=2,
        batch_size=5,
        micro_batch=2,
        crop=16,
        crops=2,
        optimizer=optimizer,  # type: ignore[arg-type]
        schedule="linear",
        threads=1,
    )
    train(dataclasses.replace(settings, out=tmp_path / "whole"))
    for at in (2, 9):
        out = tmp_path / f"run{at}"
        with pytest.raises(Interrupted):
            train(dataclasses.replace(settings, out=out), Stopped(at))
        resume(out)
        assert same_end(out, tmp_path / "whole")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Watching(Stopped):
    """Six minutes pass with each step; remembers of which step the checkpoint then is."""

    def __init__(self, clock: Clock, out: Path, at: int = 0) -> None:
        super().__init__(at)
        self.clock, self.out = clock, out
        self.found: list[int] = []

    def step(self, loss: float, held: Gauge | None = None) -> None:
        self.found.append(checkpoint(self.out)["step"])
        self.clock.now += 360.0


@pytest.mark.parametrize(("minutes", "found"), [(10, [0, 0, 2, 2, 4, 5]), (0, [0, 1, 2, 3, 4, 5])])
def test_a_long_epoch_has_checkpoints_by_the_clock(
    minutes: float, found: list[int], tmp_path: Path
) -> None:
    clock, out = Clock(), tmp_path / "run"
    settings = dataclasses.replace(DIGITS, out=out, batch_size=300, checkpoint_minutes=minutes)
    shown = Watching(clock, out)
    train(settings, shown, clock=clock)
    assert shown.found[:6] == found


def test_an_optimizer_that_fails_amid_its_step_leaves_the_last_checkpoint(
    tmp_path: Path, full_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the parameters had made the step, and was saved as if all had."""
    out, calls, right = tmp_path / "run", 0, torch.optim.AdamW.step

    def breaks(self: torch.optim.AdamW, closure: Any = None) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:  # the second of the second epoch
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise OSError("no room for the others")
        return right(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", breaks)
    with pytest.raises(OSError, match="no room for the others"):
        train(dataclasses.replace(DIGITS, out=out))
    assert "the last checkpoint stands" in json.loads((out / "summary.json").read_text())["stopped"]
    assert checkpoint(out)["step"] == 3
    monkeypatch.undo()
    resume(out)
    assert same_end(out, full_run)


def test_mini_batches_that_are_done_are_not_read_again(
    stopped: Path, full_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Key] = []
    original = Views.__getitem__

    def note(self: Views, key: Key) -> View:
        if self.offsets is None:
            read.append(key)
        return original(self, key)  # type: ignore[return-value]

    assert checkpoint(stopped)["part"]["batches"] == 1
    monkeypatch.setattr(Views, "__getitem__", note)
    resume(stopped)
    assert len(read) == 1437 - 600
    assert {epoch for epoch, _ in read} == {2}
    assert same_end(stopped, full_run)


def test_readers_and_threads_may_change(tmp_path: Path, classes: Make) -> None:
    settings = Settings(
        data=str(classes()), model="cnn:4", epochs=2, batch_size=5, micro_batch=2, threads=1, pad=1
    )
    train(dataclasses.replace(settings, out=tmp_path / "whole"))
    with pytest.raises(Interrupted):
        train(dataclasses.replace(settings, out=tmp_path / "run", workers=1), Stopped(13))
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    resume(tmp_path / "run", {"workers": 0, "checkpoint_minutes": 0.0, "device": "cpu"})
    assert same_end(tmp_path / "run", tmp_path / "whole")
    shown = Stopped()
    assert resume(tmp_path / "other", {"threads": 2}, shown).threads == 2
    assert any(said.startswith("warning: threads was 1 and is 2; the run") for said in shown.said)


def test_broken_files_are_counted_over_all_parts(tmp_path: Path, classes: Make) -> None:
    folder = classes(count=10)
    for name in ("dark/0.png", "bright/3.png"):
        (folder / name).write_bytes((folder / name).read_bytes()[:200])
    settings = Settings(
        data=str(folder), model="cnn:2", epochs=3, batch_size=6, micro_batch=4, threads=1
    )
    settings = dataclasses.replace(settings, skip_corrupt=True, image_size=(12, 12))
    unbroken = train(dataclasses.replace(settings, out=tmp_path / "whole"))
    with pytest.raises(Interrupted):
        train(dataclasses.replace(settings, out=tmp_path / "run"), Stopped(8))
    summary = resume(tmp_path / "run")
    assert same_end(tmp_path / "run", tmp_path / "whole")
    assert (summary.skipped, summary.images) == (unbroken.skipped, unbroken.images) == (2, 3 * 14)


def test_the_log_and_the_events_are_cut_back(stopped: Path, full_run: Path) -> None:
    with (stopped / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "epoch": 2, "step": 5, "loss": 9.0}\n')
        file.write('{"kind": "epoch", "epoch": 2, "step": 6}\n')
        file.write('{"kind": "step", "epoch": 2, "st')
    late = RunLog(stopped)
    late.start_events(4)
    late.write({"kind": "step", "step": 5, "loss": 9.0})
    late.close()
    resume(stopped)
    assert rows(stopped) == rows(full_run)
    events = EventAccumulator(str(stopped))
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("step/loss")]
    logged = [(row["step"], row["loss"]) for row in rows(full_run) if row["kind"] == "step"]
    assert losses == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in logged]
    epochs = [event.step for event in events.Scalars("epoch/test_loss")]
    assert epochs == [3, 6]


def test_only_complete_lines_up_to_the_checkpoint_count() -> None:
    step = [b'{"kind": "step", "step": %d}' % number for number in (1, 2, 3)]
    epoch = [b'{"kind": "epoch", "epoch": %d, "step": 2}' % number for number in (1, 2)]
    text = b"\n".join([step[0], b"\0\0\0", step[1], b"[]", epoch[0], b"{}", step[2], epoch[1][:9]])
    assert lines_until(text, 2, 1) == [step[0], step[1], epoch[0]]
    assert lines_until(text, 2, 0) == [step[0], step[1]]  # killed between the two files
    assert lines_until(b"", 2, 1) == []


def test_a_run_that_died_before_its_report_was_written_writes_it(
    tmp_path: Path, full_run: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(full_run, run)
    written = json.loads((run / "summary.json").read_text())
    (run / "report.html").rename(run / ".report.html.part")
    (run / "summary.json").write_text(json.dumps({**written, "report": None}))
    summary = resume(run)
    assert (summary.steps, summary.resumed) == (written["steps"], written["resumed"] + 1)
    assert (run / "report.html").exists()
    assert not list(run.glob(".*.part"))


def test_a_run_that_came_to_its_end_is_not_changed(
    full_run: Path, command: Callable[..., Result]
) -> None:
    before = {at.name: at.read_bytes() for at in full_run.iterdir()}
    shown = Stopped()
    summary = resume(full_run, progress=shown)
    assert shown.said == [f"the run in {full_run} came to its end; there is nothing to resume"]
    assert dataclasses.asdict(summary).items() <= json.loads(before["summary.json"]).items()
    ended = command("train", "--resume", full_run)
    assert ended.exit_code == 0
    assert "there is nothing to resume" in ended.stdout
    longer = command("train", "--resume", full_run, "--epochs", 4)
    assert longer.exit_code == 1
    assert "a resumed run keeps its settings: epochs was 2, got 4. Leave the opt" in longer.stderr
    assert {at.name: at.read_bytes() for at in full_run.iterdir()} == before


@pytest.mark.parametrize("part", [None, 0.0, 0.5, 0.999])
def test_a_run_that_ended_says_that_its_checkpoint_is_broken(
    part: float | None, full_run: Path, tmp_path: Path
) -> None:
    """It was "nothing to resume": its weights were lost in silence."""
    out = tmp_path / "run"
    shutil.copytree(full_run, out)
    text = (out / "checkpoint.pt").read_bytes()
    (out / "checkpoint.pt").unlink()
    if part is not None:
        (out / "checkpoint.pt").write_bytes(text[: int(part * len(text))])
    message = r"there is none\. Restore a copy" if part is None else r"must be a complete checkp"
    with pytest.raises(RunFolderError, match=message):
        resume(out)


def test_a_run_killed_after_its_last_checkpoint_gets_its_summary(
    full_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(full_run, out)
    (out / "summary.json").unlink()
    (out / "report.html").unlink()
    (out / ".summary.json.part").write_text("{")
    summary = resume(out)
    assert (summary.epochs, summary.steps, summary.resumed) == (2, 6, 1)
    assert same_end(out, full_run)
    assert (out / "report.html").exists()
    assert not list(out.glob(".*"))


def test_resume_by_command(stopped: Path, full_run: Path, command: Callable[..., Result]) -> None:
    same = ("--batch-size", 600, "--epochs", 2, "--out", stopped)
    ended = command("train", "--resume", stopped, *same, "--threads", 1)
    assert ended.exit_code == 0, ended.output
    assert "resumed after step 4, in epoch 2" in ended.stdout
    assert same_end(stopped, full_run)
    faults = ("--batch-size", 7, "--lr", 0.5, "--image-size", "9x8", "--out", "else", "--overwrite")
    refused = command("train", "--resume", stopped, *faults)
    assert refused.exit_code == 1
    assert refused.stderr == (
        "error: a resumed run keeps its settings: batch-size was 600, got 7; lr was 0.002, got "
        f"0.5; image-size was None, got 9x8; out was {stopped}, got else; overwrite was False, "
        "got True. Leave the option out, or start a new run with another --out.\n"
    )


def test_what_is_no_run_is_refused(tmp_path: Path, stopped: Path) -> None:
    with pytest.raises(RunFolderError, match=r"resume needs a run folder, .*No such file"):
        resume(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"none that can be read \(it is no JSON\). Give the"):
        resume(tmp_path)
    (stopped / "checkpoint.pt").unlink()
    with pytest.raises(RunFolderError, match=r"must hold a checkpoint to be resumed; there is non"):
        resume(stopped)


@pytest.mark.parametrize("part", [0.0, 0.001, 0.5, 0.999])
def test_a_broken_checkpoint_is_refused(part: float, stopped: Path) -> None:
    file = stopped / "checkpoint.pt"
    text = file.read_bytes()
    file.write_bytes(text[: int(part * len(text))])
    log = (stopped / "metrics.jsonl").read_bytes()
    with pytest.raises(RunFolderError, match=r"checkpoint.pt must be a complete checkpoint; it ca"):
        resume(stopped)
    assert (stopped / "metrics.jsonl").read_bytes() == log
    file.write_bytes(text)
    assert resume(stopped).epochs == 2


def change(folder: Path, name: str, value: Any, *path: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    inner = config
    for key in path:
        inner = inner[key]
    inner[name] = value
    (folder / "config.json").write_text(json.dumps(config))


def test_other_versions_are_said_or_refused(stopped: Path) -> None:
    state = checkpoint(stopped)
    torch.save({**state, "format": 0}, stopped / "checkpoint.pt")
    with pytest.raises(RunFolderError, match=r"must be of format 3 to be resumed; it is of forma"):
        resume(stopped)
    torch.save({**state, "model": {}}, stopped / "checkpoint.pt")
    with pytest.raises(
        RunFolderError, match=r"must be of the run's model and optimizer; .*Missing"
    ):
        resume(stopped)
    torch.save(state, stopped / "checkpoint.pt")
    change(stopped, "colour", "red", "settings")
    with pytest.raises(RunFolderError, match=r"must hold the settings of this version.*colour"):
        resume(stopped)
    config = json.loads((stopped / "config.json").read_text())
    del config["settings"]["colour"]
    (stopped / "config.json").write_text(json.dumps(config))
    change(stopped, "torch", "2.11.0", "versions")
    shown = Stopped()
    resume(stopped, progress=shown)
    assert shown.said[0].startswith(f"warning: torch was 2.11.0 and is {torch.__version__}; the r")


def test_other_data_are_refused(stopped: Path) -> None:
    change(stopped, "train_samples", 1500, "data")
    change(stopped, "lr", 0.5, "recipe")
    with pytest.raises(
        RunFolderError,
        match=r"needs the data and the recipe it had: lr was 0.5 and is 0.002; "
        r"train_samples was 1500 and is 1437. Restore them",
    ):
        resume(stopped)


def hold(path: Path, pipe: Any) -> None:
    lock = Lock(path)
    lock.take()
    pipe.send("held")
    pipe.recv()
    os._exit(0)  # without giving it back, as a process that is killed


@pytest.fixture
def held(stopped: Path) -> Iterator[Callable[[], None]]:
    """Let another process hold the folder; return what ends it."""
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=hold, args=(stopped, theirs))
    process.start()
    assert ours.recv() == "held"

    def end() -> None:
        if process.is_alive():
            ours.send("go")
            process.join()

    yield end
    end()
    ours.close()
    theirs.close()


def test_one_process_at_a_time(stopped: Path, full_run: Path, held: Callable[[], None]) -> None:
    again = dataclasses.replace(DIGITS, out=stopped, overwrite=True)
    for act in (lambda: resume(stopped), lambda: train(again)):
        with pytest.raises(RunFolderError, match=r"must not be in use; process \d+ is training"):
            act()
    held()
    assert (stopped / ".lock").exists()  # what says "in use" outlived the process; its lock did not
    resume(stopped)
    assert same_end(stopped, full_run)
    assert not (stopped / ".lock").exists()


def test_a_lock_whose_file_was_removed_meanwhile_is_acquired_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    real = os.open

    def open_and_lose(path: Path, flags: int, mode: int = 0o777) -> int:
        file = real(path, flags, mode)
        opened.append(file)
        if len(opened) == 1:  # its owner ends between our opening it and our lock
            Path(path).unlink()
        return file

    monkeypatch.setattr(os, "open", open_and_lose)
    lock = Lock(tmp_path)
    lock.take()
    assert len(opened) == 2
    assert (tmp_path / ".lock").read_text() == str(os.getpid())
    lock.take()
    lock.release()
    lock.release()
    assert not list(tmp_path.iterdir())


def test_a_line_waits_for_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RunLog(tmp_path)
    log.write({"kind": "step", "step": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", lambda file: (_ for _ in ()).throw(OSError(28, "No space")))
        with pytest.raises(OSError, match="No space"):
            log.write({"kind": "step", "step": 2})
    log.sync()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_a_failed_step_moves_neither_rng_states_nor_buffers() -> None:
    model = nn.BatchNorm1d(2)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    rng_state = torch.get_rng_state()
    with pytest.raises(ValueError, match="mine"), AtomicStep(model):
        model(torch.randn(3, 2))
        raise ValueError("mine")
    assert equal(dict(model.named_buffers()), before)
    assert torch.equal(torch.get_rng_state(), rng_state)
    with pytest.raises(ValueError, match="mine"), AtomicStep(model) as step:
        model(torch.randn(3, 2))
        step.done()
        raise ValueError("mine")
    assert model.num_batches_tracked == 1


def test_sigterm_is_an_interrupt_of_its_own_class(tmp_path: Path, full_run: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    out = tmp_path / "run"
    with pytest.raises(Interrupted) as caught, terminable():
        train(dataclasses.replace(DIGITS, out=out), Stopped(5, signal.SIGTERM))
    assert caught.value.terminated
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(Terminated), terminable():
        signal.raise_signal(signal.SIGTERM)
    resume(out)
    assert same_end(out, full_run)


def test_a_failed_run_goes_on_when_its_cause_is_gone(tmp_path: Path, classes: Make) -> None:
    folder = classes(count=10)
    settings = Settings(
        data=str(folder), model="cnn:2", epochs=3, batch_size=4, micro_batch=4, threads=1
    )
    train(dataclasses.replace(settings, out=tmp_path / "whole"))

    class Vandal(Stopped):
        def step(self, loss: float, held: Gauge | None = None) -> None:
            super().step(loss)
            if len(self.losses) == 2:
                for file in folder.rglob("*.png"):
                    file.write_bytes(b"")

    with pytest.raises(DataError, match=r"4 files cannot be read"):
        train(dataclasses.replace(settings, out=tmp_path / "run"), Vandal())
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped"]
    classes(count=10)
    assert resume(tmp_path / "run").stopped is None
    assert same_end(tmp_path / "run", tmp_path / "whole")


def test_an_unexpected_error_costs_one_step(tmp_path: Path, full_run: Path) -> None:
    class Broken(Stopped):
        def micro_batch(self, samples: int) -> None:
            self.done += 1
            if self.done == 5:
                raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        train(dataclasses.replace(DIGITS, out=tmp_path / "run"), Broken())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["stopped"], summary["steps"]) == ("ValueError: mine", 1)
    resume(tmp_path / "run")
    assert same_end(tmp_path / "run", full_run)


def test_settings_that_make_no_sense_are_refused_with_resume(stopped: Path) -> None:
    with pytest.raises(SettingsError, match=r"threads must be at least 1; got 0"):
        resume(stopped, {"threads": 0})
    with pytest.raises(SettingsError, match=r"checkpoint-minutes must not be negative; got -1"):
        resume(stopped, {"checkpoint_minutes": -1})
