"""Lanes that are paged between kernels, where not even one lane fits in memory.

Where samples meet in BatchNorm there are two ways for a batch that fits in no other. Undivided with
saved tensors offloaded (`planner.offload_memory`) it computes as torch does, and the widest layer
of the full batch must fit. In lanes of which everything may be evicted between two kernels
(`anybatch.memory.lane_pager`), the widest layer of one micro-batch must.

    undivided   widest layer x N_B  <= budget     chosen where it fits
    lanes       widest layer x n    <= budget     the largest n
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from anybatch.core import pytree
from anybatch.core.batch import count_micro_batches
from anybatch.core.modules import DispatchMode
from anybatch.core.optimizers import allocated, rounded, rounding
from anybatch.core.plan import OffloadPlan
from anybatch.core.plan_sections import Candidate, Memory
from anybatch.core.units import show_samples
from anybatch.execution.signature import Case, RunPlan, bytes_of, first_rows
from anybatch.memory.ledger import Bytes, Phase, StepTimeline, Timeline, joined
from anybatch.memory.lockstep_budget import Lane, filled
from anybatch.memory.meter import Meter, tensors_in
from anybatch.memory.spill import require_space
from anybatch.offloading.unroll import OUTSIDE
from anybatch.planner import rehearsal
from anybatch.planner.forecast import Forecast, merged, total
from anybatch.planner.memory_model import MemoryModel, finite
from anybatch.planner.search import doubling
from anybatch.planner.working_set import GRADIENTS, lane_of

OF_LANES = "all micro-batches, kernel by kernel"
"""The phase of lanes between two barriers, and then between the next."""

SHARED = "shared by lanes"
"""The owner of tensors that all lanes share."""

LANES = "lanes"
"""The owner of tensors of all micro-batches, the running one included."""


class LockstepPhase(NamedTuple):
    """Memory of one lockstep phase between two barriers, in bytes.

    Attributes:
        absent: later bytes of gradients and of shared tensors.
        makes: the most that a kernel makes.
        storages: sizes of the storages of lanes, with their counts; None if unclear.
        more: bytes that lanes may hold above the limit.
    """

    absent: int
    makes: int
    storages: Counter[int] | None
    more: int


class PagedLockstep(MemoryModel):
    """Choice of a size for lanes that are paged between kernels, for one signature."""

    place = "paged"
    _steps: dict[int, Widths]

    @property
    def possible(self) -> bool:
        """Whether a dry run is possible, and the batch can be divided or is over ranks."""
        return self.foreseen.case is not None and (
            self._size > 1 or self.foreseen.global_samples > 0
        )

    def fits(self, n: int) -> bool:
        """Say whether lanes of `n` samples do."""
        return self._of(n).floor <= self._budget

    @cached_property
    def largest(self) -> int:
        """The most samples, of 1, 2, 4 ..., that fit; 0 where none do.

        Larger lanes evict no less, but they wait less often and their kernels are larger. Over
        ranks all samples may be in one lane. More samples hold no less, so a few of these sizes run
        dry, and not all; the most often fit, and run first.
        """
        sizes = doubling(self._most)
        if self._most >= self._size and not self.foreseen.global_samples:
            sizes.pop()  # undivided
        if sizes and self.fits(sizes[-1]):
            return sizes[-1]
        first = bisect_left(sizes[:-1], True, key=lambda n: not self.fits(n))
        return sizes[first - 1] if first else 0

    def planned(self, n: int, *, checked: bool = False) -> RunPlan:
        """Return how a batch is run in lanes of `n` samples."""
        del checked
        found, count = self._of(n), count_micro_batches(self._size, n)
        if not self.fits(n):
            smaller = f"micro_batch={self.largest} or less, or " if n > 1 and self.largest else ""
            rest = "with all tensors that a kernel does not need offloaded,"
            step = f"in lanes of {show_samples(n)}, {rest}"
            raise self._too_small(found.floor, step, {}, size=smaller)
        spill, device = self._request.spill, self._request.case().device
        every, limit = found.every(count), found.limit(self._budget)
        sent = max(0, every - limit)
        require_space(every if sent else 0, spill.where(device))
        phases = self._phases(n)
        inside = self._fullest(n, phases)
        owners = max(inside, found.other_peak, key=total)
        memory = self._memory(
            owners,
            total(owners),
            how=", with all that a kernel does not need offloaded",
            floor=self._of(1).floor,
            candidates=self.rows(),
        )
        offload = OffloadPlan(
            store=spill.store(device),
            folder=spill.folder,
            capacity=(limit, limit),
            saved=found.holds,
            sent=sent,
            most=every if sent else 0,
            segment_extra=tuple(phase.more for phase in phases),
            segment_kernel=tuple(phase.makes for phase in phases),
        )
        coupled, loss = self.foreseen.inspection.coupled, self.foreseen.inspection.loss
        passes = partial(_passes, found, limit, count, memory)
        return RunPlan(n, False, memory, coupled, loss, True, offload, passes)

    def rows(self) -> tuple[Candidate, ...]:
        """Return the sizes worth a line in a plan: those of which a dry run was made."""
        return tuple(
            Candidate(n, one.floor, finite(self._seconds.get(n)), offloaded=True)
            for n, one in sorted(self._steps.items())
        )

    def _phases(self, n: int) -> list[LockstepPhase]:
        """Return the phases of lanes of `n` samples; none where they cannot be traced."""
        lane, found = lane_of(self.foreseen, n, self._size), self._of(n)
        case, count = self.foreseen.case, count_micro_batches(self._size, n)
        if lane is None or case is None:
            return []
        counted = found.there.get(GRADIENTS, 0)
        absent = [min(counted, size) for size in lane.later(GRADIENTS)]
        if not lane.makes or len(absent) != len(lane.makes):
            return [LockstepPhase(size, found.makes, None, size) for size in absent]
        sums, shared = Counter(allocated(leaf) for leaf in case.leaves), self._shared(lane, n)
        missing = [size + max(shared) - coming for size, coming in zip(absent, shared, strict=True)]
        phases = []
        for size, makes, (waits, runs) in zip(missing, lane.makes, lane.storages, strict=True):
            made = min(makes, found.makes)
            every = sum([waits] * (count - 1), sums + runs)
            counts = every if self._size % n == 0 else None  # a smaller lane has others
            phases.append(LockstepPhase(size, made, counts, size + found.makes - made))
        return phases

    def _fullest(self, n: int, phases: list[LockstepPhase]) -> dict[str, int]:
        """Return owner -> bytes in the phase in which all lanes hold the most.

        Later bytes are counted at their events, and lanes have as many fewer.
        """
        found = self._of(n)
        limit = found.limit(self._budget)
        every = found.every(count_micro_batches(self._size, n))
        lanes = list[int]()
        for phase in phases or [LockstepPhase(0, found.makes, None, 0)]:
            held, sizes = limit + phase.more, phase.storages
            held = min(held, every) if sizes is None else filled(sizes, held)
            lanes.append(held + phase.makes - phase.absent)
        owners = merged(found.there, {LANES: max(lanes)})
        return {owner: count for owner, count in owners.items() if count}

    def _of(self, n: int) -> Widths:
        if n not in self._steps:
            fakes = self.foreseen.case
            assert fakes is not None
            found = widths(self.foreseen, fakes, n, self._size)
            lane = lane_of(self.foreseen, n, self._size)
            shared = max(self._shared(lane, n))
            if fakes.trains:  # gradients of rows that were gathered are shared, too
                samples = max(self._size, self.foreseen.global_samples)
                shared += self.foreseen.inspection.gathers * samples
            self._steps[n] = replace(found, there=merged(found.there, {SHARED: shared}))
        return self._steps[n]

    def _shared(self, lane: Lane | None, n: int) -> list[int]:
        """Return the bytes in each phase of a lane that cannot be evicted, with other lanes'."""
        if lane is None or not lane.shared:
            return [0]
        others = lane.others(count_micro_batches(self._size, n))
        return [others + size for size in lane.shared]


