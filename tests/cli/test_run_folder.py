from __future__ import annotations

import json
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from anybatch.cli.faults import RunFolderError
from anybatch.cli.run_folder import RunFolder

EPOCH = {
    "kind": "epoch",
    "epoch": 1,
    "step": 2,
    "metric": "accuracy",
    "train_loss": 0.5,
    "test_loss": 0.6,
    "train_accuracy": 0.7,
    "test_accuracy": 0.8,
}


@contextmanager
def largest_file(bytes_: int) -> Iterator[None]:
    """Let the system refuse to write more than `bytes_` to any file, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_folder_that_holds_anything_is_refused_unless_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "metrics.jsonl").write_text("old\n")
    with pytest.raises(
        RunFolderError, match=r"new or an empty folder; .*use --resume to go on .*--overw"
    ):
        RunFolder(tmp_path)
    folder = RunFolder(tmp_path, overwrite=True)
    assert (tmp_path / "metrics.jsonl").exists()  # nothing is lost before the run begins
    folder.open({"a": 1})
    assert not (tmp_path / "metrics.jsonl").exists()
    folder.discard()
    assert (tmp_path / "metrics.jsonl").read_text() == "old\n"
    folder.open({"a": 1})
    folder.keep()
    folder.release()
    assert sorted(at.name for at in tmp_path.iterdir() if "events" not in at.name) == [
        "config.json",
        "notes.txt",
    ]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(RunFolderError, match=r"out must be a folder; .*is a file"):
        RunFolder(tmp_path / "notes.txt")


def test_an_earlier_run_that_cannot_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "config.json").write_text("{}")
    folder = RunFolder(tmp_path, overwrite=True)
    folder.open({})
    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(RunFolderError, match=r"cannot be removed: Perm.*\.earlier\.removing in it"):
        folder.keep()


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "new" / "run")
    folder.open({"a": 1})
    folder.log({"kind": "step", "step": 1, "loss": 0.5})
    folder.log(EPOCH)
    folder.save_checkpoint({"model": {"w": torch.ones(3)}, "epoch": 4})
    folder.close({"best": 0.8})
    folder.release()
    at = tmp_path / "new" / "run"
    assert json.loads((at / "config.json").read_text()) == {"a": 1}
    lines = [json.loads(line) for line in (at / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"kind": "step", "step": 1, "loss": 0.5}, EPOCH]
    assert torch.load(at / "checkpoint.pt", weights_only=True)["epoch"] == 4
    summary = json.loads((at / "summary.json").read_text())
    assert summary == {
        "best": 0.8,
        "report": "report.html",
        "tensorboard": "events.out.tfevents.*",
    }
    assert len(list(at.glob("events.out.tfevents.*"))) == 1
    assert not list(at.glob(".*"))


def test_a_full_disk_does_not_lose_the_earlier_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.open({})
    folder.save_checkpoint({"epoch": 1, "weights": torch.ones(10)})
    earlier = (tmp_path / "checkpoint.pt").read_bytes()
    with (
        largest_file(20_000),
        pytest.raises(
            RunFolderError,
            match=r"checkpoint.pt cannot be written .*too large.*is whole; make room, then",
        ),
    ):
        folder.save_checkpoint({"epoch": 2, "weights": torch.ones(100_000)})
    assert (tmp_path / "checkpoint.pt").read_bytes() == earlier
    assert not list(tmp_path.glob(".*.part"))
    with largest_file(0), pytest.raises(RunFolderError, match=r"metrics.jsonl cannot be written"):
        folder.log({"kind": "step", "step": 1})


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"run cannot be written: Not a directory"):
        RunFolder(tmp_path / "file" / "run").open({})


def test_a_report_that_fails_costs_neither_the_run_nor_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended() -> dict[str, Any]:
        found: dict[str, Any] = json.loads((tmp_path / "summary.json").read_text())
        return found

    folder = RunFolder(tmp_path)
    folder.open({})
    folder.log(EPOCH)
    with largest_file(4_000):
        folder.close({"best": 0.6})
    assert ended()["report"].startswith("not written: report.html cannot be written")
    assert ended()["best"] == 0.6
    assert not (tmp_path / "report.html").exists()
    assert not list(tmp_path.glob(".*.part"))

    def broken(*_: object) -> str:
        raise ZeroDivisionError("no ink.")

    monkeypatch.setattr("anybatch.cli.run_folder.page_of", broken)
    folder.close({"best": 0.7})
    assert ended()["report"].startswith("not written: no ink; anybatch report ")
    assert ended()["best"] == 0.7

    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder._log, "close", full)
    with pytest.raises(RunFolderError, match=r"events.* cannot be written .*No space left"):
        folder.close({"best": 0.8})
    assert ended()["best"] == 0.8


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(None)
    folder.open({})
    folder.log(EPOCH)
    folder.save_checkpoint({})
    folder.write_text("plan.json", "{}")
    folder.close({})
    assert not list(tmp_path.iterdir())


def test_missing_extras_are_said_in_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    folder = RunFolder(tmp_path)
    folder.open({})
    folder.log(EPOCH)
    folder.close({})
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "tensorboard": "not installed: pip install 'anybatch[tensorboard]'",
        "report": "report.html",
    }
