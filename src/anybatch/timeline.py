"""The ledger: live bytes by owner at every event of a step, and how they grow with a micro-batch.

A training step allocates and frees in a fixed order. Peaks alone do not extrapolate, because the
event at which the peak lies moves with the size: a straight line through two of them is too
low. But at each event the bytes are affine in the number of samples, so two traced steps give all:

    live_t(n) = a_t + b_t * n          peak(n) = max_t live_t(n)
    n_max(M)  = min_t floor((M - a_t) / b_t)

No torch here: a ledger is data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.int64]
Span = tuple[str, int, int, int]
"""Owner, bytes, and the events ``first <= t < end`` after which they are live."""

UNLIMITED = 1 << 40
"""What `AffineTimeline.largest` returns where no event grows with the samples."""


class NotAffineError(Exception):
    """Two traces do not show the same events, so nothing can be said of a third size."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """Live bytes by owner, after each event of a step.

    Attributes:
        owners: who holds bytes, such as "parameters" or "activations".
        events: what happened, in order, such as "aten.convolution.default".
        live: int64 [events, owners], bytes.
        spans: the allocations that `record` was given; empty where there were none.
    """

    owners: tuple[str, ...]
    events: tuple[str, ...]
    live: Bytes
    spans: tuple[Span, ...] = ()

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
        return Timeline(owners, self.events, live, self.spans)

    def ended(self, event: str, more: Mapping[str, int]) -> Timeline:
        """Return the timeline with one more event at its end, at which more is live, by owner."""
        lasted = self.plus(dict.fromkeys(more, 0))
        last = lasted.live[-1:] if len(lasted.live) else np.zeros((1, len(lasted.owners)), np.int64)
        extra = np.array([[more.get(name, 0) for name in lasted.owners]], np.int64)
        live = np.vstack([lasted.live, last + extra])
        return Timeline(lasted.owners, (*self.events, event), live, self.spans)

    def rounded(self, others: Sequence[tuple[Timeline, int]], n: int, room: int) -> Timeline:
        """Return the timeline with room for what kernels round up, as the owner "rounding".

        Args:
            others: two more timelines of the same events, and their samples.
            n: samples of this one.
            room: bytes for each allocation whose three sizes are not on a line.
        """
        (low, n_low), (high, n_high) = others
        three = zip(low.spans, self.spans, high.spans, strict=False)
        spans = [
            ("rounding", room, span[2], span[3])
            for a, span, b in three
            if (span[1] - a[1]) * (n_high - n_low) != (b[1] - a[1]) * (n - n_low)
        ]
        return self.beside(record(spans, list(self.events), ("rounding",)), "rounding")

    def beside(self, other: Timeline, owner: str) -> Timeline:
        """Return the timeline with one more owner, as another one of the same events has it."""
        column = other.live[:, [other.owners.index(owner)]]
        live = np.hstack([self.live, column])
        return Timeline((*self.owners, owner), self.events, live, self.spans)


@dataclass(frozen=True, eq=False)
class AffineTimeline:
    """A step's timeline as a function of the samples in its micro-batches.

    Attributes:
        owners: as in `Timeline`.
        events: as in `Timeline`.
        base: int64 [events, owners], a_t: bytes at n = 0 of the line; may be negative.
        slope: int64 [events, owners], b_t: bytes a sample.
    """

    owners: tuple[str, ...]
    events: tuple[str, ...]
    base: Bytes
    slope: Bytes

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
            margin: what the slope is multiplied by, from 0 samples on; 1 (default) for events that
                are just affine.

        Raises:
            NotAffineError: they do not show the same events.
        """
        if low.events != high.events or low.owners != high.owners:
            raise NotAffineError
        exact = (high.live - low.live) / (m - n)
        base = np.ceil(low.live - n * exact).astype(np.int64)
        slope = np.ceil(np.where(exact > 0, margin, 1.0) * exact).astype(np.int64)
        return cls(low.owners, low.events, base, slope)

    def at(self, n: int) -> Timeline:
        """Return the timeline at micro-batches of `n` samples."""
        return Timeline(self.owners, self.events, self.base + n * self.slope)

    def largest(self, budget: int) -> int:
        """Return n_max, the most samples whose peak is within `budget` bytes.

        Returns:
            0 where not even one sample fits; `UNLIMITED` where samples cost nothing.
        """
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

    few: AffineTimeline
    many: AffineTimeline
    bend: int

    def at(self, n: int) -> Timeline:
        """Return the timeline at micro-batches of `n` samples."""
        return self.many.at(n) if n >= self.bend else self.few.at(n)

    def largest(self, budget: int) -> int:
        """Return the most samples whose peak is within `budget` bytes, 0 for none."""
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


def record(spans: Sequence[Span], events: list[str], owners: tuple[str, ...]) -> Timeline:
    """Return the timeline of allocations.

    Args:
        spans: ``(owner, bytes, first, end)`` of each allocation: live after the events
            ``first <= t < end``.
        events: names, in order.
        owners: every owner that may be named.
    """
    change = np.zeros((len(events) + 1, len(owners)), np.int64)
    index = {name: column for column, name in enumerate(owners)}
    last = len(events)
    for owner, count, first, end in spans:
        change[min(first, last), index[owner]] += count
        change[min(end, last), index[owner]] -= count
    return Timeline(owners, tuple(events), change.cumsum(0)[:-1], tuple(spans))
