"""Capacity for waiting lanes: the budget, less the needs of the kernel that needs the most.

The lane that runs needs of its own memory only what the kernels of its turn touch. What it has made
in earlier turns may be away until then, as that of all other lanes may. So a step in lanes is, at
every kernel t of a turn, what is there in any case and what has been touched in this turn (`kept`),
and beside it what waits. No more waits than there is room for, nor than all lanes have made:

    waits_t     = untouched_t + (lanes - 1) * max(a lane's bytes at the begin of the turn, its end)
    room(turn)  = budget - max kept_t over all t of the turn where kept_t + waits_t > budget
    predicted   = max_t (kept_t + min(room(turn of t), waits_t))

A turn in which little is touched, as in forward while there are no gradients yet, leaves more room
than the last ones of backward. Other lanes stand at one of the two ends of the turn, because a lane
waits nowhere else. Where all that waits fits, nothing leaves at all.

No torch here: a lane is data.

Source: design of this project, sections 2 (one ledger) and 5.3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from anybatch.core.memory import Room
from anybatch.memory.timeline import Bytes, Timeline

Sizes = Counter[int]
"""Bytes of a storage -> how many there are of it."""

WAITING = "waiting, at most"
"""The owner of what micro-batches that wait for others may hold."""


@dataclass(frozen=True, eq=False)
class Lane:
    """A lane of a step, kernel by kernel, as its rehearsal has shown it; all of it in bytes.

    Attributes:
        kept: owner -> what is there and may not leave: what is there once for all lanes, and what
            the turn of this lane has touched.
        untouched: [events] what this lane has made in earlier turns and not touched in this one.
        apart: [events] what a lane holds that has not begun this turn, or has ended it: the more.
        turns: [events] the number of the turn, from 1; 0 for what may be in any of them.
        stays: what each lane has of its own and that may not leave; one lane's is in `kept`.
        makes: the most that a kernel makes in each turn, the first turn first.
        shared: the most that has come in each turn and may not leave, or is there for all lanes.
        storages: in each turn the sizes of storages, and how many of each there are at most, of a
            lane that waits; and of the one that runs.
    """

    kept: Timeline
    untouched: Bytes
    apart: Bytes
    turns: Bytes
    stays: int = 0
    makes: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    storages: tuple[tuple[Sizes, Sizes], ...] = ()

    def waits(self, lanes: int, shown: int = 0) -> Bytes:
        """Return the most bytes of all `lanes` at each event, besides those that must be resident.

        Args:
            lanes: how many.
            shown: bytes of outputs that are kept for an observer. Default 0.

        Returns:
            [events]
        """
        return self.untouched + (lanes - 1) * self.apart + shown

    def others(self, lanes: int) -> int:
        """Return the bytes that all lanes but one have of their own and that must be resident."""
        return (lanes - 1) * self.stays

    def room(self, budget: int, waits: Bytes) -> tuple[int, ...] | None:
        """Return the capacity for waiting lanes in each step phase; None where all of them fit.

        Args:
            budget: bytes for kept and waiting ones.
            waits: as above.

        Returns:
            Bytes, the first turn first; negative where there is no room for the lane that runs.
        """
        kept = self.kept.live.sum(1)
        if not (kept + waits > budget).any():
            return None
        count = int(self.turns.max(initial=0))
        everywhere = self.turns == 0
        return tuple(
            _room(budget, kept[here], waits[here])
            for here in (everywhere | (self.turns == turn) for turn in range(1, count + 1))
        )

    def later(self, owner: str) -> tuple[int, ...]:
        """Return the bytes of an owner that are added after each step phase, first one first."""
        if owner not in self.kept.owners or not len(self.turns):
            return ()
        there = self.kept.live[:, self.kept.owners.index(owner)]
        turns = range(1, int(self.turns.max()) + 1)
        return tuple(int(there.max() - there[self.turns == turn].max()) for turn in turns)

    def step(self, held: Mapping[str, int], waits: Bytes, room: Room) -> Timeline:
        """Return the timeline of the step, with the bytes `held` throughout, by owner.

        Args:
            held: owner -> bytes.
            waits: as above.
            room: of these; None lets all of it stay.
        """
        ledger = self.kept.plus({**held, WAITING: 0})
        if isinstance(room, tuple):
            of_turn = np.array([max(room), *room])
            there = np.minimum(waits, of_turn[self.turns])
        else:
            there = waits if room is None else np.minimum(waits, room)
        ledger.live[:, ledger.owners.index(WAITING)] += there
        return ledger


def _room(budget: int, kept: Bytes, waits: Bytes) -> int:
    """Return the most bytes that may wait next to those that must be resident in a step phase."""
    short = kept + waits > budget
    return budget - int(kept[short].max()) if short.any() else int(waits.max(initial=0))


def least(room: Room) -> int:
    """Return the smallest capacity of any step phase; 0 where all that waits may be resident."""
    return min(room, default=0) if isinstance(room, tuple) else room or 0


def in_turn(room: Room, turn: int) -> int:
    """Return the capacity in a step phase, from 1; in one without a forecast, the smallest."""
    if isinstance(room, tuple):
        return room[turn - 1] if 1 <= turn <= len(room) else least(room)
    return room or 0
