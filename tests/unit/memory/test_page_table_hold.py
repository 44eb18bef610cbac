from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor

from anybatch.core.plan_sections import LockstepLimits
from anybatch.memory.meter import Meter
from anybatch.memory.page_table import EVICTING, OFFLOADED, PREFETCHING, RESIDENT, Hold
from anybatch.memory.pager import Pager, Paging
from anybatch.memory.stores import HostStore

CPU = torch.device("cpu")
KIB = 1024 // 4


BIGGEST = 3600
"""Bytes."""


class Slow(HostStore):
    """Copies only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.fails = False

    def writing(self, key: Hashable, storage: Any) -> Callable[[], None]:
        copy = super().writing(key, storage)

        def late() -> None:
            assert self.go.wait(10)
            if self.fails:
                raise OSError("no space left")
            copy()

        return late


def test_what_is_used_on_its_way_out_stays_as_it_is() -> None:
    store = Slow()
    hold, retained = Hold(store, CPU, []), torch.arange(float(KIB))
    key = int(retained.untyped_storage()._cdata)
    hold.add(key, retained.untyped_storage(), retained.nbytes, 0, 1, 1)
    held, hold.since, hold.touched = hold.all[key], 2, 0
    for _ in range(2):  # the same copy is still under way
        hold.evict(key, held)
        assert (held.state, hold.going, hold.here) == (EVICTING, 1024, 1024)
        hold.touch(key, held, 2)
        assert (held.state, hold.going, hold.here) == (RESIDENT, 0, 1024)
        held.used, hold.touched = 1, 0
    threading.Timer(0.05, store.go.set).start()
    hold.forget_copy(key, held)
    retained.add_(1)
    hold.settle()
    assert (held.state, hold.moved) == (RESIDENT, 1024)
    hold.evict(key, held)
    while hold.wait():
        pass
    assert (held.state, hold.here, retained.untyped_storage().nbytes()) == (OFFLOADED, 0, 0)
    hold.call(key, held)
    assert (held.state, hold.here, hold.moved) == (PREFETCHING, 1024, 3 * 1024)
    hold.touch(key, held, 3)
    assert torch.equal(retained, torch.arange(float(KIB)) + 1)
    hold.close()


class Whenever:
    """Stands for `Copier`, and for its jobs: one ends when it is waited for, or by the dice.

    Whoever asks whether the next one has ended throws them. So copies end as early or as late as
    they can, between any two things that are done, without a thread.
    """

    def __init__(self, chance: random.Random, share: float) -> None:
        self.chance, self.share = chance, share
        self.jobs: deque[Ends] = deque()

    def begin(self) -> None:
        pass

    def start(self, work: Callable[[], None]) -> Ends:
        self.jobs.append(Ends(self, work))
        return self.jobs[-1]

    def wait(self, job: Ends) -> None:
        while not job.ended:
            self.end()

    def end(self) -> None:
        job = self.jobs.popleft()
        assert job.work is not None
        job.work()
        job.ended = True

    def close(self) -> None:
        while self.jobs:
            self.end()


class Ends:
    """Stands for a `Job`."""

    def __init__(self, copier: Whenever, work: Callable[[], None]) -> None:
        self.copier, self.ended, self.error = copier, False, None
        self.work: Callable[[], None] | None = work

    @property
    def done(self) -> bool:
        copier = self.copier
        if not self.ended and copier.jobs[0] is self and copier.chance.random() < copier.share:
            copier.end()
        return self.ended


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
            "anybatch.memory.page_table.Copier", lambda _: Whenever(random.Random(seed), ends)
        )
    lanes, turns, available = chance.choice([2, 3, 5]), 6, chance.choice([0, 3000, 20_000])
    limit = max(available, 2 * BIGGEST) if limited else None
    capacity = tuple(chance.choice([0, 3000, 20_000]) for _ in range(turns - chance.randrange(2)))
    inputs = chance.choice([available, capacity])
    later = chance.choice([(), capacity])
    inside = None if limit is None else LockstepLimits(limit, later, (BIGGEST,) * turns)
    it = Pager(inputs, HostStore(), CPU, small=1, segments=chance.choice([0, 2]), inside=inside)
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
                assert not limit or it._hold.here <= it._limit_in(segment + 1) + makes
                assert it._hold.waiting <= it._limit_in(segment + 1) or limit is not None
            if at < lanes - 1:
                later = order[at + 1 :]
                it.end(lane, list(dict.fromkeys([*later, *reversed(order)])))
                assert it._hold.waiting <= it._limit_in(segment + 1)
        order.reverse()
    it.close()
    for mine, true in zip(left, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, true, strict=True))


def test_the_next_lane_is_brought_in_ahead_of_its_segment() -> None:
    it = Pager(0, HostStore(), CPU, segments=2)
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
                states.append(it._hold.all[key].state)
                with Paging(it):
                    retained[lane].add_(1)
                while it._hold._moving:  # a turn is long enough for every copy
                    it._hold._copier.wait(it._hold._moving[-1][2])
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
    it = Pager(0, store, CPU)
    it.begin(0)
    with Paging(it):
        retained = torch.arange(float(KIB)) * 1
    with pytest.raises(OSError, match="no space left"):
        it.end(0, [1, 0])
    it.close()
    assert torch.equal(retained, torch.arange(float(KIB)))


def test_a_meter_counts_what_has_been_brought_back() -> None:
    with Meter(CPU) as meter:
        it = Pager(0, HostStore(), CPU, [meter])
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


class Broken(HostStore):
    """Fails at what it is told to."""

    def __init__(self, *ways: str) -> None:
        super().__init__()
        self.ways = ways

    def writing(self, key: Hashable, storage: Any) -> Callable[[], None]:
        return self.fails if "out" in self.ways else super().writing(key, storage)

    def reading(self, key: Hashable, storage: Any) -> Callable[[], None]:
        return self.fails if "back" in self.ways else super().reading(key, storage)

    def fails(self) -> None:
        raise OSError("the disk is gone")


@pytest.mark.parametrize("used", [False, True])
def test_what_could_not_be_copied_out_stays(*, used: bool) -> None:
    store = Broken("out")
    hold, retained = Hold(store, CPU, []), torch.arange(float(KIB))
    key = int(retained.untyped_storage()._cdata)
    hold.add(key, retained.untyped_storage(), retained.nbytes, 0, 1, 1)
    held = hold.all[key]
    for _ in range(2):
        hold.evict(key, held)
        if used:
            hold.bring_back(key, held)
        with pytest.raises(OSError, match="the disk is gone"):
            _ = hold.forget_copy(key, held) if used else hold.wait()
        assert (held.state, held.has_copy, hold.here, hold.going) == (RESIDENT, False, 1024, 0)
    store.ways = ()
    hold.settle()
    hold.evict(key, held)
    hold.wait()
    assert (held.state, retained.untyped_storage().nbytes()) == (OFFLOADED, 0)
    hold.close()
    assert torch.equal(retained, torch.arange(float(KIB)))


@pytest.mark.parametrize("called", [False, True])
def test_what_cannot_be_read_back_is_nan_and_the_rest_comes(*, called: bool) -> None:
    store = Broken()
    hold, retained = Hold(store, CPU, []), [torch.arange(float(KIB)) for _ in range(2)]
    for number, tensor in enumerate(retained):
        key = int(tensor.untyped_storage()._cdata)
        hold.add(key, tensor.untyped_storage(), tensor.nbytes, 0, number, 1)
        hold.evict(key, hold.all[key])
    while hold.wait():
        pass
    first = int(retained[0].untyped_storage()._cdata)
    store.ways = ("back",)
    if called:
        hold.call(first, hold.all[first])
        with pytest.raises(OSError, match="the disk is gone"):
            hold.bring_back(first, hold.all[first])
    real = store.reading

    def once(key: Hashable, storage: Any) -> Callable[[], None]:
        found = real(key, storage)
        store.ways = ()
        return found

    store.reading = once  # type: ignore[method-assign]
    with pytest.raises(OSError, match="the disk is gone"):
        hold.close()
    assert retained[0].isnan().all()
    assert torch.equal(retained[1], torch.arange(float(KIB)))


def test_what_is_used_on_its_way_out_waits_until_it_has_been_copied() -> None:
    """Whoever lets go of it before that, the copy does not."""
    store = Slow()
    hold, retained = Hold(store, CPU, []), torch.arange(float(KIB))
    key = int(retained.untyped_storage()._cdata)
    hold.add(key, retained.untyped_storage(), retained.nbytes, 0, 1, 1)
    held, hold.since, hold.touched = hold.all[key], 2, 0
    hold.evict(key, held)
    hold.touch(key, held, 2)
    assert (hold.here, hold.touched, hold.waiting) == (1024, 0, 1024)
    store.go.set()
    hold._copier.wait(hold._moving[0][2])
    hold.settle()
    assert (hold.here, hold.touched, hold.waiting) == (1024, 1024, 0)
    hold.close()


def test_what_dies_when_its_copy_has_ended_is_forgotten_at_once() -> None:
    store = Slow()
    hold, gone = Hold(store, CPU, []), torch.zeros(KIB)
    key = int(gone.untyped_storage()._cdata)
    hold.add(key, gone.untyped_storage(), gone.nbytes, 0, 1, 1)
    held = hold.all[key]
    hold.evict(key, held)
    hold.bring_back(key, held)  # it is used after all, and then dropped: only its copy holds it
    job = held.job
    assert job is not None
    del gone
    hold.settle()
    assert key in hold.movable
    store.go.set()
    hold._copier.wait(job)
    hold.settle()
    assert (hold.stirred(), hold.here, hold.all, hold.movable) == (False, 0, {}, {})
    hold.close()


def test_what_is_chosen_while_it_is_copied_out_and_is_offloaded_by_then_is_not_moved() -> None:
    """It was taken for a storage that somebody had resized to nothing, and its bytes were lost."""
    hold, retained = Hold(HostStore(), CPU, []), torch.arange(float(KIB))
    key = int(retained.untyped_storage()._cdata)
    hold.add(key, retained.untyped_storage(), retained.nbytes, 0, 1, 1)
    held = hold.all[key]
    hold.evict(key, held)
    while hold.wait():
        pass
    hold.evict(key, held)
    assert (held.state, held.size, hold.here, hold.going) == (OFFLOADED, 1024, 0, 0)
    hold.bring_back(key, held)
    assert torch.equal(retained, torch.arange(float(KIB)))
    hold.close()


def test_what_is_to_remain_is_held_by_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts no more with what may leave, so when it dies its memory must go at once."""
    monkeypatch.setattr(
        "anybatch.memory.page_table.Copier", lambda _: Whenever(random.Random(0), 0.0)
    )
    hold, retained = Hold(HostStore(), CPU, []), torch.arange(float(KIB))
    key, there = int(retained.untyped_storage()._cdata), weakref.ref(retained.untyped_storage())
    hold.add(key, retained.untyped_storage(), retained.nbytes, 0, 1, 1)
    hold.evict(key, hold.all[key])
    hold.touch(key, hold.all[key], 2)
    hold.pin(key, hold.all[key])
    assert torch.equal(retained, torch.arange(float(KIB)))
    del retained
    assert there() is None
    hold.settle()
    assert (hold.here, hold.all) == (0, {})
    hold.close()