def _passes(found: Widths, limit: int, count: int, memory: Memory) -> StepTimeline:
    """Return such a step as it passes: all lanes go through the kernels of one, one by one."""
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


# Memory of a lane paged between kernels: the inputs and results of its widest kernel.
#
# If all of a lane may be evicted between two kernels (`anybatch.memory.lane_pager`), a step holds
# the bytes that exist once for all lanes, and the inputs and outputs of the next kernel. A dry run
# without data yields these, and the bytes of a lane without eviction.
#
#     kernel t     needs a, b (made by this lane) ──> makes c         widest: max needs, max makes
#
# A loss of all outputs is computed by one lane, and its tensors may be evicted as well.


@dataclass(frozen=True)
class Widths:
    """Memory of a step in lanes that are paged between kernels, in bytes.

    Attributes:
        there: owner -> bytes that exist once for all lanes, the inputs of one included.
        other_peak: owner -> bytes at the peak before and after the step.
        needs: the most bytes of its lane that a kernel needs.
        makes: the most that a kernel makes.
        events: kernels of a lane, forward and backward.
        held: its bytes after each of them.
        joined: the most that a loss of all outputs has at once, which one of the lanes computes.
    """

    there: dict[str, int]
    other_peak: dict[str, int]
    needs: int
    makes: int
    events: tuple[str, ...]
    held: tuple[int, ...]
    joined: int

    @property
    def holds(self) -> int:
        """Return the most that a lane has at once."""
        return max(self.held)

    def every(self, lanes: int) -> int:
        """Return the most that so many lanes have at once."""
        return lanes * self.holds + self.joined

    @property
    def floor(self) -> int:
        """Return the fewest bytes with which such a step can be made."""
        return max(total(self.there) + self.needs + self.makes, total(self.other_peak))

    def limit(self, budget: int) -> int:
        """Return the bytes that all lanes may hold before a kernel runs, within a budget."""
        return budget - total(self.there) - self.makes


