"""Memory touched by each phase of a lane, traced by a dry run of that lane only.

A phase goes from one barrier to the next. Storages of earlier phases may be evicted until a kernel
needs them (`anybatch.memory.lane_pager`), so the memory of a running lane is that touched by its
phase so far. These tensors need not be modelled: the lane runs as in the step, through the same
BatchNorm and under the same mode, with a recorder in place of the pager.

    kernels      conv  relu  conv │ wait │ norm  relu  conv │ wait │ ...
    touched      a,x   ab    abc  │      │ cd    cde   cdef │      │
    untouched    -     -     -    │      │ ab    ab    ab   │      │

If phases do not end in BatchNorm, or one lane does not show all bytes, there is no result.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anybatch.core.barrier import meeting_in
from anybatch.core.batch import count_micro_batches
from anybatch.core.moments import Moments
from anybatch.core.norm import counters
from anybatch.core.optimizers import rounded
from anybatch.execution.gradients import HALF, gradient_dtype
from anybatch.execution.signature import MICRO_BATCHES, Case, few, first_rows
from anybatch.lockstep.batchnorm import MeetingNorms, Tracked
from anybatch.memory.lane_pager import Paging, keep
from anybatch.memory.ledger import Bytes, Timeline
from anybatch.memory.lockstep_budget import Lane, Sizes
from anybatch.memory.meter import STEP, Meter
from anybatch.planner import rehearsal
from anybatch.planner.forecast import Forecast, merged, total

INPUTS = "inputs"
"""The owner of a micro-batch on the device."""

GRADIENTS = "gradients"
"""The owner of the sums in ``.grad``, as `anybatch.planner.rehearsal` counts them."""

LOSS = "the loss of all outputs"
"""The event at which all outputs are joined."""


def lane_of(foreseen: Forecast, n: int, size: int, *, rehearsed: bool = True) -> Lane | None:
    """Return a lane of `n` samples; None where its memory depends on other lanes.

    The forecast caches dry runs of lanes; with `rehearsed` one that is missing is run.
    """
    key, case = (n, size if foreseen.inspection.coupled else 0), foreseen.case
    if rehearsed and key not in foreseen.lanes:
        foreseen.lanes[key] = None if case is None else _rehearsed(foreseen, case, n, size)
    return foreseen.lanes.get(key)


def step_of(
    lane: Lane, foreseen: Forecast, n: int, size: int, budget: int
) -> tuple[Timeline, tuple[int, ...] | None]:
    """Return a step in lanes, at the kernels of one, and the budget of waiting lanes.

    That is None where all of them fit, and negative where one lane that runs does not.
    """
    lanes, shown = count_micro_batches(size, n), size * foreseen.inspection.shows
    joins = shown if foreseen.inspection.coupled else 0  # by one lane: resident
    held = merged(foreseen.held(size, divided=True), {STEP: lane.others(lanes) + joins})
    waits = lane.waits(lanes, shown - joins)
    waiting = lane.capacity(budget - total(held), waits)
    return lane.step(held, waits, waiting), waiting


def _rehearsed(foreseen: Forecast, case: Case, n: int, size: int) -> Lane | None:
    if not _alike(foreseen, case):
        return None
    with case.mode():  # or there would be fewer of them than three, or the last one smaller
        case = few(case, n * MICRO_BATCHES)
    case = first_rows(case, n * MICRO_BATCHES)
    coupled = foreseen.inspection.coupled
    case = replace(case, size=size) if coupled else case
    lanes = LaneRehearsal(case, coupled=coupled)
    line = rehearsal.divided(case, n, foreseen.inspection, accumulator=False, sends=lanes)
    lane = lanes.lane(line)
    return lane if lane is None or not coupled else lanes.with_loss(lane, line)


def _alike(foreseen: Forecast, case: Case) -> bool:
    """Return whether a single lane behaves like each of many."""
    elsewhere = foreseen.global_samples or case.draws or case.lazy or case.paged or case.sharded
    if elsewhere or not case.trains:
        return False
    half = any(gradient_dtype(leaf) in HALF for leaf in case.leaves)  # summed between phases
    return not half and not torch.is_autocast_enabled(case.device.type)


class Touching(Paging):
    """Dispatch mode around a meter that records the untouched bytes after every kernel.

    Attributes:
        untouched: event -> bytes; of an event in which several kernels ran, the fewest.
        most: the most bytes that may be evicted since this was last set.
        makes: the most bytes that a kernel has made since this was last set.
        outside: the most bytes that may not be evicted since this was last set, of any owner.
    """

    def __init__(self, notes: StorageRecorder, meter: Meter) -> None:
        super().__init__(notes)
        self._notes, self._meter = notes, meter
        self.untouched: dict[int, int] = {}
        self.most = self.makes = self.outside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one kernel."""
        before = self._meter.live
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.makes = max(self.makes, self._meter.live - before)
        event, now = self._meter.events - 1, self._notes.untouched
        self.untouched[event] = min(now, self.untouched.get(event, now))
        holds = self._notes.holds
        self.most = max(self.most, holds)
        self.outside = max(self.outside, self._meter.live - holds)
        return result


