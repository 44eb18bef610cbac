"""Record of a run or of a plan: all data that a page is made from, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from anybatch import Plan
from anybatch.cli import progress
from anybatch.cli.faults import RunFolderError
from anybatch.cli.report.history import Envelope, RunHistory
from anybatch.cli.settings import Settings

NONE = RunHistory()
"""The log of a plan without training."""


@dataclass(frozen=True)
class RunRecord:
    """A run, or a plan that nothing was trained by.

    `command`: which of the two. `config`: contents of config.json, written or not. `summary`:
    contents of summary.json; None for a plan, and for a run that has not ended. `history`: contents
    of the log; empty for a plan. `plan`: None where there is none. `step`: the planned step; None
    where it was not foreseen or is not saved. `notes`: missing parts and reasons, a sentence each.
    """

    command: Literal["train", "plan"]
    config: Mapping[str, Any]
    summary: Mapping[str, Any] | None = None
    history: RunHistory = NONE
    plan: Plan | None = None
    step: Envelope | None = None
    notes: tuple[str, ...] = ()

    def part(self, name: str) -> Mapping[str, Any]:
        """Return a part of the config, empty where it is missing or no mapping."""
        found = self.config.get(name)
        return found if isinstance(found, dict) else {}

    @property
    def ranks(self) -> int:
        """How many processes train together."""
        found = self.part("process").get("ranks", 1)
        return found if isinstance(found, int) else 1

    @property
    def words(self) -> str:
        """The command that does the same, with the options that are not as they are by default."""
        start = f"torchrun --nproc-per-node={self.ranks} -m anybatch" if self.ranks > 1 else ""
        words = [*(start or "anybatch").split(), self.command, *self._options()]
        return shlex.join(words)

    def _options(self) -> Iterator[str]:
        settings = self.part("settings")
        for field in dataclasses.fields(Settings):
            value, name = settings.get(field.name), field.name.replace("_", "-")
            if field.name not in settings or value == field.default:
                continue
            if isinstance(value, bool):
                yield f"--{name}" if value else f"--no-{name}"
            elif field.name == "image_size" and isinstance(value, list | tuple):
                yield from (f"--{name}", "x".join(map(str, reversed(value))))
            else:
                yield from (f"--{name}", str(value))


# Record of a run folder for a page: its files read again, and notes on missing ones.
#
# A report is made at the end of a run, and at any time on request: of a run in progress, of one
# that was killed, of one that an older version wrote. So only config.json must exist; the page
# lists all other missing parts.

STEP = "timeline.json"
"""The planned step, as an `Envelope`."""


def record_of(folder: Path, summary: Mapping[str, Any] | None = None) -> RunRecord:
    """Return the record of the run in a folder.

    `folder`: of the run. `summary`: how it ended, where summary.json does not say so yet. Default
    None: it does, or the run has not ended.

    Raises:
        RunFolderError: it is no run folder.
    """
    config, notes = _config(folder), list[str]()
    if summary is None:
        summary = _summary(folder, notes)
    try:
        text = (folder / progress.NAME).read_bytes()
    except FileNotFoundError:
        text = b""
    except OSError as error:
        text = b""
        notes.append(f"{progress.NAME} cannot be read: {error.strerror}.")
    plan, step = _plan(folder, notes), _step(folder, notes)
    if step is None and plan is not None and plan.memory is not None and not notes:
        notes.append("The timeline of the planned step was not stored, so it is not drawn here.")
    return RunRecord("train", config, summary, RunHistory.of(text), plan, step, notes=tuple(notes))


def _config(folder: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text())
        reason = "" if isinstance(found, dict) else "it is no JSON object"
    except OSError as error:
        reason = str(error.strerror)
    except ValueError:
        reason = "it is no JSON"
    if reason:
        raise RunFolderError(
            f"a report needs a run folder, with a config.json; {folder} has none that can be read "
            f"({reason}). Give the folder that a training named."
        )
    return dict(found)


def _summary(folder: Path, notes: list[str]) -> Mapping[str, Any] | None:
    text = _text(folder / "summary.json", notes)
    try:
        found = None if text is None else json.loads(text)
    except ValueError:
        found = text
    if found is None or isinstance(found, dict):
        return found
    notes.append("summary.json is not in the form that a run writes, so its end is unknown.")
    return None


def _plan(folder: Path, notes: list[str]) -> Plan | None:
    text = _text(folder / "plan.json", notes)
    try:
        return None if text is None else Plan.from_json(text)
    except ValueError as error:
        notes.append(f"plan.json cannot be explained by this version: {error}.")
        return None


def _step(folder: Path, notes: list[str]) -> Envelope | None:
    text = _text(folder / STEP, notes)
    try:
        return None if text is None else Envelope.from_json(text)
    except ValueError as error:
        notes.append(f"{STEP} cannot be drawn by this version: {error}.")
        return None


def _text(path: Path, notes: list[str]) -> str | None:
    """Return the text of a file; None, and a note, where it cannot be read."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}.")
    except ValueError:
        notes.append(f"{path.name} is no text.")
    return None
