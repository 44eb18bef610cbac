"""How far a run is: a live line on a terminal, plain lines in a log, or nothing.

A mini-batch of many micro-batches takes long, so the count that moves is that of micro-batches,
fed by the engine's `observe`. rich draws the bar; where there is no terminal a bar is noise, and a
line is printed for each epoch and, in a long one, every ten seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

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


class Progress(Protocol):
    """Protocol of a display for the events of a run."""

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


class Silent:
    """Shows nothing: for programs that call `train`."""

    def say(self, text: str) -> None:
        """Drop the line."""

    def begin_epoch(self, epoch: int, epochs: int, micro_batches: int) -> None:
        """Do nothing."""

    def micro_batch(self, samples: int) -> None:
        """Do nothing."""

    def step(self, loss: float, held: Gauge | None = None) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Counted:
    """The counts and the one sentence that both visible forms of progress share."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.perf_counter) -> None:
        self.console, self.clock = console, clock
        self.epoch = self.epochs = self.done = self.expected = self.samples = 0
        self.started = self.clock()
        self.loss: float | None = None
        self.held: Gauge | None = None

    def say(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

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

    def close(self) -> None:
        """Do nothing."""

    def figures(self) -> str:
        """Return the speed of this epoch, and the latest loss and peak."""
        seconds = max(self.clock() - self.started, 1e-9)
        loss = "" if self.loss is None else f", loss {self.loss:.4f}"
        held = "" if self.held is None else f", {self.held}"
        return f"{self.samples / seconds:,.0f} images/s{loss}{held}"


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
                f"{self.figures()}"
            )

    def say(self, text: str) -> None:
        """Print one line and remember when."""
        super().say(text)
        self.said = self.clock()


class Live(Counted):
    """One line at the foot of the terminal that moves with every micro-batch."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(console, clock)
        columns: tuple[ProgressColumn, ...] = (
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("micro-batches, {task.fields[figures]}"),
        )
        self.bar = Bar(*columns, console=console, transient=True)
        self.task: TaskID | None = None

    def begin_epoch(self, epoch: int, epochs: int, micro_batches: int) -> None:
        """Set the bar back to nothing."""
        super().begin_epoch(epoch, epochs, micro_batches)
        fields = {"epoch": f"{epoch}/{epochs}", "figures": self.figures()}
        if self.task is None:
            self.task = self.bar.add_task("", total=micro_batches, **fields)  # type: ignore[arg-type]
            self.bar.start()
        else:
            self.bar.reset(self.task, total=micro_batches, **fields)  # type: ignore[arg-type]

    def micro_batch(self, samples: int) -> None:
        """Move the bar by one."""
        super().micro_batch(samples)
        if self.task is not None:
            self.bar.update(self.task, completed=self.done, figures=self.figures())

    def close(self) -> None:
        """Remove the bar."""
        self.bar.stop()


def make_progress(console: Console) -> Progress:
    """Return a live line when `console` is a terminal, else plain lines."""
    return Live(console) if console.is_terminal else PlainProgress(console)
