"""A run folder: everything a run leaves behind, written so that no accident loses what was there.

    config.json     the settings, the recipe and what was found in the data
    metrics.jsonl   a line for each step and each epoch, flushed at once
    plan.json       how the engine divided the batch
    checkpoint.pt   model, optimizer, schedule, epoch, step
    summary.json    how it ended
    curves.png      loss and metric over the epochs, where matplotlib is installed
    events.out.*    the same for TensorBoard, where it is installed

`torch.save` to the final name leaves half a file when the disk is full or the process dies. Here a
file is written beside its place, forced to the disk, and then takes the old one's name in one step
(os.replace), so the old one is whole until the new one is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from anybatch.apps.curves import EpochRow, draw_curves
from anybatch.apps.earlier import Earlier
from anybatch.apps.faults import RunFolderError
from anybatch.apps.interrupts import unbroken

NAMES = (
    *("config.json", "metrics.jsonl", "plan.json", "checkpoint.pt", "summary.json", "curves.png"),
)
EVENTS = "events.out.tfevents."
ABSENT = "not installed: pip install 'anybatch[{}]'"


class RunFolder:
    """The run folder at `path`; None writes nothing.

    Raises:
        RunFolderError: when `path` is a file, or holds anything and `overwrite` is False.
    """

    def __init__(self, path: Path | None, *, overwrite: bool = False) -> None:
        self.path = path
        self.epochs: list[EpochRow] = []
        self.extras: dict[str, str] = {}
        self._events: Any = None
        self._opened = False
        if path is None:
            return
        self._earlier = Earlier(path, _is_ours)
        if path.exists() and not path.is_dir():
            raise RunFolderError(f"out must be a folder; {str(path)!r} is a file. Choose another.")
        if path.is_dir() and any(path.iterdir()) and not overwrite:
            raise RunFolderError(
                f"out must be a new or an empty folder; {str(path)!r} holds files already. "
                "Choose another, or use --overwrite to replace the run in it."
            )

    def open(self, config: Mapping[str, Any]) -> None:
        """Make the folder, set the files of an earlier run aside, and write config.json.

        They are there until `keep`. Files that no run writes are left alone.
        """
        if self.path is None:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with unbroken():
                self._earlier.set_aside()
        except OSError as error:
            raise RunFolderError(f"{self.path} cannot be written: {error.strerror}.") from error
        self._opened = True
        self.write_json("config.json", config)
        self._start_events()

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write `content` as the JSON file `name`."""
        self.write_text(name, json.dumps(content, indent=2) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write the text file `name`."""
        self._replace(name, lambda file: file.write(text.encode()))

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Write checkpoint.pt, readable by `torch.load(path, weights_only=True)`."""
        self._replace("checkpoint.pt", lambda file: torch.save(dict(state), file))

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl and to the TensorBoard events."""
        if record["kind"] == "epoch":
            self.epochs.append(EpochRow.of(record))
        if self.path is None:
            return
        try:
            with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise self._failed("metrics.jsonl", error) from error
        if self._events is not None:
            for name, value in record.items():
                if isinstance(value, float):
                    self._events.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def close(self, summary: Mapping[str, Any]) -> None:
        """Draw the curves and write summary.json, which says what was left out."""
        if self._events is not None:
            self._events.close()
        if self.path is None or not self._opened:
            return
        try:
            drawn = draw_curves(self.epochs, self.path / "curves.png")
        except OSError as error:
            raise self._failed("curves.png", error) from error
        self.extras["curves"] = "curves.png" if drawn else ABSENT.format("report")
        self.write_json("summary.json", {**summary, **self.extras})

    def keep(self) -> None:
        """Remove the earlier run: this one has taken a step."""
        if self.path is not None and self._opened:
            try:
                self._earlier.drop()
            except OSError as error:
                raise RunFolderError(
                    f"the earlier run in {self.path} cannot be removed: {error.strerror}. "
                    "Remove the folder .earlier.removing in it by hand."
                ) from error

    def replaces(self) -> bool:
        """Return whether an earlier run is set aside and can still be put back."""
        return self.path is not None and self._opened and self._earlier.waits()

    def give_way(self) -> None:
        """Put the earlier run back, if no step was taken since; what ends a run calls this."""
        if self.replaces():
            self.discard()

    def discard(self) -> None:
        """Remove what was written and put the earlier run back; an empty folder is removed."""
        if self._events is not None:
            self._events.close()
        if self.path is not None and self._opened:
            self._earlier.remove_new()
            self._earlier.restore()
            if not any(self.path.iterdir()):
                self.path.rmdir()

    def _start_events(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.extras["tensorboard"] = ABSENT.format("tensorboard")
            return
        self._events = SummaryWriter(str(self.path))
        self.extras["tensorboard"] = "events.out.tfevents.*"

    def _replace(self, name: str, write: Callable[[IO[bytes]], object]) -> None:
        """Write a file under a temporary name, then give it its own."""
        if self.path is None:
            return
        beside = self.path / f".{name}.part"
        try:
            with beside.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self.path / name)
        except (OSError, RuntimeError) as error:  # torch.save wraps the system's error
            raise self._failed(name, error) from error
        finally:
            beside.unlink(missing_ok=True)

    def _failed(self, name: str, error: Exception) -> RunFolderError:
        found: BaseException | None = error
        while found is not None and not isinstance(found, OSError):
            found = found.__context__
        reason = found.strerror if isinstance(found, OSError) else str(error)
        return RunFolderError(
            f"{name} cannot be written to {self.path}: {reason}. "
            "What was written before is whole; make room and start again."
        )


def _is_ours(name: str) -> bool:
    return name in NAMES or name.startswith(EVENTS) or (name[:1] == "." and name.endswith(".part"))
