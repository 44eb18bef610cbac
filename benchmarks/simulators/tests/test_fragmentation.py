"""Allocators keep their promises: no byte is given twice, and the paper's bounds hold."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from benchmarks.simulators.allocators import (
    MIB,
    Allocator,
    Arena,
    Caching,
    Chunks,
    Expandable,
    PowersOfTwo,
)
from benchmarks.simulators.fragmentation import Event, events, footprint
from tests.unit.offloading.traces import anything, network

from anybatch.offloading.policy import belady
from anybatch.offloading.schedule import Schedule, Stage

MAKE: dict[str, Callable[[], Allocator]] = {
    "first fit": lambda: Arena(best=False),
    "best fit": Arena,
    "caching": Caching,
    "powers of two": PowersOfTwo,
    "chunks": lambda: Chunks(2 * MIB),
    "chunks and a pool": lambda: Chunks(40 * MIB, pooled=MIB),
    "expandable": Expandable,
}


def requests(seed: int, count: int = 200) -> list[Event]:
    """Requests of a few bytes to 60 MiB, given back in any order, and all at the end."""
    rng, there, found = Random(seed), [], []
    for v in range(count):
        found.append(Event(v, int(2 ** rng.uniform(4, 26))))
        there.append(v)
        while len(there) > 30 or (there and rng.random() < 0.4):
            found.append(Event(there.pop(rng.randrange(len(there))), 0))
    return [*found, *(Event(v, 0) for v in there)]


@pytest.mark.parametrize("name", MAKE)
def test_reserved_is_never_less_than_requested(name: str) -> None:
    for seed in range(5):
        found = footprint(requests(seed), MAKE[name]())
        assert found.reserved >= found.requested
        assert found.waste == found.reserved / found.requested - 1


@pytest.mark.parametrize("chunk", [2 * MIB, 40 * MIB])
def test_virtual_addressing_keeps_to_equations_1_and_2(chunk: int) -> None:
    for seed in range(10):
        row = requests(seed)
        for event in row:
            if event.size:
                single = footprint([event], Chunks(chunk))
                assert 0 <= single.reserved - event.size < chunk  # Eq. 1
        found = footprint(row, Chunks(chunk))
        assert found.reserved - found.requested < found.together * chunk  # Eq. 2


def test_no_byte_is_handed_out_twice_and_free_bytes_are_one_piece_again() -> None:
    for seed in range(5):
        for best in (True, False):
            arena = Arena(best=best)
            for event in requests(seed):
                if event.size:
                    arena.take(event.v, event.size)
                else:
                    arena.give(event.v)
                used = sorted((begin, begin + size) for begin, size in arena._used.values())
                assert all(a[1] <= b[0] for a, b in pairwise(used))
            assert len(arena._free.stretches) == 1


def test_caching_keeps_no_byte_after_the_end_of_a_limit() -> None:
    large = [Event(0, 100 * MIB), Event(0, 0), Event(1, 150 * MIB)]
    assert footprint(large, Caching()).reserved == 250 * MIB
    assert footprint(large, Caching(limit=200 * MIB)).reserved == 150 * MIB
    with pytest.raises(MemoryError, match=f"limit of {99 * MIB} bytes, and it needs {100 * MIB}"):
        footprint(large, Caching(limit=99 * MIB))


def test_where_small_things_lie_between_large_ones_best_fit_wastes_and_pages_do_not() -> None:
    row = [Event(v, (100 if v % 2 else 3) * MIB) for v in range(20)]
    row += [Event(v, 0) for v in range(20) if v % 2]
    row += [Event(20 + v, 110 * MIB) for v in range(9)]
    assert footprint(row, Arena()).waste > 0.8
    assert footprint(row, Expandable(2 * MIB)).waste < 0.02
    assert footprint(row, Chunks(2 * MIB)).waste < 0.02


def test_an_allocator_serves_what_a_schedule_holds() -> None:
    for seed in range(10):
        rng = Random(seed)
        trace = network(rng.randint(2, 12), rng) if seed % 2 else anything(rng)
        resident = Schedule("", trace.peak, (Stage(),) * (len(trace.functions) + 1))
        assert footprint(events(trace, resident), Chunks(1)).requested == trace.peak
        schedule = belady(trace, trace.floor)
        found = footprint(events(trace, schedule), Chunks(1))
        assert found.requested == found.reserved <= trace.floor
