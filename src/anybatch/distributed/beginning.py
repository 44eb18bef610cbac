"""Facts that ranks exchange when a step begins, or expect without waiting.

The size of the full batch is known when all ranks have exchanged theirs, and a waiting rank is
idle. If all of them had the same values in several steps, a rank with these values continues as if
the others had them too, and states so in its next collective. A rank with other values begins at
once, as in a first step; the others learn of it, and run the step again.

    rank 0:  mu_0 forward ──> begin and denominators ──> ...        (as in the steps before)
    rank 1:  begin: 7 samples, not 8 ──────┘  rank 0 hears it, and begins again
"""

from __future__ import annotations

from typing import NamedTuple

from anybatch.core.undo import AgainError
from anybatch.distributed.alike import Alike, refuse_unlike
from anybatch.errors import BatchError, RankError

ANY = -1
"""Samples of all ranks that a micro-batch is good for, where that does not depend on them."""

TIMES = 3
"""Steps to which all ranks have brought the same, before it is expected."""

Rows = list[list[float]]
"""The values of each rank, in numbers: of `Here`, then of `Alike`."""


class Here(NamedTuple):
    """Facts that this rank brings to a step.

    Attributes:
        size: samples.
        micro_batch: samples in a micro-batch.
        covers: the samples of all ranks for which it holds; `ANY` if it does not depend on them, 0
            if they must be counted first.
        lanes: 1 where samples meet in BatchNorm.
        trains: 1 with backward.
        coupled: 1 if the loss needs all outputs at once.
    """

    size: int
    micro_batch: int
    covers: int
    lanes: int
    trains: int
    coupled: int


class UnexpectedError(AgainError):
    """Error for unexpected facts of another rank: the step begins again."""


class Habit:
    """Facts that all ranks have brought to their last steps."""

    def __init__(self) -> None:
        self._rows: Rows = []
        self._times = 0

    def expected(self, mine: list[float], rank: int) -> Rows | None:
        """Return the facts of all ranks if `mine` predicts them; None if ranks must exchange."""
        same = self._times >= TIMES and self._rows[rank] == mine
        return self._rows if same else None

    def note(self, rows: Rows) -> None:
        """Record the facts of all ranks."""
        self._times = self._times + 1 if rows == self._rows else 1
        self._rows = rows


class Beginning:
    """Mini-batch over all ranks, from the facts of each.

    Args:
        rows: of all ranks.
        rank: of this one.

    Attributes:
        sizes: samples of each rank.
        size: N_B over all ranks.
        begin: the place of this rank's first sample among them.
        first: the first rank that has samples.
        micro_batch: the smallest of any rank that has samples.
        lanes: samples meet in BatchNorm on some rank.
        coupled: some rank knows that the loss needs all outputs.
        settled: no rank has to plan for more samples than it has.

    Raises:
        BatchError: no rank has a sample.
        RankError: some call `backward`, others `evaluate`; or they are not alike.
    """

    def __init__(self, rows: Rows, rank: int) -> None:
        numbers = len(Here._fields)
        every = [Here(*map(int, row[:numbers])) for row in rows]
        self.sizes = [one.size for one in every]
        self.size = sum(self.sizes)
        self.begin = sum(self.sizes[:rank])
        if self.size == 0:
            raise BatchError("a batch must hold at least one sample, and no rank has any")
        if len({one.trains for one in every}) > 1:
            said = ", ".join(f"rank {r}: {_CALL[bool(o.trains)]}" for r, o in enumerate(every))
            raise RankError(f"all ranks must make the same step, and they do not ({said})")
        refuse_unlike([Alike(*row[numbers:]) for row in rows])
        self.first = next(r for r, size in enumerate(self.sizes) if size)
        self.micro_batch = min(one.micro_batch for one in every if one.size)
        self.lanes = any(one.lanes for one in every)
        self.coupled = any(one.coupled for one in every)
        self.settled = all(one.covers == ANY or one.covers >= self.size for one in every)


_CALL = {True: "backward", False: "evaluate"}
