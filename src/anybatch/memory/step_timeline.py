"""Timeline of a step: live bytes by owner after every event, the budget, and timed copies.

A ledger (`anybatch.memory.timeline`) is rows of bytes. A view of a step also needs its phases, and
a clock if copies run beside kernels: a profiler shows these of a step that was run, here they are
of one that is planned. It is data, so that a picture, a terminal and a test read the same thing:

    bytes     ▁▃▅▇██▇▇▆▅▃▂      after every event, by owner; below the budget
    kernels   ████████▁████▇    when something ran; a gap is a stall
    out         ▃█████          when the link was busy, each way
    back               ▅███▇

No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from anybatch.core.links import Interval
from anybatch.core.units import show_bytes
from anybatch.memory.timeline import Timeline

Floats = npt.NDArray[np.float64]


BLOCKS = " ▁▂▃▄▅▆▇█"
"""Eighths of a letter's height."""

WIDTH, HEIGHT = 72, 8
"""Letters of a chart, beside its scale."""

BUDGET = "budget"
"""The owner of a chart's line at the budget."""


class Cell(NamedTuple):
    """One piece of a chart: its text, and the owner of the bytes that it shows; "" for no owner."""

    text: str
    owner: str = ""


class Move(NamedTuple):
    """Copy of a storage from the device to its store, or back.

    Args:
        name: of the storage.
        size: bytes.
        back: it returns; else it is offloaded.
        begin: seconds from the beginning of the step.
        end: the same, when the copy has ended.
    """

    name: str
    size: int
    back: bool
    begin: float
    end: float


class Phase(NamedTuple):
    """A part of a step.

    Attributes:
        name: such as "update".
        first: the place of its first event.
    """

    name: str
    first: int


class Column(NamedTuple):
    """A stretch of a step, as wide as a letter.

    Attributes:
        owners: owner -> bytes at the moment of the stretch when the most were live.
        busy: share of the stretch in which kernels ran, copies went out, and copies came back;
            0 to 1 each, all 0 where no times are known.
    """

    owners: dict[str, int]
    busy: tuple[float, float, float]


@dataclass(frozen=True, eq=False)
class StepTimeline:
    """Timeline of a planned step: live bytes, kernels and copies.

    Attributes:
        title: name of the step, in words.
        ledger: live bytes by owner after each event.
        budget: bytes that the step may hold.
        phases: parts of the step, in order; the first begins at event 0.
        seconds: time of each event, never before that of the previous one; None where only the
            order is known.
        end: seconds of the full step; 0 where times are unknown.
        runs: times of kernels: ``begin`` and ``end`` in seconds, in order.
        moves: copies of storages: ``name``, ``size`` in bytes, ``back`` (True: to the device),
            ``begin`` and ``end``, in the order in which they began.

    Example:
        >>> print(engine.timeline())
    """

    FAR: ClassVar[int] = 3
    """A budget of more than so many times the peak is not drawn to scale."""

    title: str
    ledger: Timeline
    budget: int
    phases: tuple[Phase, ...] = ()
    seconds: tuple[float, ...] | None = None
    end: float = 0.0
    runs: tuple[Interval, ...] = ()
    moves: tuple[Move, ...] = ()

    @property
    def peak(self) -> int:
        """The most bytes live at one event."""
        return self.ledger.peak

    @property
    def stall(self) -> float:
        """Seconds of the step in which no kernel ran."""
        return self.end - sum(run.end - run.begin for run in self.runs)

    @property
    def edges(self) -> Floats:
        """Begins of events and the end of the last one: in seconds if recorded, else as indices.

        Returns:
            [events + 1]
        """
        if self.seconds is None:
            return np.arange(len(self.ledger.events) + 1, dtype=np.float64)
        return np.array([*self.seconds, max([self.end, *self.seconds[-1:]])])

    @property
    def facts(self) -> str:
        """One line on the peak and, where times are recorded, on the duration and the copies."""
        parts = [f"peak {show_bytes(self.peak)} of {show_bytes(self.budget)}"]
        if self.seconds is None:
            return f"{parts[0]}; {len(self.ledger.events)} events"
        out, back = (sum(move.size for move in self.moved(back=way)) for way in (False, True))
        parts.append(f"{self.end:.3g} s, of which {self.stall:.3g} s wait for copies")
        parts.append(f"{show_bytes(out)} out, {show_bytes(back)} back")
        return "; ".join(parts)

    def moved(self, *, back: bool) -> tuple[Move, ...]:
        """Return the copies out, or those back.

        Args:
            back: True for copies back; False for copies out.
        """
        return tuple(move for move in self.moves if move.back is back)

    def columns(self, count: int) -> list[Column]:
        """Return the step in `count` stretches of the same length, fewer if it has fewer events.

        Args:
            count: at least 1.

        Returns:
            For each stretch, the bytes of every owner (``owners``) at its peak, and the shares of
            its time in which kernels ran, copies went out and copies came back (``busy``). The
            peak of the step is in one of the stretches.
        """
        edges = self.edges
        if len(edges) < 2:
            return []
        count = count if self.seconds is not None else min(count, len(edges) - 1)
        borders = np.linspace(edges[0], edges[-1], count + 1)
        firsts = np.searchsorted(edges[:-1], borders[:-1], side="right") - 1
        lasts = np.searchsorted(edges[:-1], borders[1:], side="left")
        lasts[-1] = len(edges) - 1
        total = self.ledger.live.sum(1)
        ways = [self._busy(way, borders) for way in (self.runs, *map(self._copies, (False, True)))]
        found = []
        for i, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
            at = int(first + total[first : max(last, first + 1)].argmax())
            row = zip(self.ledger.owners, self.ledger.live[at], strict=True)
            owners = {name: int(size) for name, size in row if size}
            kernels, out, back = (float(way[i]) for way in ways)
            found.append(Column(owners, (kernels, out, back)))
        return found

    def _copies(self, back: bool) -> list[Interval]:  # noqa: FBT001
        return [Interval(move.begin, move.end) for move in self.moved(back=back)]

    def _busy(self, intervals: Iterable[Interval], borders: Floats) -> Floats:
        """Return the share of each stretch between `borders` that some intervals cover.

        Intervals of one sort never overlap: kernels, and copies in one direction, are queued.
        """
        covered = np.zeros(len(borders) - 1)
        for begin, end in ((one.begin, one.end) for one in intervals):
            inside = np.minimum(end, borders[1:]) - np.maximum(begin, borders[:-1])
            covered += np.maximum(inside, 0.0)
        width = borders[1] - borders[0]
        return covered / width if width else covered

    def chart(self, width: int = WIDTH) -> list[list[Cell]]:
        """Return the step as lines of text: live bytes below the budget, and busy times.

        Args:
            width: letters of a line beside its scale, at most. Default 72.

        Returns:
            Lines from the top, in pieces: each has its ``text``, and as ``owner`` the owner of the
            bytes that it shows, "budget" for the line of the budget, or "".
        """
        rows = grid(self, width)
        lines = [[Cell(self.title)], [Cell(self.facts)]]
        lines += [[Cell(line, BUDGET)] for line in ceiling(self, width)]
        for label, row in zip(labels(self, len(rows)), rows, strict=True):
            lines.append([Cell(f"{label:>10} │"), *row])
        return lines + [[Cell(f"{name:>10} │{line}")] for name, line in busy_lines(self, width)]

    def __str__(self) -> str:
        """Return the chart as the command prints it."""
        return "\n".join("".join(cell.text for cell in line) for line in self.chart())