class LaneRehearsal:
    """Runs each micro-batch of a rehearsal as a lane, and the last of them counts.

    Where it is `coupled`, lanes wait once more in some phase, for the loss of all outputs.
    """

    meter: Meter

    def __init__(self, case: Case, *, coupled: bool) -> None:
        self._case, self._coupled = case, coupled
        self._first_ends = list[int]()
        self._first: int | None = None

    def run(self, work: Callable[[], None], size: int, *, first: bool) -> None:
        """Do `work`, forward and backward of a micro-batch of `size` samples, as a lane."""
        del size
        self._notes = notes = StorageRecorder(self._case.device)
        self._begin, self._there, self._stays = self.meter.events, self.meter.live, 0
        self._first = self._begin if self._first is None else self._first
        self._ends, self._storages = list[tuple[int, int, int]](), list[tuple[Sizes, Sizes]]()
        self._makes, self._shared, self._began = list[int](), list[int](), Sizes()
        tracked = Tracked(counters(self._case.modules))
        norms = MeetingNorms(tracked, partial(keep, notes), moments=rehearsal.shapes_of_moments)
        self._touching = Touching(notes, self.meter)
        with self._touching, meeting_in(SingleLaneBarrier(notes, self._end)), norms:
            work()
        self._end()
        if first:
            self._first_ends = [event for event, *_ in self._ends]

    def _end(self) -> None:
        """End a phase of the lane, and record its bytes."""
        most = self._touching.most if self._coupled else 0
        self._makes.append(self._touching.makes)
        self._shared.append(max(0, self._touching.outside - self._there))
        ended = self._notes.sizes()
        self._storages.append((self._began | ended, self._notes.ever))
        self._began, self._notes.ever = ended, ended.copy()
        self._touching.most = self._touching.makes = self._touching.outside = 0
        self._ends.append((self.meter.events, self._notes.holds, most))
        self._stays = max(self._stays, self.meter.live - self._there - self._notes.accounted)
        self._notes.phase += 1

    def lane(self, line: Timeline) -> Lane | None:
        """Return the lane of the dry run `line`; None where a barrier was not BatchNorm's."""
        if self._notes.unknown:
            return None
        end = self._ends[-1][0]
        live, events = line.live[self._begin : end].copy(), line.events[self._begin : end]
        notes = self._touching.untouched
        untouched = np.array([notes.get(self._begin + t, 0) for t in range(len(events))])
        column = line.owners.index(STEP)
        untouched = np.minimum(untouched, live[:, column]).astype(np.int64)
        live[:, column] -= untouched
        if GRADIENTS in line.owners:
            column = line.owners.index(GRADIENTS)
            live[:, column] -= self._not_yet(line.live[:, column], live[:, column])
        resident, waiting = Timeline(line.owners, events, live), self._waiting()
        if INPUTS in line.owners:  # copied to the device, where each lane has its own
            waiting += int(live[0, line.owners.index(INPUTS)])
        phases, storages = self._by_phase(range(1, len(self._ends) + 1)), tuple(self._storages)
        each = tuple(self._makes), tuple(self._shared)
        return Lane(resident, untouched, waiting, phases, self._stays, *each, storages)

    def _not_yet(self, rehearsed: Bytes, there: Bytes) -> Bytes:
        """Return the bytes of gradients `there` that are made after the phase of each event.

        The measured lane has found sums of earlier ones. A step begins without any, and lanes are
        in the same phase: the first lane has shown those that exist by the end of one.
        """
        if len(self._first_ends) != len(self._ends):
            return np.zeros(len(there), np.int64)
        made = rehearsed[self._first_ends[-1] - 1]
        later = (made - rehearsed[t - 1] for t in self._first_ends)
        return np.clip(self._by_phase(later), 0, there)

    def with_loss(self, lane: Lane, line: Timeline) -> Lane:
        """Return the lane with the loss of all outputs, which the last of them computes.

        It was before all lanes in the dry run. Its position in a phase does not matter: it is added
        to the most that a phase has touched, and the most that waits.
        """
        before, resident = line.live[: self._first], lane.resident
        if not self._first:
            return lane
        row = before[int(before.sum(1).argmax())].copy()
        own, there = resident.live.sum(1), self._there
        if GRADIENTS in resident.owners:  # none of them is there before backward
            column = resident.owners.index(GRADIENTS)
            own, there = own - resident.live[:, column], there - int(line.live[self._begin, column])
        row[resident.owners.index(STEP)] += int(own.max()) - min(there, int(own.min()))
        events, live = (*resident.events, LOSS), np.vstack([resident.live, row])
        untouched = np.append(lane.untouched, lane.untouched.max())
        waiting = np.append(lane.at_barrier, lane.at_barrier.max())
        phases = np.append(lane.segments, 0)
        return Lane(Timeline(resident.owners, events, live), untouched, waiting, phases, lane.stays)

    def _by_phase(self, values: Iterable[int]) -> Bytes:
        """Return for each event of the lane the value of its phase."""
        events = [self._begin, *(event for event, *_ in self._ends)]
        found: Bytes = np.repeat(np.array([*values], np.int64), np.diff(events))
        return found

    def _waiting(self) -> Bytes:
        """Return the bytes of a lane at the begin of the phase of each event, or at its end."""
        before = [0, *(holds for _, holds, _ in self._ends)]
        ends = zip(before, self._ends, strict=False)
        return self._by_phase(max(first, holds, most) for first, (_, holds, most) in ends)


