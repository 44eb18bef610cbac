"""How far a run is: a live line on a terminal, plain lines in a log, or nothing.

A mini-batch of many micro-batches takes long, so the count that moves is that of micro-batches,
fed by the engine's `observe`. rich draws the bar; where there is no terminal a bar is noise, and a
line is printed for each epoch and, in a long one, every ten seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

EVERY = 10.0  # seconds between two plain lines within an epoch


class Progress(Protocol):
    """Is told what happens, and shows it."""

    def say(self, text: str) -> None:
        """Show one line."""

    def begin_epoch(self, epoch: int, epochs: int, micro_batches: int) -> None:
        """Begin epoch `epoch` (from 1) of `epochs`, expected to have so many micro-batches."""

    def micro_batch(self, samples: int) -> None:
        """One more micro-batch of `samples` images is done."""

    def step(self, loss: float) -> None:
        """A mini-batch is done; its loss."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class Silent:
    """Shows nothing: for programs that call `train`."""

    def say(self, text: str) -> None:
        """Drop the line."""

    def begin_epoch(self, epoch: int, epochs: int, micro_batches: int) -> None:
        """Do nothing."""

    def micro_batch(self, samples: int) -> None:
        """Do nothing."""

    def step(self, loss: float) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Counted:
    """The counts and the one sentence that both visible kinds of progress share."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.perf_counter) -> None:
        self.console, self.clock = console, clock
        self.epoch = self.epochs = self.done = self.expected = self.samples = 0
        self.started = self.clock()
        self.loss: float | None = None

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

    def step(self, loss: float) -> None:
        """Keep the loss."""
        self.loss = loss

    def close(self) -> None:
        """Do nothing."""

    def figures(self) -> str:
        """Return the speed and the latest loss of this epoch."""
        seconds = max(self.clock() - self.started, 1e-9)
        loss = "" if self.loss is None else f", loss {self.loss:.4f}"
        return f"{self.samples / seconds:,.0f} images/s{loss}"


class Plain(Counted):
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
    return Live(console) if console.is_terminal else Plain(console)
