"""Run folder: all files of a run, written so that no accident loses earlier ones.

    config.json     the settings, the recipe and what was found in the data
    metrics.jsonl   a line for each step and each epoch, written at once
    plan.json       how the engine divided the batch
    checkpoint.pt   all that the run needs to go on: see `checkpoint`
    summary.json    how it ended
    timeline.json   the planned step, where one was foreseen, and
    timeline.png    the same as a picture, where matplotlib is installed
    curves.png      loss and metric over the epochs, where matplotlib is installed
    events.out.*    the same for TensorBoard, where it is installed
    report.html     all of this as a page

Each is complete or missing (`files`).
"""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from anybatch.cli import lock, log
from anybatch.cli.curves import EpochRow, draw_curves
from anybatch.cli.earlier import Earlier
from anybatch.cli.faults import MissingExtraError, RunFolderError
from anybatch.cli.files import CHECKPOINT, Files
from anybatch.cli.interrupts import unbroken
from anybatch.cli.picture import draw_step
from anybatch.cli.report import saved, write
from anybatch.cli.report.envelope import Envelope
from anybatch.cli.report.page import page_of
from anybatch.reports import StepTimeline

NAMES = (
    *("config.json", "metrics.jsonl", "plan.json", CHECKPOINT, "summary.json", "curves.png"),
    *("timeline.png", saved.STEP, write.NAME),
)
EVENTS = "events.out.tfevents."
ABSENT = "not installed: pip install 'anybatch[{}]'"


