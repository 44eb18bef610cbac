from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from tests.busy import busy, no_idle

from anybatch.core.barrier import exchange, reduce
from anybatch.errors import LockstepError
from anybatch.lockstep.scheduler import Lanes


class TokenRecorder:
    """Records the order in which lanes run."""

    def __init__(self) -> None:
        self.turns: list[int] = []
        self.running: set[int] = set()
        self.coming: list[list[int]] = []

    def begin(self, lane: int) -> None:
        assert not self.running
        self.running.add(lane)
        self.turns.append(lane)

    def around(self, lane: int) -> None:
        assert self.running == {lane}

    def pass_token(self, lane: int, coming: list[int]) -> None:
        self.running.remove(lane)
        self.coming.append(coming)


def run(count: int, work: Callable[[int], None]) -> TokenRecorder:
    recorded, before = TokenRecorder(), busy()
    try:
        Lanes(count, recorded, contextlib.nullcontext).run(work)
    finally:
        assert busy() == before
    return recorded


def total(parts: list[int]) -> list[int]:
    return [sum(parts)] * len(parts)


@pytest.mark.parametrize("count", [1, 2, 3, 22])
def test_all_meet_and_the_order_turns_around(count: int) -> None:
    found: dict[int, list[int]] = {}

    def work(lane: int) -> None:
        found[lane] = [exchange("first", lane, total), exchange("second", 2 * lane, total)]

    recorded = run(count, work)
    all_of = sum(range(count))
    assert found == {lane: [all_of, 2 * all_of] for lane in range(count)}
    up = list(range(count))
    assert recorded.turns == up + up[-2::-1] + up[1:]


@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_sum_is_made_on_the_way_and_finished_once(count: int) -> None:
    found: list[int] = []
    finished: list[int] = []

    def finish(total: int) -> int:
        finished.append(total)
        return total + 1

    def work(lane: int) -> None:
        found.append(reduce("one", lambda: lane, int.__add__, finish))
        found.append(reduce("two", lambda: 10 * lane, int.__add__, finish))

    run(count, work)
    full = sum(range(count))
    assert finished == [full, 10 * full]
    assert sorted(found) == sorted([full + 1, 10 * full + 1] * count)


class Part:
    """A part that weak references can follow."""


def test_who_waits_holds_no_part() -> None:
    alive: weakref.WeakSet[Part] = weakref.WeakSet()
    most: list[int] = []

    def part() -> Part:
        made = Part()
        alive.add(made)
        most.append(len(alive))
        return made

    run(8, lambda _: reduce("one", part, lambda one, _: one, id))
    assert most == [1] + 7 * [2]


def test_each_gets_its_own_result_in_order() -> None:
    found: dict[int, str] = {}

    def work(lane: int) -> None:
        found[lane] = exchange("key", "abc"[lane], lambda parts: [p.upper() for p in parts])

    run(3, work)
    assert found == {0: "A", 1: "B", 2: "C"}


def test_a_lane_hears_who_comes_before_it_comes_again() -> None:
    recorded = run(3, lambda lane: exchange("key", lane, total) and None)
    assert recorded.coming[0] == [1, 2, 0]
    assert recorded.coming[1] == [2, 1, 0]


@pytest.mark.parametrize("lane", [0, 1, 2])
@pytest.mark.parametrize("place", ["before", "combine", "after"])
def test_what_one_lane_raises_ends_all_of_them(lane: int, place: str) -> None:
    left: list[int] = []

    def fails(parts: list[int]) -> list[int]:
        raise RuntimeError("combine")

    def work(mine: int) -> None:
        try:
            if place == "before" and mine == lane:
                raise RuntimeError(place)
            exchange("key", mine, fails if place == "combine" else total)
            if place == "after" and mine == lane:
                raise RuntimeError(place)
            exchange("key", mine, total)
        finally:
            left.append(mine)

    with pytest.raises(RuntimeError, match=place):
        run(3, work)
    begun = {0, 1, 2} if place != "before" else set(range(lane + 1))
    assert set(left) == begun


def test_a_system_that_starts_no_more_threads_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under RLIMIT_DATA 16 lanes, each with a stack of 8 MiB, have met this."""
    start, begun = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if len(begun) == 3:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    no_idle(monkeypatch)
    with pytest.raises(
        RuntimeError, match=r"of 5 threads the system started 3.*larger micro_batch"
    ):
        run(5, lambda lane: None)


def test_lanes_that_meet_for_other_things_are_a_mismatch() -> None:
    with pytest.raises(LockstepError, match="micro-batch 0 is at a while micro-batch 2 is at b"):
        run(3, lambda lane: exchange("b" if lane == 2 else "a", 0, total) and None)
    with pytest.raises(LockstepError, match="0 is at the end while micro-batch 1 is at a"):
        run(2, lambda lane: exchange("a", 0, total) and None if lane else None)
    with pytest.raises(LockstepError, match="0 is at a while micro-batch 1 is at the end"):
        run(2, lambda lane: None if lane else exchange("a", 0, total) and None)


@pytest.mark.parametrize(
    ("key", "way_out"),
    [("coupled f", "use its result in each loss"), ("bn", 'Use batchnorm="local"')],
)
def test_a_mismatch_names_the_way_out_of_where_lanes_meet(key: str, way_out: str) -> None:
    with pytest.raises(LockstepError, match=way_out):
        run(2, lambda lane: None if lane else exchange(key, 0, total) and None)


def test_ctrl_c_ends_all_lanes_at_the_next_meeting() -> None:
    reached: list[int] = []

    def work(lane: int) -> None:
        for number in range(1000):
            exchange("key", 0, total)
            reached.append(number)
            if number == 3 and lane == 0:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(3, work)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("last", [0, 2])
def test_ctrl_c_waits_for_a_lane_that_meets_no_more(last: int, times: int) -> None:
    """Thread.join, interrupted, takes a thread that runs for one that has ended."""
    recorded: list[int] = []
    ended: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        recorded.append(number)
        signal.default_int_handler(number, frame)

    def work(lane: int) -> None:
        for _ in range(2 if last else 1):
            exchange("key", 0, total)
        if lane == last:
            os.kill(os.getpid(), signal.SIGINT)
            while not recorded:
                pass
            for _ in range(times - 1):  # nor does a second one hurry
                os.kill(os.getpid(), signal.SIGINT)
            for _ in range(10**6):
                pass
        ended.append(lane)

    before = signal.signal(signal.SIGINT, handle)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(3, work)
        assert ended[-1] == last
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_single_lane_meets_only_itself() -> None:
    combined: Any = exchange("key", 3, lambda parts: [sum(parts)])
    assert combined == 3
