"""Run folder: all files of a run, written so that no accident loses earlier ones.

    config.json     the settings, the recipe and what was found in the data
    metrics.jsonl   a line for each step and each epoch, written at once
    plan.json       how the engine divided the batch
    checkpoint.pt   all that the run needs to go on: see `checkpoint`
    summary.json    how it ended
    timeline.json   the planned step, where one was foreseen
    events.out.*    metrics.jsonl for TensorBoard, where it is installed
    report.html     all of this as a page

Each is complete or missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from anybatch.cli import progress
from anybatch.cli.faults import RunFolderError, unbroken
from anybatch.cli.report import record as saved
from anybatch.cli.report import write
from anybatch.cli.report.history import Envelope
from anybatch.cli.report.write import page_of
from anybatch.reports import StepTimeline

# Files of a run, each complete or absent, and the error where one cannot be written.
#
# `torch.save` to the final name leaves half a file when the disk is full or the process dies. Here
# a file is written next to its place, forced to the disk, and then takes the old one's name in one
# step (os.replace), so the old one is complete until the new one is.
#
#     .NAME.part ──written, forced to the disk──> NAME

CHECKPOINT = "checkpoint.pt"
"""Files from which a run is resumed."""


class Files:
    """The files in the run folder `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def replace(self, name: str, write: Callable[[IO[bytes]], object]) -> None:
        """Write a file under a temporary name, then give it its own.

        Raises:
            RunFolderError: it cannot be written; the existing one is complete.
        """
        temporary = self.path / f".{name}.part"
        try:
            with self.failing(name):
                with temporary.open("wb") as file:
                    write(file)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(self.path / name)
                _sync_folder(self.path)
        finally:
            temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def failing(self, name: str) -> Iterator[None]:
        """Convert the system's error in a block into one that names the remedy for `name`."""
        try:
            yield
        except (OSError, RuntimeError) as error:  # torch.save wraps the system's error
            found: BaseException | None = error
            while found is not None and not isinstance(found, OSError):
                found = found.__context__
            reason = found.strerror if isinstance(found, OSError) else str(error)
            raise RunFolderError(
                f"{name} cannot be written to {self.path}: {reason}. {self._what_is_there()}"
            ) from error

    def _what_is_there(self) -> str:
        if not (self.path / CHECKPOINT).exists():
            return "No step is kept yet; make room, then start the run again."
        return f"What was written before is whole; make room, then go on with --resume {self.path}."


def _sync_folder(path: Path) -> None:
    """Force the names in a folder to the disk: that a file took another's name is one of them."""
    if os.name == "posix":
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


NAMES = (
    *("config.json", "metrics.jsonl", "plan.json", CHECKPOINT, "summary.json", saved.STEP),
    write.NAME,
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
        self.extras: dict[str, str] = {}
        self._opened = False
        if path is None:
            return
        self._earlier = Earlier(path, _is_ours)
        self._lock = Lock(path)
        self._log = progress.RunLog(path)
        self._files = Files(path)
        if path.exists() and not path.is_dir():
            raise RunFolderError(f"out must be a folder; {str(path)!r} is a file. Choose another.")
        if resumed or overwrite or not path.is_dir():
            return
        if any(at.name != NAME for at in path.iterdir()):
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
        at = self.path / progress.NAME
        text = at.read_bytes() if at.exists() else b""
        lines = progress.lines_until(text, step, epoch)
        self._replace(
            progress.NAME, lambda file: file.write(b"".join(line + b"\n" for line in lines))
        )
        if step:
            self.keep()
        self._start_events(step)
        return [row for row in map(json.loads, lines) if row["kind"] == "epoch"]

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write `content` as the JSON file `name`."""
        self.write_text(name, json.dumps(content, indent=2) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write the text file `name`."""
        self._replace(name, lambda file: file.write(text.encode()))

    def keep_step(self, step: StepTimeline | None) -> None:
        """Keep the planned step as data; None, not foreseen, keeps nothing."""
        if step is not None:
            self.write_text(saved.STEP, Envelope.of(step).to_json() + "\n")

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
        with self._files.failing(progress.NAME):
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
                f"{self.path} must hold a checkpoint to be resumed; there is none. Restore a copy "
                "of it, or start again with --overwrite."
            ) from error
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
            raise RunFolderError(
                f"{self.path / CHECKPOINT} must be a complete checkpoint; it cannot be read "
                f"({_first_line(error)}). Restore a copy of it, or start again with --overwrite."
            ) from error
        return dict(found)

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl and to the TensorBoard events."""
        if self.path is not None:
            with self._files.failing(progress.NAME):
                self._log.write(record)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, then the report, and its outcome into summary.json."""
        if self.path is None or not self._opened:
            return
        self.write_json("summary.json", {**summary, **self.extras})  # whatever comes after it
        with self._files.failing(f"{EVENTS}*"):
            self._log.close()
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


# One process at a time in a run folder.
#
# Two processes that write one run folder mix their lines and overwrite each other's checkpoint. A
# file that merely says "in use" remains after `kill -9`. A lock of the system's ends with the
# process. It is a record lock (fcntl's lockf): one of flock's would live on in the processes that
# read images, which are forked from this one and outlive it for some seconds.
#
# The file is removed when the run ends. Another process may have opened it just before, so a
# process that gets the lock checks that the name still belongs to the locked file.

if sys.platform != "win32":
    import fcntl

NAME = ".lock"


class Lock:
    """Lock of the run folder `path`: `take` acquires it, `release` frees it."""

    def __init__(self, path: Path) -> None:
        self.path = path / NAME
        self._file: int | None = None

    def take(self) -> None:
        """Take the lock.

        Raises:
            RunFolderError: when another living process has it.
        """
        if sys.platform == "win32" or self._file is not None:
            return
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                owner = os.read(file, 20).decode(errors="replace")
                os.close(file)
                if not isinstance(error, BlockingIOError | PermissionError):
                    raise
                raise RunFolderError(
                    f"{self.path.parent} must not be in use; process {owner or 'unknown'} is "
                    "training in it. Wait for its end, or stop it."
                ) from error
            if self._is_named(file):
                self._file = file
                with contextlib.suppress(OSError):  # on a full disk the lock holds without a name
                    os.ftruncate(file, 0)
                    os.write(file, str(os.getpid()).encode())
                return
            os.close(file)

    def release(self) -> None:
        """Give the lock back, if it is held, and remove its file."""
        if self._file is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def _is_named(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), self.path.stat())
        except FileNotFoundError:
            return False


# Earlier run under `--overwrite`: set aside, and removed only after a step of the new run.
#
# A run that is wrong (no such model, a batch that does not fit) fails before its first step. Were
# the old files removed at the start, a mistyped word would cost a trained model. They are renamed
# into a folder next to them, which costs nothing and loses nothing, and either removed or renamed
# back.
#
#     RUN/.earlier.moving     on its way in or out: what lies here and in RUN is one run
#     RUN/.earlier            complete; what lies in RUN has not taken a step
#     RUN/.earlier.removing   of no more use
#
# A folder's own name changes in one step (os.replace), so a process that is killed at any point
# leaves one of these three, and the next run with `--overwrite` continues from there.


class Earlier:
    """Files of an earlier run in the folder `path`: those with a name that `ours` accepts."""

    def __init__(self, path: Path, ours: Callable[[str], bool]) -> None:
        self.path, self.ours = path, ours
        self._complete = path / ".earlier"
        self._moving = path / ".earlier.moving"
        self._removing = path / ".earlier.removing"

    def set_aside(self) -> None:
        """Move the run in the folder aside; one without a step, of a killed process, is removed."""
        shutil.rmtree(self._removing, ignore_errors=True)
        if self._moving.exists():
            self._move_back()
        if self._complete.exists():
            self.remove_new()
        elif any(self.found()):
            self._moving.mkdir()
            for file in list(self.found()):
                file.replace(self._moving / file.name)
            self._moving.replace(self._complete)

    def restore(self) -> None:
        """Put the earlier run, if there is one, in the place of the new one."""
        if self._complete.exists():
            self.remove_new()
            self._complete.replace(self._moving)
            self._move_back()

    def drop(self) -> None:
        """Remove the earlier run for good."""
        if self._complete.exists():
            self._complete.replace(self._removing)
            shutil.rmtree(self._removing)

    def waits(self) -> bool:
        """Return whether an earlier run is set aside."""
        return self._complete.exists()

    def remove_new(self) -> None:
        """Remove the files of the run in the folder."""
        for file in list(self.found()):
            file.unlink()

    def found(self) -> Iterator[Path]:
        """Yield the files of the run in the folder."""
        return (at for at in self.path.iterdir() if self.ours(at.name))

    def _move_back(self) -> None:
        for file in self._moving.iterdir():
            file.replace(self.path / file.name)
        self._moving.rmdir()
