"""Record of the storages that lanes use in their segments, made by the first of them.

Lanes run the same layers in the same order. So the 17th storage of a lane corresponds to the 17th
of another. The next lane will need the earlier storages that the first lane has needed in a
segment, between two barriers: they can be prefetched before it runs, and others evicted first.

    segment 3 of lane 7:   uses its 4th, 17th, 18th
    segment 3 of lane 6:   its own 4th, 17th, 18th are on their way while lane 7 computes
"""

from __future__ import annotations

from collections.abc import Sequence


class SegmentRecord:
    """Record of a segment, made by the first lane in it."""

    def __init__(self, lane: int) -> None:
        self.lane = lane
        self.numbers: list[int] = []
        self.bytes = self.top = 0


class Book:
    """Record of every segment, made by the first lane in it.

    Attributes:
        top: the most bytes that a lane has held in one segment so far.
    """

    def __init__(self) -> None:
        self.top = 0
        self._segments: dict[int, SegmentRecord] = {}

    def begin(self, lane: int, segment: int) -> None:
        """Record that a lane begins its segment of this number."""
        if segment not in self._segments:
            self._segments[segment] = SegmentRecord(lane)

    def uses(self, lane: int, segment: int, number: int, size: int) -> None:
        """Record that a lane uses its storage of this number, made in an earlier segment."""
        shown = self._segments[segment]
        if shown.lane == lane:
            shown.numbers.append(number)
            shown.bytes += size

    def holds(self, segment: int, size: int) -> None:
        """Record the bytes used or made that a lane holds in its segment of this number."""
        shown = self._segments[segment]
        shown.top, self.top = max(shown.top, size), max(self.top, size)

    def most(self, segment: int, lane: int) -> int:
        """Return the most bytes that a lane will hold in a segment; 0 if no other has run it."""
        return self._segments[segment].top if self.shown(segment, lane) else 0

    def shown(self, segment: int, lane: int) -> bool:
        """Return whether another lane has run this segment before this one."""
        found = self._segments.get(segment)
        return found is not None and found.lane != lane

    def used(self, segment: int) -> Sequence[int]:
        """Return the numbers of storages used in a segment, in order; a list that may grow."""
        found = self._segments.get(segment)
        return () if found is None else found.numbers

    def brings(self, segment: int) -> int:
        """Return the bytes of that."""
        found = self._segments.get(segment)
        return 0 if found is None else found.bytes
