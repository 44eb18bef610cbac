"""The room of lanes that wait, against lanes that are played kernel by kernel."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import NamedTuple

import numpy as np
import pytest

from anybatch.memory.lockstep_budget import WAITING, Lane, Timeline, in_segment, least


class Kernel(NamedTuple):
    """One kernel of a lane: storages that it touches and makes, and those that are free then."""

    touches: tuple[int, ...]
    makes: int
    frees: tuple[int, ...]


Program = list[list[Kernel]]
"""The kernels of each turn; storages are numbered in the order in which they are made."""


def program(chance: random.Random) -> tuple[Program, list[int]]:
    """Return what every lane does, and the bytes of its storages."""
    sizes: list[int] = []
    alive: list[int] = []
    turns: Program = []
    for _ in range(chance.randrange(1, 5)):
        segment = []
        for _ in range(chance.randrange(1, 5)):
            touches = tuple(chance.sample(alive, chance.randrange(len(alive) + 1)))
            sizes.append(chance.randrange(1, 100))
            alive.append(len(sizes) - 1)
            frees = tuple(n for n in alive[:-1] if chance.random() < 0.3)
            alive = [n for n in alive if n not in frees]
            segment.append(Kernel(touches, len(sizes) - 1, frees))
        turns.append(segment)
    return turns, sizes


class Player:
    """A lane that is played: which of its storages live, and when each was touched last."""

    def __init__(self, turns: Program, sizes: list[int]) -> None:
        self.turns, self.sizes = turns, sizes
        self.touched: dict[int, int] = {}

    def play(self, segment: int) -> Iterator[None]:
        """Stop after every kernel of a turn, before it frees anything."""
        for kernel in self.turns[segment]:
            self.touched |= dict.fromkeys((*kernel.touches, kernel.makes), segment)
            yield
            for number in kernel.frees:
                del self.touched[number]

    def bytes(self, which: Callable[[int], bool] = lambda _: True) -> int:
        """Bytes of what lives and was touched last in `which` turns."""
        return sum(self.sizes[n] for n, segment in self.touched.items() if which(segment))


def single_lane(turns: Program, sizes: list[int], fixed: int) -> Lane:
    """Return what a rehearsal of one lane would note."""
    lane, resident, untouched, at_barrier, numbers = Player(turns, sizes), [], [], [], []
    for number, segment in enumerate(turns):
        begin = lane.bytes()
        for _ in lane.play(number):
            resident.append([fixed + lane.bytes(lambda last: last == number)])  # noqa: B023
            untouched.append(lane.bytes(lambda last: last < number))  # noqa: B023
        at_barrier += [max(begin, lane.bytes())] * len(segment)
        numbers += [number + 1] * len(segment)
    ledger = Timeline(("all",), tuple(map(str, range(len(resident)))), np.array(resident))
    return Lane(ledger, np.array(untouched), np.array(at_barrier), np.array(numbers))


def by_hand(
    turns: Program, sizes: list[int], fixed: int, lanes: int, capacities: Sequence[float]
) -> int:
    """Return the most bytes of lanes in lockstep, of which a segment's capacity may wait."""
    players, order, most = [Player(turns, sizes) for _ in range(lanes)], list(range(lanes)), 0
    for number in range(len(turns)):
        for lane in order:
            for _ in players[lane].play(number):
                touched = players[lane].bytes(lambda last: last == number)  # noqa: B023
                waits = sum(player.bytes() for player in players) - touched
                most = max(most, fixed + touched + int(min(capacities[number], waits)))
        order.reverse()
    return most


@pytest.mark.large
@pytest.mark.parametrize("seed", range(60))
def test_what_is_predicted_is_what_lanes_hold_that_fill_their_room(seed: int) -> None:
    chance = random.Random(seed)
    turns, sizes = program(chance)
    fixed, lanes = chance.randrange(50), chance.randrange(2, 6)
    lane = single_lane(turns, sizes, fixed)
    waits = lane.waits(lanes)
    every = by_hand(turns, sizes, fixed, lanes, [inf] * len(turns))
    assert lane.step({}, waits, None).peak == every
    assert lane.capacity(every, waits) is None
    most = int(lane.resident.live.sum(1).max())
    for budget in range(most, every):
        capacities = lane.capacity(budget, waits)
        assert capacities is not None
        step = lane.step({}, waits, capacities)
        assert step.peak == by_hand(turns, sizes, fixed, lanes, capacities) <= budget
        for segment, one in enumerate(
            capacities
        ):  # none of them could be larger, if any more waited
            more = [*capacities[:segment], inf, *capacities[segment + 1 :]]
            larger = [*capacities[:segment], one + 1, *capacities[segment + 1 :]]
            over = by_hand(turns, sizes, fixed, lanes, more) > budget
            assert (by_hand(turns, sizes, fixed, lanes, larger) > budget) == over
            here = step.live[lane.segments == segment + 1, step.owners.index(WAITING)]
            assert int(here.max()) <= one


def test_below_what_the_widest_kernel_holds_there_is_no_capacity() -> None:
    turns, sizes = program(random.Random(1))
    lane = single_lane(turns, sizes, 7)
    capacities = lane.capacity(int(lane.resident.live.max()) - 1, lane.waits(2))
    assert least(capacities) == -1


def test_a_segment_that_was_not_foreseen_has_the_least_capacity() -> None:
    assert [in_segment((5, 3, 4), segment) for segment in range(5)] == [3, 5, 3, 4, 3]
    assert (in_segment(7, 9), in_segment(None, 1), least(None), least(())) == (7, 0, 0, 0)


def test_what_is_held_additionally_and_shown_counts_all_the_time() -> None:
    turns, sizes = program(random.Random(2))
    lane = single_lane(turns, sizes, 7)
    plain, more = lane.step({}, lane.waits(3), None), lane.waits(3, shown=100)
    step = lane.step({"optimizer": 11}, more, None)
    assert (step.live.sum(1) == plain.live.sum(1) + 111).all()
    assert (
        Lane(lane.resident, lane.untouched, lane.at_barrier, lane.segments, stays=5).others(3) == 10
    )


def test_what_follows_later_is_what_an_owner_lacks_by_the_end_of_a_segment() -> None:
    resident = Timeline(("all", "sums"), tuple("abcd"), np.array([[9, 0], [9, 2], [9, 2], [9, 7]]))
    none = np.zeros(4, np.int64)
    lane = Lane(resident, none, none, np.array([1, 1, 2, 3]))
    assert lane.later("sums") == (5, 5, 0)
    assert lane.later("others") == ()