class RunFolder:
    """The run folder at `path`; None writes nothing.

    With `resumed` the run that is in it goes on: `lock`, then `reopen`; else `open`.

    Raises:
        RunFolderError: when `path` is a file, or holds anything and `overwrite` is False.
    """

    def __init__(
        self, path: Path | None, *, overwrite: bool = False, resumed: bool = False
    ) -> None:
        self.path = path
        self.epochs: list[EpochRow] = []
        self.extras: dict[str, str] = {}
        self._opened = False
        if path is None:
            return
        self._earlier = Earlier(path, _is_ours)
        self._lock = lock.Lock(path)
        self._log = log.RunLog(path)
        self._files = Files(path)
        if path.exists() and not path.is_dir():
            raise RunFolderError(f"out must be a folder; {str(path)!r} is a file. Choose another.")
        if resumed or overwrite or not path.is_dir():
            return
        if any(at.name != lock.NAME for at in path.iterdir()):
            raise RunFolderError(
                f"out must be a new or an empty folder; {str(path)!r} holds files already. Choose "
                "another, use --resume to go on with the run in it, or --overwrite to replace it."
            )

    def lock(self) -> None:
        """Keep other processes out until `release`.

        Raises:
            RunFolderError: when another process trains here, or nothing can be written.
        """
        if self.path is None:
            return
        try:
            self._lock.take()
        except OSError as error:
            raise RunFolderError(f"{self.path} cannot be written: {error.strerror}.") from error

    def release(self) -> None:
        """Let other processes in."""
        if self.path is not None:
            self._lock.release()

    def open(self, config: Mapping[str, Any]) -> None:
        """Make the folder, set the files of an earlier run aside, and write config.json.

        They are there until `keep`. Other files than those of a run are not changed.
        """
        if self.path is None:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock()
            with unbroken():
                self._earlier.set_aside()
        except OSError as error:
            raise RunFolderError(f"{self.path} cannot be written: {error.strerror}.") from error
        self._opened = True
        self.write_json("config.json", config)
        self._start_events(None)

    def reopen(self, step: int, epoch: int) -> list[dict[str, Any]]:
        """Cut the log back to a checkpoint's `step` and `epoch`; return the epochs' lines."""
        if self.path is None:
            return []
        self._opened = True
        for part in self.path.glob(".*.part"):
            part.unlink(missing_ok=True)
        at = self.path / log.NAME
        text = at.read_bytes() if at.exists() else b""
        lines = log.lines_until(text, step, epoch)
        self._replace(log.NAME, lambda file: file.write(b"".join(line + b"\n" for line in lines)))
        if step:
            self.keep()
        self._start_events(step)
        rows = [row for row in map(json.loads, lines) if row["kind"] == "epoch"]
        self.epochs = [EpochRow.of(row) for row in rows]
        return rows

    def has(self, name: str) -> bool:
        """Return whether the file `name` is there."""
        return self.path is not None and (self.path / name).exists()

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write `content` as the JSON file `name`."""
        self.write_text(name, json.dumps(content, indent=2) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write the text file `name`."""
        self._replace(name, lambda file: file.write(text.encode()))

    def draw_step(self, step: StepTimeline | None) -> None:
        """Keep the planned step, as data and as timeline.png; None, not foreseen, keeps nothing."""
        if self.path is None or step is None:
            return
        self.write_text(saved.STEP, Envelope.of(step).to_json() + "\n")
        try:
            picture = draw_step(step)
        except MissingExtraError:
            self.extras["timeline"] = ABSENT.format("report")
            return
        self._replace("timeline.png", lambda file: file.write(picture))

    @property
    def timeline(self) -> str | None:
        """Name of the picture of the planned step, or why there is none; None without a plan."""
        there = self.has("timeline.png")
        return "timeline.png" if there else self.extras.get("timeline")

    @property
    def report(self) -> str | None:
        """Name of the page about the run, or why there is none; None before the run has ended."""
        return self.extras.get("report")

    def _draw_curves(self) -> str:
        """Draw the curves; return the picture's name, or why there is none; nothing is raised."""
        if not self.epochs:
            return "not drawn: no epoch has ended"
        try:
            picture = draw_curves(self.epochs)
            self._replace("curves.png", lambda file: file.write(picture))
        except MissingExtraError:
            return ABSENT.format("report")
        except Exception as error:
            return f"not drawn: {_first_line(error)}"
        return "curves.png"

    def _write_report(self, summary: Mapping[str, Any]) -> str:
        """Write the page about the run; return its name, or why there is none.

        A fault in it is no fault of the run: nothing is raised.
        """
        assert self.path is not None
        try:
            text = page_of(saved.record_of(self.path, summary))
            self.write_text(write.NAME, text)
        except Exception as error:
            return f"not written: {_first_line(error)}; anybatch report {self.path} writes it"
        return write.NAME

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Write checkpoint.pt; when it is there, so is every line logged before it."""
        if self.path is None:
            return
        with self._files.failing(log.NAME):
            self._log.sync()
        self._replace(CHECKPOINT, lambda file: torch.save(dict(state), file))

    def load_checkpoint(self) -> dict[str, Any]:
        """Return the contents of checkpoint.pt, on the host.

        Raises:
            RunFolderError: when there is none, or it is broken.
        """
        assert self.path is not None
        try:
            found = torch.load(self.path / CHECKPOINT, map_location="cpu", weights_only=True)
        except FileNotFoundError as error:
            raise RunFolderError(
                f"{self.path} must hold a checkpoint to be resumed; there is none: the run ended "
                "before it began. Start it again, with --overwrite."
            ) from error
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
            raise RunFolderError(
                f"{self.path / CHECKPOINT} must be a complete checkpoint; it cannot be read "
                f"({_first_line(error)}). Restore a copy of it, or start again with --overwrite."
            ) from error
        return dict(found)

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl and to the TensorBoard events."""
        if record["kind"] == "epoch":
            self.epochs.append(EpochRow.of(record))
        if self.path is not None:
            with self._files.failing(log.NAME):
                self._log.write(record)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, then curves and report, and their outcome into summary.json."""
        if self.path is None or not self._opened:
            return
        self.write_json("summary.json", {**summary, **self.extras})  # whatever comes after it
        with self._files.failing(f"{EVENTS}*"):
            self._log.close()
        self.extras["curves"] = self._draw_curves()
        self.extras["report"] = self._write_report(summary)
        self.write_json("summary.json", {**summary, **self.extras})

    def keep(self) -> None:
        """Remove the earlier run, after a step of this one."""
        if self.path is not None and self._opened:
            try:
                self._earlier.drop()
            except OSError as error:
                raise RunFolderError(
                    f"the earlier run in {self.path} cannot be removed: {error.strerror}. "
                    "Remove the folder .earlier.removing in it by hand."
                ) from error

    def replaces(self) -> bool:
        """Return whether an earlier run is set aside and can still be restored."""
        return self.path is not None and self._opened and self._earlier.waits()

    def give_way(self) -> None:
        """Restore the earlier run, if no step was completed since; called at the end of a run."""
        if self.replaces():
            self.discard()

    def discard(self) -> None:
        """Remove the files of this run and restore the earlier run; an empty folder is removed."""
        if self.path is None or not self._opened:
            return
        with contextlib.suppress(OSError):
            self._log.close()
        self._earlier.remove_new()
        self._earlier.restore()
        self.release()
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def _start_events(self, after_step: int | None) -> None:
        with self._files.failing(f"{EVENTS}*"):
            there = self._log.start_events(after_step)
        self.extras["tensorboard"] = f"{EVENTS}*" if there else ABSENT.format("tensorboard")

    def _replace(self, name: str, write: Callable[[IO[bytes]], object]) -> None:
        if self.path is not None:
            self._files.replace(name, write)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__


def _is_ours(name: str) -> bool:
    return name in NAMES or name.startswith(EVENTS) or (name[:1] == "." and name.endswith(".part"))
