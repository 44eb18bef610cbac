"""The working file: one line of JSON for each finished training, so that a table can be stopped.

A results file written at the end is lost with the run that was to write it. Here each outcome is
appended and forced to the disk as soon as it is there, keyed by its whole job, a dataclass; what is
read back is what need not be run again. A line that was cut off in the middle counts as not there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance as Job

Outcome = dict[str, Any]


class Working:
    """The finished trainings in the file at `path`, by job."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()
        self._found: dict[str, Outcome] = {}
        text = path.read_text() if path.exists() else ""
        for line in text.splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            self._found[_key(record["job"])] = record["outcome"]
        self._torn = bool(text) and not text.endswith("\n")

    def get(self, job: Job) -> Outcome | None:
        """Return the outcome of a job, None where it is not finished."""
        return self._found.get(_key(asdict(job)))

    def add(self, job: Job, outcome: Outcome) -> None:
        """Keep an outcome, on the disk before this returns."""
        record = asdict(job)
        line = json.dumps({"job": record, "outcome": outcome}) + "\n"
        with self._lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n" + line if self._torn else line)
                file.flush()
                os.fsync(file.fileno())
            self._torn = False
            self._found[_key(record)] = outcome


def busy_seconds(outcomes: Iterable[Outcome]) -> float:
    """Return for how long at least one of the trainings ran: what a table took, stops left out."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted((one["from"], one["to"]) for one in outcomes):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _key(record: dict[str, Any]) -> str:
    return json.dumps(record, sort_keys=True)