# Record of the storages that each phase of a lane touches, in place of a pager.
#
# A pager gets the inputs and outputs of every kernel. The recorder here gets the same, and only
# records it: for each storage of the lane the phase that needed it last, until it dies. A barrier
# of one lane ends a phase where BatchNorm would wait.
#
#     use, take ──> phase of each storage ──> untouched: those of earlier phases


class Noted:
    """Storage of a lane: its bytes, the last phase to touch it, and whether it is evictable."""

    __slots__ = ("phase", "shared", "size", "stays", "watch")

    def __init__(self, size: int, phase: int, *, shared: bool) -> None:
        self.size, self.phase, self.shared, self.stays = size, phase, shared, False
        self.watch: Any = None


class StorageRecorder:
    """Recorder of a device's storages with the interface of a pager, which evicts nothing.

    Attributes:
        limit: None, as for a pager that keeps to none within a phase.
        phase: of the lane, from 0.
        unknown: the lane was at a barrier that is not BatchNorm's.
        ever: sizes of the storages that there were in this phase, and how many of each.
    """

    def __init__(self, device: torch.device) -> None:
        self.limit: int | None = None
        self.phase, self.unknown = 0, False
        self._device, self._sharing = device.type, False
        self._all: dict[int, Noted] = {}
        self.ever: Counter[int] = Counter()

    def before(self, keys: Iterable[int]) -> None:
        """There is no limit to keep to."""

    def use(self, key: int, writes: bool) -> None:  # noqa: FBT001
        """Record that a kernel of this phase needs a storage."""
        del writes
        if key in self._all:
            self._all[key].phase = self.phase

    def take(self, key: int, tensor: Tensor) -> None:
        """Record a storage that a kernel of this phase has made."""
        if key in self._all or tensor.device.type != self._device:
            return
        storage = tensor.untyped_storage()
        noted = self._all[key] = Noted(
            rounded(storage.nbytes(), tensor.device), self.phase, shared=self._sharing
        )
        self.ever[noted.size] += 1
        noted.watch = weakref.ref(storage, partial(self._died, key))

    def keep(self, key: int) -> None:
        """Record that a storage cannot be evicted any more."""
        self.use(key, True)
        if key in self._all:
            self._all[key].stays = True

    def release(self, key: int) -> None:
        """Forget a storage that has another owner from now on."""
        self._all.pop(key, None)

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Record storages made in the body as memory that all lanes share."""
        self._sharing = True
        try:
            yield
        finally:
            self._sharing = False

    def sizes(self) -> Counter[int]:
        """Return the sizes of the storages that there are, and how many of each."""
        return Counter(one.size for one in self._all.values())

    @property
    def untouched(self) -> int:
        """Bytes that this phase has not touched, and that may be evicted."""
        return sum(one.size for one in self._offloading() if one.phase < self.phase)

    @property
    def holds(self) -> int:
        """Bytes that may be evicted."""
        return sum(one.size for one in self._offloading())

    @property
    def accounted(self) -> int:
        """Bytes that all lanes share, or that may be evicted."""
        return sum(one.size for one in self._all.values() if one.shared or not one.stays)

    def _offloading(self) -> Iterator[Noted]:
        return (one for one in self._all.values() if not (one.stays or one.shared))

    def _died(self, key: int, _watch: Any) -> None:
        self._all.pop(key, None)


class SingleLaneBarrier:
    """Barrier of a single lane, with results as large as for all; `ended` ends a phase."""

    def __init__(self, notes: StorageRecorder, ended: Callable[[], None]) -> None:
        self._notes, self._ended = notes, ended

    def reduce(
        self,
        key: Any,
        part: Callable[[], Any],
        add: Callable[[Any, Any], Any],
        finish: Callable[[Any], Any],
    ) -> Any:
        """End a phase; the value reduced over all parts is made once for all lanes."""
        del key, add
        own = part()
        self._ended()
        with self._notes.sharing():
            total = finish(own)
            if isinstance(total, Moments):
                _ = total.variance  # it is kept with them
        return total

    def exchange(self, key: Any, part: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Combine the part of this lane only, and mark the memory of all lanes as undetermined."""
        del key
        self._notes.unknown = True
        return combine([part])[0]

    def gather(self, key: Any, rows: Tensor) -> tuple[Tensor, int]:
        """The same."""
        del key
        self._notes.unknown = True
        return rows, 0
