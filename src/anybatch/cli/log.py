"""Log of a run: metrics.jsonl, with a line for each step and each epoch, and TensorBoard.

A line must exist once and complete if the checkpoint after it exists, after any interruption:

    the disk is full      the half line is taken off again and waits for room
    the power goes        a checkpoint is written only when all lines before it are on the disk
    the run is resumed    the lines after its checkpoint are cut off

TensorBoard has an answer of its own to the last: a new file that begins with the step from which on
older files do not count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anybatch.reports import StepReport

NAME = "metrics.jsonl"


class RunLog:
    """The log of the run in the folder `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path / NAME
        self._waiting = b""
        self._events: Any = None

    def start_events(self, after_step: int | None = None) -> bool:
        """Open the TensorBoard events, where it is installed; say whether it is.

        `after_step` is the last step of older files that counts; None where there are none.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return False
        purge = None if after_step is None else after_step + 1
        self._events = SummaryWriter(str(self.path.parent), purge_step=purge)
        return True

    def write(self, record: Mapping[str, Any]) -> None:
        """Append `record` to both.

        Raises:
            OSError: when metrics.jsonl cannot be written; the line waits for the next call.
        """
        self._waiting += json.dumps(record).encode() + b"\n"
        self._flush()
        if self._events is not None:
            for name, value in record.items():
                if isinstance(value, float):
                    self._events.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def sync(self) -> None:
        """Return when all that was written is on the disk.

        Raises:
            OSError: when it cannot be.
        """
        self._flush()
        if self._events is not None:
            self._events.flush()
        if self.path.exists():
            with self.path.open("ab") as file:
                os.fsync(file.fileno())

    def close(self) -> None:
        """Close the TensorBoard events."""
        if self._events is not None:
            self._events.close()
            self._events = None

    def _flush(self) -> None:
        if not self._waiting:
            return
        with self.path.open("ab", buffering=0) as file:
            old_length = os.fstat(file.fileno()).st_size
            try:
                left = self._waiting
                while left:
                    left = left[file.write(left) or 0 :]
            except OSError:
                file.truncate(old_length)
                raise
        self._waiting = b""


def step_row(
    at: Mapping[str, Any], report: StepReport, seconds: float, computed: float, waited: float
) -> dict[str, Any]:
    """Return the line of a step; of several ranks, micro-batches and bytes are those of rank 0.

    Args:
        at: the first field.
        report: of its micro-batches.
        seconds: of all of it but the wait.
        computed: seconds of them until the loss was there.
        waited: seconds for its mini-batch, before.
    """
    return {
        "kind": "step",
        **at,
        "samples": report.samples,
        "micro_batches": report.micro_batches,
        "peak_bytes": report.peak_bytes,
        "seconds": seconds,
        "computing_seconds": computed,
        "waiting_seconds": waited,
        "images_per_second": report.samples / max(seconds, 1e-9),
    }


def lines_until(text: bytes, step: int, epoch: int) -> list[bytes]:
    """Return the complete lines of a log up to and including `step` and `epoch`.

    A line cut short by the end of a process is no line. The lines of an epoch come after those of
    its steps, and may be missing though they are there.
    """
    return [line for line in text.splitlines() if _counts(line, step, epoch)]


def _counts(line: bytes, step: int, epoch: int) -> bool:
    try:
        record = json.loads(line)
        ends = record["kind"] == "step"
        return bool(record["step"] <= step if ends else record["epoch"] <= epoch)
    except (ValueError, KeyError, TypeError):
        return False
