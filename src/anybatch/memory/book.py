"""What lanes do in their turns, as the first of them has shown: the others do the same.

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
    """A turn, as the first lane to take it has shown."""

    def __init__(self, lane: int) -> None:
        self.lane = lane
        self.numbers: list[int] = []
        self.bytes = self.top = 0


class Book:
    """Notes every turn of the first lane that takes it.

    Attributes:
        top: the most bytes that a lane has held in one turn so far.
    """

    def __init__(self) -> None:
        self.top = 0
        self._turns: dict[int, Turn] = {}

    def begin(self, lane: int, turn: int) -> None:
        """A lane takes its turn of this number."""
        if turn not in self._turns:
            self._turns[turn] = Turn(lane)

    def uses(self, lane: int, turn: int, number: int, size: int) -> None:
        """A lane uses what it has made as its storage of this number, in an earlier turn."""
        shown = self._turns[turn]
        if shown.lane == lane:
            shown.numbers.append(number)
            shown.bytes += size

    def holds(self, turn: int, size: int) -> None:
        """A lane holds so many bytes of what it has used or made in its turn of this number."""
        shown = self._turns[turn]
        shown.top, self.top = max(shown.top, size), max(self.top, size)

    def most(self, turn: int, lane: int) -> int:
        """Return the most bytes that a lane will hold in a turn; 0 where no other has shown it."""
        return self._turns[turn].top if self.shown(turn, lane) else 0

    def shown(self, turn: int, lane: int) -> bool:
        """Say whether another lane has been through this turn before this one."""
        found = self._turns.get(turn)
        return found is not None and found.lane != lane

    def used(self, turn: int) -> Sequence[int]:
        """Return the numbers of what is used in a turn, in order; more come while it is shown."""
        found = self._turns.get(turn)
        return () if found is None else found.numbers

    def brings(self, turn: int) -> int:
        """Return the bytes of that."""
        found = self._turns.get(turn)
        return 0 if found is None else found.bytes
