"""Lanes find what they left, whenever copies end."""

from __future__ import annotations

import random

import pytest
import torch
from tests.peaks import metered
from tests.unit.memory.copies import Slow, Whenever, host
from torch import Tensor

from anybatch.memory.lane_pager import OFFLOADED, LanePager, LockstepLimits, Paging

CPU = torch.device("cpu")
KIB = 1024 // 4
BIGGEST = 3600
"""Bytes."""


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ends", [None, 0.0, 0.1, 0.5])
@pytest.mark.parametrize("limited", [False, True])
def test_lanes_find_what_they_left_and_no_more_waits_than_may(
    seed: int, ends: float | None, limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever copies end, and though the smallest lane shows some turns to the others."""
    chance = random.Random(seed)
    if ends is not None:
        monkeypatch.setattr(
            "anybatch.memory.pager.Copier", lambda _: Whenever(random.Random(seed), ends)
        )
    lanes, turns, available = chance.choice([2, 3, 5]), 6, chance.choice([0, 3000, 20_000])
    limit = max(available, 2 * BIGGEST) if limited else None
    capacity = tuple(chance.choice([0, 3000, 20_000]) for _ in range(turns - chance.randrange(2)))
    inputs = chance.choice([available, capacity])
    later = chance.choice([(), capacity])
    inside = None if limit is None else LockstepLimits(limit, later, (BIGGEST,) * turns)
    it = LanePager(inputs, host(), CPU, small=1, segments=chance.choice([0, 2]), inside=inside)
    left: list[list[Tensor]] = [[] for _ in range(lanes)]
    want: list[list[Tensor]] = [[] for _ in range(lanes)]
    smaller = 1 if ends is None else 10
    program = [
        [chance.choice(("make", "read", "write", "drop")) for _ in range(15)] for _ in range(turns)
    ]
    sizes = [[chance.randrange(80, BIGGEST // 4) for _ in range(15)] for _ in range(turns)]
    places = [[chance.random() for _ in range(15)] for _ in range(turns)]
    order = list(range(lanes))
    for segment in range(turns):
        for at, lane in enumerate(order):
            (it.around if at == 0 and segment else it.begin)(lane)
            for what, size, place in zip(
                program[segment], sizes[segment], places[segment], strict=True
            ):
                mine, true = left[lane], want[lane]
                size = size if lane < lanes - 1 else size // smaller  # noqa: PLW2901
                index = int(place * len(mine))
                makes = 4 * size
                if what == "make" or not mine:
                    true.append(torch.full((size,), float(lane + size)))
                    with Paging(it):
                        mine.append(torch.full((size,), float(lane + size)))
                elif what == "drop":
                    del mine[index], true[index]
                    continue
                elif what == "write":
                    makes, true[index] = 0, true[index] + 1
                    with Paging(it):
                        mine[index].add_(1)
                else:
                    makes = true[index].nbytes
                    with Paging(it):
                        found = mine[index] * 1
                    assert torch.equal(found, true[index])
                assert not limit or it.here <= it._limit_in(segment + 1) + makes
                assert it.waiting <= it._limit_in(segment + 1) or limit is not None
            if at < lanes - 1:
                later = order[at + 1 :]
                it.end(lane, list(dict.fromkeys([*later, *reversed(order)])))
                assert it.waiting <= it._limit_in(segment + 1)
        order.reverse()
    it.close()
    for mine, true in zip(left, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, true, strict=True))


def test_the_next_lane_is_brought_in_ahead_of_its_segment() -> None:
    it = LanePager(0, host(), CPU, segments=2)
    retained: dict[int, Tensor] = {}
    order, states = [0, 1, 2, 3, 4, 5], []
    for segment in range(3):
        for at, lane in enumerate(order):
            if at == 0 and segment:
                it.around(lane)
            else:
                it.begin(lane)
            if segment:
                key = int(retained[lane].untyped_storage()._cdata)
                states.append(it.all[key].state)
                with Paging(it):
                    retained[lane].add_(1)
                while it._moving:  # a turn is long enough for every copy
                    it._copiers[0].wait(it._moving[-1][1])
                    it._settle()
            else:
                with Paging(it):
                    retained[lane] = torch.zeros(KIB) + lane
            if at < len(order) - 1:
                it.end(lane, list(dict.fromkeys([*order[at + 1 :], *reversed(order)])))
        order.reverse()
    first = [0, len(order), 1, len(order) + 1]  # shows the turn; and the one after it
    assert OFFLOADED not in [state for place, state in enumerate(states) if place not in first]
    assert it.moved > 0
    it.close()
    assert all(torch.equal(retained[lane], torch.full((KIB,), lane + 2.0)) for lane in order)


def test_a_copy_that_fails_is_said_and_nothing_is_lost() -> None:
    store = Slow()
    store.fails = True
    store.go.set()
    it = LanePager(0, store, CPU)
    it.begin(0)
    with Paging(it):
        retained = torch.arange(float(KIB)) * 1
    with pytest.raises(OSError, match="no space left"):
        it.end(0, [1, 0])
    it.close()
    assert torch.equal(retained, torch.arange(float(KIB)))


def test_a_meter_counts_what_has_been_brought_back() -> None:
    with metered() as meter:
        it = LanePager(0, host(), CPU, [meter])
        it.begin(0)
        with Paging(it):
            retained = torch.zeros(100 * KIB) + 1
        full = meter.live
        it.end(0, [1, 0])
        assert meter.live == full - retained.nbytes
        it.begin(1)
        it.end(1, [0, 1])
        it.begin(0)
        with Paging(it):
            retained.add_(1)
        assert meter.live == full
        it.close()
