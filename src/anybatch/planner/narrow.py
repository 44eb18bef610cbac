"""Lanes that are paged between kernels, where not even one lane fits in memory.

Where samples meet in BatchNorm there are two ways for a batch that fits in no other. Undivided with
its saved tensors away (`anybatch.planner.leaving`) it computes as torch does, and the widest layer
of the whole batch must fit. In lanes of which everything may leave between two kernels
(`anybatch.memory.pager`), the widest layer of one micro-batch must.

    undivided   widest layer x N_B  <= budget     taken where it fits
    lanes       widest layer x n    <= budget     the largest n

Source: design of this project, sections 5.3 and 5.7.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import NamedTuple, NoReturn

import numpy as np
import torch

from anybatch.core.absent import enough
from anybatch.core.batch import count_micro_batches
from anybatch.core.memory import Candidate, Memory
from anybatch.core.plan import Away
from anybatch.core.rounding import allocated
from anybatch.core.units import show_bytes, show_samples
from anybatch.errors import BudgetError
from anybatch.execution.kinds import Allowed
from anybatch.memory.filling import filled
from anybatch.memory.room import Lane
from anybatch.memory.spill import Spill, require_room
from anybatch.memory.step_timeline import Phase, StepTimeline
from anybatch.memory.timeline import Timeline, joined
from anybatch.offload.chain import OUTSIDE
from anybatch.planner.forecast import Forecast, merged, total
from anybatch.planner.touching import GRADIENTS, lane_of
from anybatch.planner.widths import Widths, widths

OF_LANES = "all micro-batches, kernel by kernel"
"""The phase of what lanes do between two meetings, and then between the next."""

SHARED = "shared by lanes"
"""The owner of what lanes find together and all of them use."""

LANES = "lanes"
"""The owner of what all micro-batches hold, the one that runs among them."""


class Turn(NamedTuple):
    """Memory of one lockstep phase between two barriers, in bytes.

    Attributes:
        absent: what comes later of gradients and of what all lanes share.
        makes: the most that a kernel makes.
        storages: sizes of what lanes have, and how many there are of each; None is not known.
        more: what lanes may hold beside the limit.
    """

    absent: int
    makes: int
    storages: Counter[int] | None
    more: int


class Narrow:
    """Choice of a size for lanes that are paged between kernels, for one signature.

    Args:
        foreseen: what its steps hold in memory.
        size: N_B, samples in the mini-batch.
        device: where it is computed.
        most: samples that a micro-batch may have.
        budget: bytes.
        source: where these come from, in words.
        spill: where lanes leave for.
    """

    def __init__(
        self,
        foreseen: Forecast,
        size: int,
        device: torch.device,
        *,
        most: int,
        budget: int,
        source: str,
        spill: Spill,
    ) -> None:
        self._foreseen, self._size, self._device, self._most = foreseen, size, device, most
        self._budget, self._source, self._spill = budget, source, spill
        self._widths: dict[int, Widths] = {}

    @property
    def possible(self) -> bool:
        """Whether a dry run is possible, and the batch can be divided or is over ranks."""
        return self._foreseen.case is not None and (self._size > 1 or self._foreseen.everyone > 0)

    def fits(self, n: int) -> bool:
        """Say whether lanes of `n` samples do."""
        return self._of(n).floor <= self._budget

    def best(self) -> int:
        """Return the most samples, of 1, 2, 4 ..., that fit; 0 where none do.

        What leaves of larger lanes is no less, but they meet less often and their kernels are
        larger. Over ranks all that there are may be in one lane. What holds more samples holds no
        less, so a few of these sizes are rehearsed, and not all.
        """
        undivided = self._most >= self._size and not self._foreseen.everyone
        sizes = [1 << k for k in range(self._most.bit_length()) if 1 << k < self._most]
        sizes += [] if undivided else [self._most]
        first = bisect_left(sizes, True, key=lambda n: not self.fits(n))
        return sizes[first - 1] if first else 0

    def allowed(self, n: int) -> Allowed:
        """Return how a batch is run in lanes of `n` samples.

        Raises:
            BudgetError: they do not fit.
            StoreError: what leaves has no room.
        """
        found, count = self._of(n), count_micro_batches(self._size, n)
        if not self.fits(n):
            self._refuse(n)
        every, limit = found.every(count), self._left(n)
        sent = max(0, every - limit)
        require_room(every if sent else 0, self._spill.where(self._device))
        turns = self._turns(n)
        inside = self._fullest(n, turns)
        owners = max(inside, found.beside, key=total)
        foreseen, size = self._foreseen, self._size
        memory = Memory(
            budget=self._budget,
            source=self._source,
            predicted=total(owners),
            owners=tuple(sorted(owners.items(), key=lambda pair: -pair[1])),
            floor=self._of(1).floor,
            whole=foreseen.peak(size, size),
            how=f"{foreseen.how}, all that a kernel does not need away",
            candidates=self._candidates(),
        )
        away = Away(
            store=self._spill.store(self._device),
            folder=self._spill.folder,
            rooms=(limit, limit),
            saved=found.holds,
            sent=sent,
            most=every if sent else 0,
            later=tuple(turn.more for turn in turns),
            makes=tuple(turn.makes for turn in turns),
        )
        look = foreseen.look
        passes = partial(_passes, found, limit, count, memory)
        return Allowed(
            n, False, memory, look.coupled, look.loss, lanes=True, away=away, passes=passes
        )

    def _refuse(self, n: int) -> NoReturn:
        """Raise an error with the bytes that lanes of `n` samples need.

        Raises:
            BudgetError: always.
        """
        found = self._of(n)
        smaller = f"micro_batch={self.best()} or less, or " if n > 1 and self.best() else ""
        raise BudgetError(
            f"a step must fit in memory, and in lanes of {show_samples(n)}, all that a kernel does "
            f"not need away, it needs {show_bytes(found.floor)}, and {show_bytes(self._budget)} is "
            f"there ({self._source}): give {smaller}"
            f"{enough(found.floor)} or more, smaller samples, or an optimizer that keeps less",
            needed=found.floor,
            given=self._budget,
        )

    def _candidates(self) -> tuple[Candidate, ...]:
        return tuple(Candidate(n, one.floor, away=True) for n, one in sorted(self._widths.items()))

    def _turns(self, n: int) -> list[Turn]:
        """Return the phases of lanes of `n` samples; none where they cannot be traced."""
        lane, found = lane_of(self._foreseen, n, self._size), self._of(n)
        case, count = self._foreseen.case, count_micro_batches(self._size, n)
        if lane is None or case is None:
            return []
        counted = found.there.get(GRADIENTS, 0)
        absent = [min(counted, size) for size in lane.later(GRADIENTS)]
        if not lane.makes or len(absent) != len(lane.makes):
            return [Turn(size, found.makes, None, size) for size in absent]
        sums, shared = Counter(allocated(leaf) for leaf in case.leaves), self._shared(lane, n)
        missing = [size + max(shared) - come for size, come in zip(absent, shared, strict=True)]
        turns = []
        for size, makes, (waits, runs) in zip(missing, lane.makes, lane.storages, strict=True):
            made = min(makes, found.makes)
            every = sum([waits] * (count - 1), sums + runs)
            known = every if self._size % n == 0 else None  # a smaller lane has others
            turns.append(Turn(size, made, known, size + found.makes - made))
        return turns

    def _fullest(self, n: int, turns: list[Turn]) -> dict[str, int]:
        """Return owner -> bytes in the phase in which all lanes hold the most.

        What comes later is counted where it will be, and less by as much for lanes.
        """
        found, limit = self._of(n), self._left(n)
        every = found.every(count_micro_batches(self._size, n))
        rows = [merged(found.there, {LANES: min(limit, every) + found.makes})] if not turns else []
        for turn in turns:
            room = limit + turn.more
            held = min(room, every) if turn.storages is None else filled(turn.storages, room)
            rows.append(merged(found.there, {LANES: held + turn.makes - turn.absent}))
        return {owner: count for owner, count in max(rows, key=total).items() if count}

    def _left(self, n: int) -> int:
        return self._of(n).limit(self._budget)

    def _of(self, n: int) -> Widths:
        if n not in self._widths:
            fakes = self._foreseen.case
            assert fakes is not None
            found = widths(self._foreseen, fakes, n, self._size)
            lane = lane_of(self._foreseen, n, self._size)
            shared = max(self._shared(lane, n)) + self._backwards()
            self._widths[n] = replace(found, there=merged(found.there, {SHARED: shared}))
        return self._widths[n]

    def _backwards(self) -> int:
        """Return the bytes of gradients of rows that were gathered, which all lanes share, too."""
        case, foreseen = self._foreseen.case, self._foreseen
        trains = case is not None and case.trains
        return foreseen.look.gathers * max(self._size, foreseen.everyone) if trains else 0

    def _shared(self, lane: Lane | None, n: int) -> list[int]:
        """Return the bytes in each phase of a lane that cannot be evicted, with other lanes'."""
        if lane is None or not lane.shared:
            return [0]
        others = lane.others(count_micro_batches(self._size, n))
        return [others + size for size in lane.shared]


def _passes(found: Widths, limit: int, count: int, memory: Memory) -> StepTimeline:
    """Return such a step as it passes: all lanes go through the kernels of one, in turns."""
    owners = (*found.there, LANES)
    there = list(found.there.values())
    most = memory.predicted - sum(there)  # whole storages may not fill the limit
    rows = [[*there, min(min(limit, count * held) + found.makes, most)] for held in found.held]
    ledger, phases = Timeline(owners, found.events, np.array(rows)), [Phase(OF_LANES, 0)]
    if memory.predicted > ledger.peak:
        last = Timeline(("beside",), (OUTSIDE,), np.array([[memory.predicted]]))
        ledger = joined([ledger, last])
        phases.append(Phase(OUTSIDE, len(rows)))
    return StepTimeline("", ledger, memory.budget, tuple(phases))
