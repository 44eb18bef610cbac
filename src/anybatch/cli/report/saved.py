"""Record of a run folder for a page: its files read again, and notes on missing ones.

A report is made at the end of a run, and at any time on request: of a run in progress, of one that
was killed, of one that an older version wrote. So only config.json must exist; the page lists all
other missing parts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anybatch import Plan
from anybatch.cli import log
from anybatch.cli.faults import RunFolderError
from anybatch.cli.report.envelope import Envelope
from anybatch.cli.report.history import RunHistory
from anybatch.cli.report.record import RunRecord

STEP = "timeline.json"
"""The planned step, as an `Envelope`."""


def record_of(folder: Path, summary: Mapping[str, Any] | None = None) -> RunRecord:
    """Return the record of the run in a folder.

    Args:
        folder: of the run.
        summary: how it ended, where summary.json does not say so yet. Default None: it does, or
            the run has not ended.

    Raises:
        RunFolderError: it is no run folder.
    """
    config, notes = _config(folder), list[str]()
    if summary is None:
        summary = _summary(folder, notes)
    try:
        text = (folder / log.NAME).read_bytes()
    except FileNotFoundError:
        text = b""
    except OSError as error:
        text = b""
        notes.append(f"{log.NAME} cannot be read: {error.strerror}.")
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