def widths(foreseen: Forecast, fakes: Case, n: int, size: int) -> Widths:
    """Rehearse a lane; `n` are all samples only where other ranks have more."""
    recorder = WidthRecorder()
    case = replace(first_rows(fakes, size), global_samples=foreseen.global_samples)
    run = partial(rehearsal.divided, sends=recorder, around=lambda: recorder.joins)
    line = run(case, n, foreseen.inspection, accumulator=False)
    last = len(recorder.spans) - 1
    full = max(range(last + 1), key=lambda i: (recorder.sizes[i], i))  # the last may be smaller
    begin, end = recorder.spans[full]

    def before_part(i: int) -> Bytes:
        at, _ = recorder.spans[i]
        there: Bytes = line.live[at - 1] if at else 0 * line.live[0]
        return there

    before = before_part(full)
    most = np.maximum(before, before_part(last))  # of inputs, and of gradients
    there = dict(zip(line.owners, map(int, most), strict=True))
    own = line.live[begin:end] - before
    if full == 0 < last:  # it makes the gradients, which are there once
        own = own[:, [owner != "gradients" for owner in line.owners]]
    lane = own.sum(1)
    held = foreseen.held(size, divided=True)
    if len(recorder.spans) == 1:  # the only one of this rank makes the gradients
        held = merged(held, {"gradients": foreseen.gradients})
    outside = [t for t in range(len(line.events)) if not any(a <= t < b for a, b in recorder.spans)]
    between = max((int(line.live[t].sum()) for t in outside), default=0) - sum(map(int, most))
    # A loss of all outputs takes rows of all lanes, which are sent to other ranks, too.
    brought = _brought(foreseen, case, n, size) if foreseen.inspection.coupled else 0
    return Widths(
        there={owner: count for owner, count in merged(there, held).items() if count},
        other_peak=foreseen.other_peak(n, size),
        # Pieces are of gradients, when lanes hold nothing.
        needs=max(recorder.needs, recorder.joins.needs + brought, foreseen.pieces),
        makes=max(recorder.makes, recorder.joins.makes),
        events=line.events[begin:end],
        held=tuple(max(0, int(count)) for count in lane),
        joined=max(0, between) if foreseen.inspection.coupled else 0,
    )


def _brought(foreseen: Forecast, case: Case, n: int, size: int) -> int:
    """Return the bytes of the outputs and targets of all samples, in micro-batches of `n`."""
    there = [t for _, t in pytree.tensors(case.rows.targets) if t.dim()]
    row = foreseen.inspection.shows + sum(-(-bytes_of(t) // max(len(t), 1)) for t in there)
    tensors = count_micro_batches(size, n) * (len(foreseen.inspection.layout) + len(there))
    return size * row + tensors * (rounding(case.device) - 1)


class WidthRecorder:
    """Recorder of the bytes that kernels of micro-batches need and make; nothing is evicted.

    Attributes:
        needs: the most bytes of its micro-batch that a kernel has needed.
        makes: the most bytes that a kernel has made.
        spans: where each micro-batch begins and ends, in kernels.
        sizes: samples of each.
    """

    meter: Meter

    def __init__(self) -> None:
        self.needs = self.makes = 0
        self.spans, self.sizes = list[tuple[int, int]](), list[int]()

    @cached_property
    def joins(self) -> KernelBytes:
        """The recorder of the kernels of a loss of all outputs."""
        return KernelBytes(self.meter)

    def run(self, work: Callable[[], None], size: int, *, first: bool) -> None:
        """Do `work`, forward and backward of a micro-batch of `size` samples."""
        del first
        begin = self.meter.events
        with KernelBytes(self.meter) as kernels:
            work()
        self.needs, self.makes = max(self.needs, kernels.needs), max(self.makes, kernels.makes)
        self.spans.append((begin, self.meter.events))
        self.sizes.append(size)


class KernelBytes(DispatchMode):
    """Dispatch mode inside a meter that records the bytes that each kernel needs and makes.

    Attributes:
        needs: the most bytes made under this mode that one has needed.
        makes: the most bytes that one has made.
    """

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.needs = self.makes = 0
        self._meter = meter
        self._made: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one kernel."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            operands = _storages((args, kwargs))
            self.needs = max(self.needs, sum(self._made.get(key, 0) for key in operands))
            before = self._meter.live
            result = func(*args, **kwargs)
            made = {key: size for key, size in _storages(result).items() if key not in operands}
        self._made |= made
        self.makes = max(self.makes, self._meter.live - before)
        return result


def _storages(values: Any) -> dict[int, int]:
    """Return address and bytes of the storages of all strided tensors in `values`."""
    found: dict[int, int] = {}
    for tensor in tensors_in(values):
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            found[storage._cdata] = rounded(storage.nbytes(), tensor.device)
    return found