def scale(step: StepTimeline) -> int:
    """Return the bytes at the top of a chart: the budget, or the peak where that is far below."""
    top = max(step.budget, step.peak)
    return max(1, top if top <= step.FAR * step.peak else step.peak)


def grid(step: StepTimeline, width: int = WIDTH, height: int = HEIGHT) -> list[list[Cell]]:
    """Return live bytes as rows of letters, the top row first.

    Args:
        step: the step to show.
        width: letters, at most.
        height: rows; the top one ends at `scale` bytes.
    """
    columns = step.columns(width)
    each = scale(step) / height
    return [[_cell(column.owners, row * each, each) for column in columns] for row in _down(height)]


def _down(height: int) -> Iterator[int]:
    return reversed(range(height))


def _cell(owners: dict[str, int], low: float, each: float) -> Cell:
    """Return the letter for the bytes from `low` to ``low + each``; its owner has its middle."""
    total = sum(owners.values())
    eighths = round(8 * min(1.0, max(0.0, (total - low) / each)))
    if total > low and not eighths:
        eighths = 1
    middle, below = low + min(each, total - low) / 2, 0
    for owner, size in owners.items():
        below += size
        if eighths and middle < below:
            return Cell(BLOCKS[eighths], owner)
    return Cell(BLOCKS[eighths])


def sparkline(shares: Iterable[float]) -> str:
    """Return shares of 0 to 1 as letters; any share above 0 is visible."""
    return "".join(BLOCKS[max(round(8 * share), int(share > 0))] for share in shares)


def ceiling(step: StepTimeline, width: int) -> list[str]:
    """Return the line of the budget; none where it is too far above to be drawn to scale."""
    if scale(step) != step.budget:
        return []
    return [f"{show_bytes(step.budget):>10} ┌{'╌' * len(step.columns(width))} budget"]


def labels(step: StepTimeline, height: int) -> list[str]:
    """Return the bytes at the upper end of every second row, from the top; "" for the others.

    The top is the budget's, where that is drawn.
    """
    top = scale(step)
    found = ["" if i % 2 else show_bytes(round(top * (height - i) / height)) for i in range(height)]
    return ["", *found[1:]] if top == step.budget else found


def busy_lines(step: StepTimeline, width: int) -> list[tuple[str, str]]:
    """Return a name and a sparkline for kernels and both ways of the link; none without times."""
    if step.seconds is None:
        return []
    shares = zip(*(column.busy for column in step.columns(width)), strict=True)
    return [
        (name, sparkline(each))
        for name, each in zip(("kernels", "out", "back"), shares, strict=True)
    ]
