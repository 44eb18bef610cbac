"""Record of the storages that lanes use in their step phases, made by the first of them.

Lanes go through the same layers in the same order. So the storage that a lane makes as its 17th is
to it what the 17th of another is to that one, and what the first lane to come through a turn has
needed of what was there before, the next one will need too: it can be brought in ahead of its turn,
and what will not be needed can leave first.

    turn 3 of lane 7:   uses its 4th, 17th, 18th
    turn 3 of lane 6:   its own 4th, 17th, 18th are on their way while lane 7 computes
"""

from __future__ import annotations

from collections.abc import Sequence


class Turn:
    """Record of a step phase, made by the first lane in it."""

    def __init__(self, lane: int) -> None:
        self.lane = lane
        self.numbers: list[int] = []
        self.bytes = self.top = 0


class Book:
    """Record of every step phase, made by the first lane in it.

    Attributes:
        top: the most bytes that a lane has held in one turn so far.
    """

    def __init__(self) -> None:
        self.top = 0
        self._turns: dict[int, Turn] = {}

    def begin(self, lane: int, turn: int) -> None:
        """Record that a lane begins its step phase of this number."""
        if turn not in self._turns:
            self._turns[turn] = Turn(lane)

    def uses(self, lane: int, turn: int, number: int, size: int) -> None:
        """Record that a lane uses its storage of this number, made in an earlier step phase."""
        shown = self._turns[turn]
        if shown.lane == lane:
            shown.numbers.append(number)
            shown.bytes += size

    def holds(self, turn: int, size: int) -> None:
        """Record the bytes used or made that a lane holds in its step phase of this number."""
        shown = self._turns[turn]
        shown.top, self.top = max(shown.top, size), max(self.top, size)

    def most(self, turn: int, lane: int) -> int:
        """Return the most bytes that a lane will hold in a step phase; 0 if no other has run it."""
        return self._turns[turn].top if self.shown(turn, lane) else 0

    def shown(self, turn: int, lane: int) -> bool:
        """Return whether another lane has run this step phase before this one."""
        found = self._turns.get(turn)
        return found is not None and found.lane != lane

    def used(self, turn: int) -> Sequence[int]:
        """Return the numbers of storages used in a step phase, in order; a list that may grow."""
        found = self._turns.get(turn)
        return () if found is None else found.numbers

    def brings(self, turn: int) -> int:
        """Return the bytes of that."""
        found = self._turns.get(turn)
        return 0 if found is None else found.bytes
