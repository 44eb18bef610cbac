"""Allocators, as arithmetic on addresses: where a variable's bytes would lie.

    Arena         one stretch of addresses, first fit or best fit; reserved up to the highest used
    Caching       segments of the device are kept and split, best fit: the default of torch, NNL
    PowersOfTwo   sizes are rounded up, and blocks of a size kept for it
    Chunks        virtual addressing: any free chunks make a variable; perhaps a pool for small
    Expandable    best fit in one endless virtual stretch, of which used pages alone are mapped

Sources: Hayakawa and Narihira, section 4 (chunks); torch's ``CUDACachingAllocator`` for the sizes
of caching (512 B, 2 MiB, 20 MiB) and ``expandable_segments``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Protocol

MIB = 1 << 20
ROUND = 512
"""Every request is a multiple of it."""
SMALL = MIB
"""Requests up to it come from small segments."""
SMALL_SEGMENT = 2 * MIB
MIDDLE = 10 * MIB
"""Requests below it come from middle segments, larger ones from one of their own."""
MIDDLE_SEGMENT = 20 * MIB
ENDLESS = 1 << 60


class Allocator(Protocol):
    """What serves requests."""

    @property
    def reserved(self) -> int:
        """Return the bytes that are taken from the device."""

    def take(self, v: int, size: int) -> None:
        """Give `size` bytes to a variable."""

    def give(self, v: int) -> None:
        """Take its bytes back."""


@dataclass
class Free:
    """The free stretches of some addresses: [begin, end), in order, never touching each other."""

    stretches: list[tuple[int, int]]

    def find(self, size: int, *, best: bool) -> tuple[int, int] | None:
        """Return the stretch to take `size` bytes from: the smallest that does, or the first."""
        fit = (one for one in self.stretches if one[1] - one[0] >= size)
        if best:
            return min(fit, key=lambda one: (one[1] - one[0], one[0]), default=None)
        return next(fit, None)

    def take(self, begin: int, size: int) -> None:
        """Take bytes from the beginning of the stretch that begins there."""
        place = bisect_left(self.stretches, (begin, 0))
        _, end = self.stretches.pop(place)
        if begin + size < end:
            self.stretches.insert(place, (begin + size, end))

    def give(self, begin: int, size: int) -> None:
        """Give bytes back; what touches becomes one."""
        insort(self.stretches, (begin, begin + size))
        place = bisect_left(self.stretches, (begin, 0))
        for left in (place, place - 1):
            if 0 <= left < len(self.stretches) - 1:
                (a, b), (c, d) = self.stretches[left : left + 2]
                if b == c:
                    self.stretches[left : left + 2] = [(a, d)]


@dataclass
class Arena:
    """One stretch of addresses; `best` fit or first fit."""

    best: bool = True
    reserved: int = 0
    _free: Free = field(default_factory=lambda: Free([(0, ENDLESS)]))
    _used: dict[int, tuple[int, int]] = field(default_factory=dict)

    def take(self, v: int, size: int) -> None:
        """Give `size` bytes to a variable."""
        size = _rounded(size, ROUND)
        found = self._free.find(size, best=self.best)
        assert found is not None
        self._free.take(found[0], size)
        self._used[v] = (found[0], size)
        self.reserved = max(self.reserved, found[0] + size)

    def give(self, v: int) -> None:
        """Take its bytes back."""
        self._free.give(*self._used.pop(v))


@dataclass
class Segment:
    """Bytes from the device in one piece; `pool` says for which requests."""

    size: int
    pool: int
    free: Free


@dataclass
class Caching:
    """Best fit over segments that are kept; with a `limit` whole free ones go back when short."""

    limit: int = ENDLESS
    reserved: int = 0
    _segments: list[Segment] = field(default_factory=list)
    _used: dict[int, tuple[Segment, int, int]] = field(default_factory=dict)

    def take(self, v: int, size: int) -> None:
        """Give `size` bytes to a variable.

        Raises:
            MemoryError: the limit is reached.
        """
        size = _rounded(size, ROUND)
        pool = 0 if size <= SMALL else 1
        fits = [
            (found[1] - found[0], number)
            for number, segment in enumerate(self._segments)
            if segment.pool == pool and (found := segment.free.find(size, best=True))
        ]
        segment = self._segments[min(fits)[1]] if fits else self._grow(size, pool)
        found = segment.free.find(size, best=True)
        assert found is not None
        rest = found[1] - found[0] - size
        if rest and rest <= (0 if pool == 0 else SMALL):
            size += rest  # too little to split off
        segment.free.take(found[0], size)
        self._used[v] = (segment, found[0], size)

    def give(self, v: int) -> None:
        """Take its bytes back."""
        segment, begin, size = self._used.pop(v)
        segment.free.give(begin, size)

    def _grow(self, size: int, pool: int) -> Segment:
        count = _segment_size(size)
        if self.reserved + count > self.limit:
            self._segments = [
                one for one in self._segments if one.free.stretches != [(0, one.size)]
            ]
            self.reserved = sum(one.size for one in self._segments)
        _within(self.reserved + count, self.limit)
        self._segments.append(Segment(count, pool, Free([(0, count)])))
        self.reserved += count
        return self._segments[-1]


@dataclass
class PowersOfTwo:
    """Blocks of 2^k bytes, kept for requests that round up to the same k."""

    reserved: int = 0
    _free: dict[int, int] = field(default_factory=dict)
    _used: dict[int, int] = field(default_factory=dict)

    def take(self, v: int, size: int) -> None:
        """Give `size` bytes to a variable."""
        block = 1 << max(size - 1, ROUND - 1).bit_length()
        if self._free.get(block, 0):
            self._free[block] -= 1
        else:
            self.reserved += block
        self._used[v] = block

    def give(self, v: int) -> None:
        """Take its bytes back."""
        block = self._used.pop(v)
        self._free[block] = self._free.get(block, 0) + 1


@dataclass
class Chunks:
    """Virtual addressing by chunks of `chunk` bytes; below `pooled` bytes a pool is used."""

    chunk: int
    pooled: int = 0
    limit: int = ENDLESS
    _chunks: int = 0
    _most: int = 0
    _pool: Caching = field(default_factory=Caching)
    _used: dict[int, int] = field(default_factory=dict)

    @property
    def reserved(self) -> int:
        """Return the bytes of the chunks that were ever needed at once, and of the pool."""
        return self._most * self.chunk + self._pool.reserved

    def take(self, v: int, size: int) -> None:
        """Give `size` bytes to a variable.

        Raises:
            MemoryError: the limit is reached.
        """
        if size < self.pooled:
            self._pool.take(v, size)
        else:
            self._used[v] = -(-size // self.chunk)
            self._chunks += self._used[v]
            self._most = max(self._most, self._chunks)
        _within(self.reserved, self.limit)

    def give(self, v: int) -> None:
        """Take its bytes back."""
        if v in self._used:
            self._chunks -= self._used.pop(v)
        else:
            self._pool.give(v)


@dataclass
class Expandable:
    """Best fit in an endless virtual stretch, with pages mapped where variables lie.

    Free pages count as given back: that is what happens to them where the device runs short.
    """

    page: int = MIDDLE_SEGMENT
    limit: int = ENDLESS
    reserved: int = 0
    _free: Free = field(default_factory=lambda: Free([(0, ENDLESS)]))
    _used: dict[int, tuple[int, int]] = field(default_factory=dict)
    _pages: dict[int, int] = field(default_factory=dict)
    _small: Caching = field(default_factory=Caching)

    def take(self, v: int, size: int) -> None:
        """Give `size` bytes to a variable.

        Raises:
            MemoryError: the limit is reached.
        """
        size = _rounded(size, ROUND)
        if size <= SMALL:
            before = self._small.reserved
            self._small.take(v, size)
            self.reserved += self._small.reserved - before
        else:
            found = self._free.find(size, best=True)
            assert found is not None
            self._free.take(found[0], size)
            self._used[v] = (found[0], size)
            self._map(found[0], size, 1)
        _within(self.reserved, self.limit)

    def give(self, v: int) -> None:
        """Take its bytes back."""
        if v in self._used:
            begin, size = self._used.pop(v)
            self._free.give(begin, size)
            self._map(begin, size, -1)
        else:
            self._small.give(v)

    def _map(self, begin: int, size: int, change: int) -> None:
        for page in range(begin // self.page, (begin + size - 1) // self.page + 1):
            count = self._pages.get(page, 0)
            self._pages[page] = count + change
            if not count or not count + change:
                self.reserved += change * self.page


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _segment_size(size: int) -> int:
    if size <= SMALL:
        return SMALL_SEGMENT
    return MIDDLE_SEGMENT if size < MIDDLE else _rounded(size, SMALL_SEGMENT)


def _within(reserved: int, limit: int) -> None:
    if reserved > limit:
        raise MemoryError(
            f"an allocator must stay within its limit of {limit} bytes, and it needs {reserved}: "
            "plan with a smaller budget"
        )
