"""The room of lanes that wait, against lanes that are played kernel by kernel."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest

from anybatch.room import WAITING, Lane
from anybatch.timeline import Timeline


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
        turn = []
        for _ in range(chance.randrange(1, 5)):
            touches = tuple(chance.sample(alive, chance.randrange(len(alive) + 1)))
            sizes.append(chance.randrange(1, 100))
            alive.append(len(sizes) - 1)
            frees = tuple(n for n in alive[:-1] if chance.random() < 0.3)
            alive = [n for n in alive if n not in frees]
            turn.append(Kernel(touches, len(sizes) - 1, frees))
        turns.append(turn)
    return turns, sizes


class Player:
    """A lane that is played: which of its storages live, and when each was touched last."""

    def __init__(self, turns: Program, sizes: list[int]) -> None:
        self.turns, self.sizes = turns, sizes
        self.touched: dict[int, int] = {}

    def play(self, turn: int) -> Iterator[None]:
        """Stop after every kernel of a turn, before it frees anything."""
        for kernel in self.turns[turn]:
            self.touched |= dict.fromkeys((*kernel.touches, kernel.makes), turn)
            yield
            for number in kernel.frees:
                del self.touched[number]

    def bytes(self, which: Callable[[int], bool] = lambda _: True) -> int:
        """Bytes of what lives and was touched last in `which` turns."""
        return sum(self.sizes[n] for n, turn in self.touched.items() if which(turn))


def lane_alone(turns: Program, sizes: list[int], fixed: int) -> Lane:
    """Return what a rehearsal of one lane would note."""
    lane, kept, untouched, apart = Player(turns, sizes), [], [], []
    for number, turn in enumerate(turns):
        begin = lane.bytes()
        for _ in lane.play(number):
            kept.append([fixed + lane.bytes(lambda last: last == number)])  # noqa: B023
            untouched.append(lane.bytes(lambda last: last < number))  # noqa: B023
        apart += [max(begin, lane.bytes())] * len(turn)
    events = tuple(map(str, range(len(kept))))
    return Lane(Timeline(("all",), events, np.array(kept)), np.array(untouched), np.array(apart))


def by_hand(turns: Program, sizes: list[int], fixed: int, lanes: int, room: float) -> int:
    """Return the most bytes of lanes in lockstep, of which no more than `room` wait."""
    players, order, most = [Player(turns, sizes) for _ in range(lanes)], list(range(lanes)), 0
    for number in range(len(turns)):
        for lane in order:
            for _ in players[lane].play(number):
                touched = players[lane].bytes(lambda last: last == number)  # noqa: B023
                waits = sum(player.bytes() for player in players) - touched
                most = max(most, fixed + touched + int(min(room, waits)))
        order.reverse()
    return most


@pytest.mark.parametrize("seed", range(60))
def test_what_is_predicted_is_what_lanes_hold_that_fill_their_room(seed: int) -> None:
    chance = random.Random(seed)
    turns, sizes = program(chance)
    fixed, lanes = chance.randrange(50), chance.randrange(2, 6)
    lane = lane_alone(turns, sizes, fixed)
    waits = lane.waits(lanes)
    every = by_hand(turns, sizes, fixed, lanes, float("inf"))
    assert lane.step({}, waits, None).peak == every
    assert lane.room(every, waits) is None
    most = int(lane.kept.live.sum(1).max())
    for budget in range(most, every):
        room = lane.room(budget, waits)
        assert room == budget - most
        step = lane.step({}, waits, room)
        assert step.peak == by_hand(turns, sizes, fixed, lanes, room) <= budget
        assert int(step.live[:, step.owners.index(WAITING)].max()) <= room


def test_below_what_the_widest_kernel_keeps_there_is_no_room() -> None:
    turns, sizes = program(random.Random(1))
    lane = lane_alone(turns, sizes, 7)
    assert lane.room(int(lane.kept.live.max()) - 1, lane.waits(2)) == -1


def test_what_is_held_beside_and_shown_counts_all_the_time() -> None:
    turns, sizes = program(random.Random(2))
    lane = lane_alone(turns, sizes, 7)
    plain, more = lane.step({}, lane.waits(3), None), lane.waits(3, shown=100)
    step = lane.step({"optimizer": 11}, more, None)
    assert (step.live.sum(1) == plain.live.sum(1) + 111).all()
    assert Lane(lane.kept, lane.untouched, lane.apart, stays=5).others(3) == 10
