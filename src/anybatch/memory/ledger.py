"""The ledger: live bytes by owner at every event of a step, and the timeline of a step.

A training step allocates and frees in a fixed order. Peaks do not extrapolate, because the event at
which the peak lies moves with the size: a straight line through two of them is too low. But at each
event the bytes are affine in the number of samples, so two traced steps give all:

    live_t(n) = a_t + b_t * n          peak(n) = max_t live_t(n)
    n_max(M)  = min_t floor((M - a_t) / b_t)

No torch here: a ledger is data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from anybatch.core.plan import Printed
from anybatch.core.plan_sections import Interval
from anybatch.core.units import show_bytes

Bytes = npt.NDArray[np.int64]
Span = tuple[str, int, int, int]
"""Owner, bytes, and the events ``first <= t < end`` after which they are live."""

UNLIMITED = 1 << 40
"""Result of `AffineTimeline.largest` where no event grows with the samples."""


class NotAffineError(Exception):
    """Two traces do not show the same events, so nothing can be said of a third size."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """Live bytes by owner, after each event of a step.

    Attributes:
        owners: names of holders, such as "parameters" or "activations".
        events: names of events, in order, such as "aten.convolution.default".
        live: int64 [events, owners], bytes.
        spans: the allocations that `record` was given; empty where there were none.
        grain: bytes to whose multiples each of them was rounded up; 1 (default) is none.
    """

    owners: tuple[str, ...]
    events: tuple[str, ...]
    live: Bytes
    spans: tuple[Span, ...] = ()
    grain: int = 1

    @property
    def peak(self) -> int:
        """The most bytes live at one event; 0 where nothing happened."""
        return int(self.live.sum(1).max(initial=0))

    def at_peak(self) -> dict[str, int]:
        """Return the bytes of each owner at the first event of the peak; owners of none left out.

        Returns:
            Owner -> bytes; they sum to `peak`.
        """
        if not len(self.live):
            return {}
        row = self.live[int(self.live.sum(1).argmax())]
        return {name: int(b) for name, b in zip(self.owners, row, strict=True) if b}

    def final(self) -> dict[str, int]:
        """Return the bytes of each owner after the last event."""
        row = self.live[-1] if len(self.live) else ()
        return {name: int(b) for name, b in zip(self.owners, row, strict=False) if b}

    def plus(self, constant: Mapping[str, int]) -> Timeline:
        """Return the timeline with bytes that are live all the time, by owner."""
        owners = (*self.owners, *(name for name in constant if name not in self.owners))
        live = np.zeros((len(self.live), len(owners)), np.int64)
        live[:, : len(self.owners)] = self.live
        for name, count in constant.items():
            live[:, owners.index(name)] += count
        return replace(self, owners=owners, live=live)

    def ended(self, event: str, more: Mapping[str, int]) -> Timeline:
        """Return the timeline with one more event at its end, at which more is live, by owner."""
        lasted = self.plus(dict.fromkeys(more, 0))
        last = lasted.live[-1:] if len(lasted.live) else np.zeros((1, len(lasted.owners)), np.int64)
        extra = np.array([[more.get(name, 0) for name in lasted.owners]], np.int64)
        live = np.vstack([lasted.live, last + extra])
        return replace(lasted, events=(*self.events, event), live=live)

    def rounded(self, others: Sequence[tuple[Timeline, int]], n: int, reserve: int) -> Timeline:
        """Return the timeline with a reserve for the rounding in kernels, as the owner "rounding".

        Args:
            others: two more timelines of the same events, and their samples.
            n: samples of this one.
            reserve: bytes for each allocation whose three sizes are not on a line.
        """
        (low, n_low), (high, n_high) = others
        three = zip(low.spans, self.spans, high.spans, strict=False)
        spans = [
            ("rounding", reserve, span[2], span[3])
            for a, span, b in three
            if (span[1] - a[1]) * (n_high - n_low) != (b[1] - a[1]) * (n - n_low)
        ]
        return self.with_owner(record(spans, list(self.events), ("rounding",)), "rounding")

    def with_owner(self, other: Timeline, owner: str) -> Timeline:
        """Return the timeline with one more owner, as another one of the same events has it."""
        column = other.live[:, [other.owners.index(owner)]]
        live = np.hstack([self.live, column])
        return replace(self, owners=(*self.owners, owner), live=live)


def _line(low: Bytes, high: Bytes, n: int, m: int, margin: float) -> tuple[Bytes, Bytes]:
    """Return base and slope of the lines through bytes at `n` and at `m` samples."""
    exact = (high - low) / (m - n)
    base = np.ceil(low - n * exact).astype(np.int64)
    return base, np.ceil(np.where(exact > 0, margin, 1.0) * exact).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Lines:
    """Allocations with bytes affine in the samples, each rounded up by itself.

    Attributes:
        base: int64 [allocations], requested bytes at no sample of the line.
        slope: int64 [allocations], requested bytes for a sample.
        owner: int64 [allocations], place of the owner.
        first: int64 [allocations], the first event after which it is live.
        end: int64 [allocations], the first event after which it is not.
        grain: bytes to whose multiples each is rounded up.
    """

    base: Bytes
    slope: Bytes
    owner: Bytes
    first: Bytes
    end: Bytes
    grain: int

    @classmethod
    def through(cls, low: Timeline, high: Timeline, n: int, m: int, margin: float) -> Lines | None:
        """Return those of two timelines; None where these do not show the same allocations."""
        places = [[(o, first, end) for o, _, first, end in one.spans] for one in (low, high)]
        made = record(low.spans, list(low.events), low.owners, grain=low.grain)
        if places[0] != places[1] or (made.live != low.live).any():
            return None
        sizes = [np.array([span[1] for span in one.spans], np.int64) for one in (low, high)]
        index = {name: column for column, name in enumerate(low.owners)}
        owner = np.array([index[name] for name, _, _ in places[0]], np.int64)
        first, end = (np.array([at[i] for at in places[0]], np.int64) for i in (1, 2))
        base, slope = _line(sizes[0], sizes[1], n, m, margin)
        return cls(base, slope, owner, first, end, low.grain)

    def live(self, line: AffineTimeline, n: int) -> Bytes:
        """Return [events, owners] bytes that are live at `n` samples."""
        sizes = -(-np.maximum(self.base + n * self.slope, 0) // self.grain) * self.grain
        last = len(line.events)
        change = np.zeros((last + 1, len(line.owners)), np.int64)
        np.add.at(change, (np.minimum(self.first, last), self.owner), sizes)
        np.subtract.at(change, (np.minimum(self.end, last), self.owner), sizes)
        return change.cumsum(0)[:-1]


@dataclass(frozen=True, eq=False)
class AffineTimeline:
    """A step's timeline as a function of the samples in its micro-batches.

    Attributes:
        owners: as in `Timeline`.
        events: as in `Timeline`.
        base: int64 [events, owners], a_t: bytes at n = 0 of the line; may be negative.
        slope: int64 [events, owners], b_t: bytes a sample.
        spans: the allocations, where each is rounded up by itself and both timelines show the same:
            then `at` is exact, and the line above it. None (default) otherwise.
    """

    owners: tuple[str, ...]
    events: tuple[str, ...]
    base: Bytes
    slope: Bytes
    spans: Lines | None = None

    @classmethod
    def through(
        cls, low: Timeline, high: Timeline, n: int, m: int, *, margin: float = 1.0
    ) -> AffineTimeline:
        """Return the line through the timelines of `n` and of `m` samples, n < m.

        Args:
            low: at n.
            high: at m.
            n: samples.
            m: more samples.
            margin: factor of the slope, from 0 samples on; 1 (default) for exactly affine events.

        Raises:
            NotAffineError: they do not show the same events.
        """
        if low.events != high.events or low.owners != high.owners:
            raise NotAffineError
        if low.grain > 1:
            return cls._rounded(low, high, n, m, margin)
        return cls(low.owners, low.events, *_line(low.live, high.live, n, m, margin))

    @classmethod
    def _rounded(
        cls, low: Timeline, high: Timeline, n: int, m: int, margin: float
    ) -> AffineTimeline:
        """Return the line of the requested bytes, plus the most that rounding can add."""
        requested = [record(one.spans, list(one.events), one.owners) for one in (low, high)]
        base, slope = _line(requested[0].live, requested[1].live, n, m, margin)
        more = [one.live - raw.live for one, raw in zip((low, high), requested, strict=True)]
        counts = [
            record([(o, 1, a, b) for o, _, a, b in one.spans], list(one.events), one.owners).live
            for one in (low, high)
        ]
        # Bytes that were counted without an allocation, such as a constant, are rounded already
        # (test_bytes_that_are_no_allocation_are_not_rounded_up).
        extra = np.maximum(more[0] - counts[0] * (low.grain - 1), 0)
        base += np.maximum(*counts) * (low.grain - 1) + extra
        lines = Lines.through(low, high, n, m, margin)
        return cls(low.owners, low.events, base, slope, lines)

    def at(self, n: int) -> Timeline:
        """Return the timeline at micro-batches of `n` samples."""
        live = self.base + n * self.slope if self.spans is None else self.spans.live(self, n)
        return Timeline(self.owners, self.events, live)

    def largest(self, budget: int) -> int:
        """Return n_max, the most samples with a peak within `budget` bytes.

        Returns:
            0 where not even one sample fits; `UNLIMITED` where samples cost nothing.
        """
        least = self._largest(budget)
        if self.spans is None or least == UNLIMITED:
            return least
        low, high = least, least + 1  # the line is above them, so there may be room for more
        while high < UNLIMITED and self.at(high).peak <= budget:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.at(middle).peak <= budget else (low, middle)
        return low

    def _largest(self, budget: int) -> int:
        base, slope = self.base.sum(1), self.slope.sum(1)
        grows = slope > 0
        if (base[~grows] + slope[~grows] > budget).any():
            return 0
        if not grows.any():
            return UNLIMITED
        return max(0, int(((budget - base[grows]) // slope[grows]).min()))


@dataclass(frozen=True, eq=False)
class BentTimeline:
    """Two lines: one for few samples, where kernels round up, and one from `bend` samples on."""

    few: Line
    many: Line
    bend: int

    def at(self, n: int) -> Timeline:
        """Return the timeline at micro-batches of `n` samples."""
        return self.many.at(n) if n >= self.bend else self.few.at(n)

    def largest(self, budget: int) -> int:
        """Return the most samples with a peak within `budget` bytes, 0 for none."""
        most = self.many.largest(budget)
        return most if most >= self.bend else min(self.few.largest(budget), self.bend - 1)


Line = AffineTimeline | BentTimeline


def joined(parts: Sequence[Timeline]) -> Timeline:
    """Return timelines one after another; an owner that one of them lacks has nothing in it."""
    owners = tuple(dict.fromkeys(name for part in parts for name in part.owners))
    same = [part.plus(dict.fromkeys(owners, 0)) for part in parts]
    rows = [part.live[:, [part.owners.index(name) for name in owners]] for part in same]
    live = np.vstack(rows) if rows else np.zeros((0, 0), np.int64)
    return Timeline(owners, tuple(event for part in parts for event in part.events), live)


def record(
    spans: Sequence[Span], events: list[str], owners: tuple[str, ...], *, grain: int = 1
) -> Timeline:
    """Return the timeline of allocations.

    Args:
        spans: ``(owner, bytes, first, end)`` of each allocation: live after the events
            ``first <= t < end``.
        events: names, in order.
        owners: every owner that may be named.
        grain: bytes to whose multiples each is rounded up. Default 1: none.
    """
    change = np.zeros((len(events) + 1, len(owners)), np.int64)
    index = {name: column for column, name in enumerate(owners)}
    last = len(events)
    for owner, requested, first, end in spans:
        count = -(-requested // grain) * grain
        change[min(first, last), index[owner]] += count
        change[min(end, last), index[owner]] -= count
    return Timeline(owners, tuple(events), change.cumsum(0)[:-1], tuple(spans), grain)


# Timeline of a step: live bytes by owner after every event, the budget, and timed copies.
#
# A ledger is rows of bytes. A view of a step also needs its phases, and a clock if copies run
# beside kernels: a profiler shows these of a step that was run, here they are of one that is
# planned. It is data, so that a picture, a terminal and a test read the same thing:
#
#     bytes     ▁▃▅▇██▇▇▆▅▃▂      after every event, by owner; below the budget
#     kernels   ████████▁████▇    when something ran; a gap is a stall
#     out         ▃█████          when the link was busy, each way
#     back               ▅███▇
#
# No torch here.

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


@dataclass(frozen=True, eq=False, repr=False)
class StepTimeline(Printed):
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
        copies = self.moved(back=False), self.moved(back=True)
        ways = [self._busy(way, borders) for way in (self.runs, *copies)]
        found = []
        for i, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
            at = int(first + total[first : max(last, first + 1)].argmax())
            row = zip(self.ledger.owners, self.ledger.live[at], strict=True)
            owners = {name: int(size) for name, size in row if size}
            kernels, out, back = (float(way[i]) for way in ways)
            found.append(Column(owners, (kernels, out, back)))
        return found

    def _busy(self, intervals: Iterable[Interval | Move], borders: Floats) -> Floats:
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
    return [
        [_cell(column.owners, row * each, each) for column in columns]
        for row in reversed(range(height))
    ]


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
