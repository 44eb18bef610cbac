"""How far a run is: a live line on a terminal, plain lines in a log, or nothing.

A mini-batch of many micro-batches takes long, so the count that moves is that of micro-batches,
fed by the engine's `observe`. rich draws the bar; where there is no terminal a bar is noise, and a
line is printed for each epoch and, in a long one, every ten seconds.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

from anybatch.units import show_seconds

if TYPE_CHECKING:
    from anybatch.reports import StepReport

LEAST_BAR = 10  # of the bar, with the blanks at its ends
EVERY = 10.0  # seconds between two plain lines within an epoch

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Gauge:
    """Peak of a step against its budget, in bytes: "peak 61 of 64 MiB".

    Both are in the unit of the budget, the peak rounded up, so that one over it is visible.
    """

    peak: int
    budget: int
    predicted: bool = False

    @classmethod
    def of(cls, measured: int | None, predicted: int | None, budget: int | None) -> Gauge | None:
        """Return the gauge of a step's report; None without a budget, or without any peak."""
        peak = predicted if measured is None else measured
        if budget is None or peak is None:
            return None
        return cls(peak, budget, predicted=measured is None)

    def __str__(self) -> str:
        power = max(0, min(len(UNITS) - 1, (self.budget.bit_length() - 1) // 10))
        peak, budget = (value / 1024**power for value in (self.peak, self.budget))
        label = "predicted peak" if self.predicted else "peak"
        tenths = math.ceil(round(peak * 10, 6)) / 10
        return f"{label} {tenths:g} of {round(budget, 1):g} {UNITS[power]}"


class Progress:
    """Display of the events of a run; this one shows nothing, for programs that call `train`."""

    def say(self, text: str) -> None:
        """Show one line."""

    def begin_epoch(self, epoch: int, epochs: int, micro_batches: int) -> None:
        """Begin epoch `epoch` (from 1) of `epochs`, expected to have so many micro-batches."""

    def micro_batch(self, samples: int) -> None:
        """One more micro-batch of `samples` images is done."""

    def step(self, loss: float, held: Gauge | None = None) -> None:
        """Show that a mini-batch is done: its loss, and its peak where there is a budget."""

    def close(self) -> None:
        """Restore the terminal."""


class Counted(Progress):
    """The counts and the one sentence that both visible forms of progress share."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.perf_counter) -> None:
        self.console, self.clock = console, clock
        self.epoch = self.epochs = self.done = self.expected = self.samples = 0
        self.started = self.clock()
        self.loss: float | None = None
        self.held: Gauge | None = None

    def say(self, text: str) -> None:
        """Print one line; a terminal breaks it between words."""
        wraps = self.console.is_terminal
        self.console.print(text, highlight=False, markup=False, soft_wrap=not wraps)

    def begin_epoch(self, epoch: int, epochs: int, micro_batches: int) -> None:
        """Start the counts of an epoch."""
        self.epoch, self.epochs, self.expected = epoch, epochs, micro_batches
        self.done = self.samples = 0
        self.started = self.clock()

    def micro_batch(self, samples: int) -> None:
        """Count one micro-batch."""
        self.done += 1
        self.samples += samples

    def step(self, loss: float, held: Gauge | None = None) -> None:
        """Keep both."""
        self.loss, self.held = loss, held

    def figures(self) -> list[str]:
        """Return the speed of this epoch, and the latest loss and peak."""
        seconds = max(self.clock() - self.started, 1e-9)
        loss = [] if self.loss is None else [f"loss {self.loss:.4f}"]
        held = [] if self.held is None else [str(self.held)]
        return [f"{self.samples / seconds:,.0f} images/s", *loss, *held]


class PlainProgress(Counted):
    """Lines for a log file or a pipe."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(console, clock)
        self.said = self.clock()

    def micro_batch(self, samples: int) -> None:
        """Count one micro-batch, and print a line when the last one is ten seconds old."""
        super().micro_batch(samples)
        if self.clock() - self.said >= EVERY:
            self.say(
                f"epoch {self.epoch}/{self.epochs}: {self.done}/{self.expected} micro-batches, "
                f"{', '.join(self.figures())}"
            )

    def say(self, text: str) -> None:
        """Print one line and remember when."""
        super().say(text)
        self.said = self.clock()


class Live(Counted):
    """One line at the foot of the terminal that moves with every micro-batch."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(console, clock)
        columns = TextColumn("{task.description}"), BarColumn(None), TextColumn("{task.fields[f]}")
        self.bar = Bar(*columns, console=console, transient=True, expand=True)
        self.task: TaskID | None = None

    def begin_epoch(self, epoch: int, epochs: int, micro_batches: int) -> None:
        """Set the bar back to nothing."""
        super().begin_epoch(epoch, epochs, micro_batches)
        if self.task is None:
            self.task = self.bar.add_task("", f="")
            self.bar.start()
        self.bar.reset(self.task, total=micro_batches, description=f"epoch {epoch}/{epochs}")
        self.bar.update(self.task, f=self._fitting())

    def micro_batch(self, samples: int) -> None:
        """Move the bar by one."""
        super().micro_batch(samples)
        if self.task is not None:
            self.bar.update(self.task, completed=self.done, f=self._fitting())

    def _fitting(self) -> str:
        """Return the count, the time to the end of the run, and the figures that fit."""
        parts = [f"{self.done}/{self.expected}"]
        if self.done:
            more = self.expected * (self.epochs - self.epoch + 1) - self.done
            each = (self.clock() - self.started) / self.done
            parts.append(f"{show_seconds(max(0.0, more * each))} left")
        width = self.console.width - len(f"epoch {self.epoch}/{self.epochs}") - LEAST_BAR
        return next(
            text
            for count in range(len(parts) + 3, 0, -1)
            if len(text := ", ".join([*parts, *self.figures()][:count])) <= width or count == 1
        )

    def close(self) -> None:
        """Remove the bar."""
        self.bar.stop()


def make_progress(console: Console) -> Progress:
    """Return a live line when `console` is a terminal, else plain lines."""
    return Live(console) if console.is_terminal else PlainProgress(console)


# Log of a run: metrics.jsonl, with a line for each step and each epoch, and TensorBoard.
#
# A line must exist once and complete if the checkpoint after it exists, after any interruption:
#
#     the disk is full      the half line is taken off again and waits for room
#     the power goes        a checkpoint is written only when all lines before it are on the disk
#     the run is resumed    the lines after its checkpoint are cut off
#
# TensorBoard has an answer of its own to the last: a new file that begins with the step from which
# on older files do not count.

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

    `at`: the first field. `report`: of its micro-batches. `seconds`: of all of it but the wait.
    `computed`: seconds of them until the loss was there. `waited`: seconds for its mini-batch,
    before.
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
