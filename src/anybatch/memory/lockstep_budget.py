"""Capacity for waiting lanes: the budget, less the needs of the kernel that needs the most.

The lane that runs needs of its own memory only what the kernels of its segment touch, between two
barriers. Its storages of earlier segments may be offloaded until then, like those of all other
lanes. So the bytes of a step in lanes are, at every kernel t of a segment, the fixed ones and those
touched in this segment (`resident`), plus the waiting ones. No more wait than the capacity, nor
than all lanes have made:

    waits_t      = untouched_t + (lanes - 1) * max(a lane's bytes at both ends of the segment)
    capacity(s)  = budget - max resident_t over all t of s where resident_t + waits_t > budget
    predicted    = max_t (resident_t + min(capacity(segment of t), waits_t))

A segment in which little is touched, as in forward while there are no gradients yet, leaves more
capacity than the last ones of backward. Other lanes are at one of the two ends of the segment,
because a lane waits nowhere else. If all waiting storages fit, nothing is evicted.

No torch here: a lane is data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from math import gcd

import numpy as np

from anybatch.core.plan_sections import Capacity
from anybatch.memory.ledger import Bytes, Timeline

Sizes = Counter[int]
"""Bytes of a storage -> how many there are of it."""

WAITING = "waiting, at most"
"""The owner of the bytes of waiting micro-batches."""


@dataclass(frozen=True, eq=False)
class Lane:
    """A lane of a step, kernel by kernel, as its rehearsal has shown it; all of it in bytes.

    Attributes:
        resident: owner -> bytes that may not be evicted: those that exist once for all lanes, and
            those touched in the segment of this lane.
        untouched: [events] bytes of this lane from earlier segments, not touched in this one.
        at_barrier: [events] bytes of a lane before this segment, or after it: the larger.
        segments: [events] number of the segment, from 1; 0 for events that may be in any of them.
        stays: bytes of each lane that are never evicted; those of one lane are in `resident`.
        makes: the most that a kernel makes in each segment, the first one first.
        shared: the most bytes of each segment that may not be evicted, or that all lanes share.
        storages: in each segment the sizes of storages, and how many of each there are at most, of
            a lane that waits; and of the one that runs.
    """

    resident: Timeline
    untouched: Bytes
    at_barrier: Bytes
    segments: Bytes
    stays: int = 0
    makes: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    storages: tuple[tuple[Sizes, Sizes], ...] = ()

    def waits(self, lanes: int, shown: int = 0) -> Bytes:
        """Return the most bytes of all `lanes` at each event, besides those that must be resident.

        Args:
            lanes: how many.
            shown: bytes of outputs for an observer. Default 0.

        Returns:
            [events]
        """
        return self.untouched + (lanes - 1) * self.at_barrier + shown

    def others(self, lanes: int) -> int:
        """Return the bytes that all lanes but one have of their own and that must be resident."""
        return (lanes - 1) * self.stays

    def capacity(self, budget: int, waits: Bytes) -> tuple[int, ...] | None:
        """Return the capacity for waiting lanes in each segment; None where all of them fit.

        Args:
            budget: bytes for resident and waiting ones.
            waits: as above.

        Returns:
            Bytes, the first segment first; negative where the lane that runs does not fit.
        """
        resident = self.resident.live.sum(1)
        if not (resident + waits > budget).any():
            return None
        count = int(self.segments.max(initial=0))
        everywhere = self.segments == 0
        return tuple(
            _capacity(budget, resident[here], waits[here])
            for here in (everywhere | (self.segments == segment) for segment in range(1, count + 1))
        )

    def later(self, owner: str) -> tuple[int, ...]:
        """Return the bytes of an owner that are added after each segment, first one first."""
        if owner not in self.resident.owners or not len(self.segments):
            return ()
        there = self.resident.live[:, self.resident.owners.index(owner)]
        segments = range(1, int(self.segments.max()) + 1)
        return tuple(
            int(there.max() - there[self.segments == segment].max()) for segment in segments
        )

    def step(self, held: Mapping[str, int], waits: Bytes, capacity: Capacity) -> Timeline:
        """Return the timeline of the step, with the bytes `held` throughout, by owner.

        Args:
            held: owner -> bytes.
            waits: as above.
            capacity: of these; None lets all of it be resident.
        """
        ledger = self.resident.plus({**held, WAITING: 0})
        if isinstance(capacity, tuple):
            of_segment = np.array([max(capacity), *capacity])
            there = np.minimum(waits, of_segment[self.segments])
        else:
            there = waits if capacity is None else np.minimum(waits, capacity)
        ledger.live[:, ledger.owners.index(WAITING)] += there
        return ledger


def _capacity(budget: int, resident: Bytes, waits: Bytes) -> int:
    """Return the most bytes that may wait next to those that must be resident in a segment."""
    short = resident + waits > budget
    return budget - int(resident[short].max()) if short.any() else int(waits.max(initial=0))


def least(capacity: Capacity) -> int:
    """Return the smallest capacity of any segment; 0 where all that waits may be resident."""
    return min(capacity, default=0) if isinstance(capacity, tuple) else capacity or 0


def in_segment(capacity: Capacity, segment: int) -> int:
    """Return the capacity in a segment, from 1; in one without a forecast, the smallest."""
    if isinstance(capacity, tuple):
        return capacity[segment - 1] if 1 <= segment <= len(capacity) else least(capacity)
    return capacity or 0


# The most bytes of indivisible storages that fit within a limit.
#
# Lanes that are offloaded while they run hold, before each kernel, no more than a limit. But a
# storage is either resident or offloaded, so the resident bytes are a sum of sizes. If all of them
# are large the sum is below the limit by up to one storage, and a plan that counts the limit itself
# predicts more than is ever held. The possible sums are found as in the subset-sum problem, on the
# bits of an integer:
#
#     sizes 4, 4, 4    limit 10     sums 0 4 8 12         8
#     sizes 4, 4, 3    limit 10     sums 0 3 4 7 8 11     8
#
# Small storages fill any gap and need no sums.
#
# No torch here: sizes are data. Source: Bellman, Dynamic Programming (1957), for the sums.

LEAST = 256
"""Storages of less than the limit over this are small: they fill gaps together."""

WIDEST = 2**20
"""Sums that are distinguished; with more, the limit itself is used."""


def filled(sizes: Mapping[int, int], limit: int) -> int:
    """Return the largest sum of storages that is no more than `limit`.

    Args:
        sizes: bytes of a storage -> how many of them there are at most.
        limit: bytes, at least 0.

    Returns:
        Bytes; of many different sizes perhaps the limit, never less than can be there.
    """
    if sum(size * count for size, count in sizes.items()) <= limit:
        return sum(size * count for size, count in sizes.items())
    large = {size: count for size, count in sizes.items() if limit < LEAST * size}
    small = sum(size * count for size, count in sizes.items() if size not in large)
    unit = reduce(gcd, large, 0)
    if unit == 0 or limit // unit > WIDEST:
        return limit
    units = limit // unit
    reached, within = 1, (1 << (units + 1)) - 1
    for size, count in large.items():
        reached = _also(reached, size // unit, min(count, limit // size), within)
    return min(limit, (reached.bit_length() - 1) * unit + small)


def _also(reached: int, size: int, count: int, within: int) -> int:
    """Return the sums that can be reached with up to `count` more of `size`, as bits."""
    chunk = 1
    while count > 0:  # 1, 2, 4 ... of them, and what is left
        some = min(chunk, count)
        reached = (reached | reached << (some * size)) & within
        count, chunk = count - some, 2 * chunk
    return reached
