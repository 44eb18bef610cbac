"""Dry run of a step with all saved tensors offloaded: its floor, and its plan for a budget.

A dry run on tensors without data yields the bytes of a step; with hooks that drop all saved tensors
it yields the rest: the floor of a step out of core. The same dry run records each micro-batch for
the planners, so a budget is turned into an offload plan before anything has run. On real rows, with
a real store, it also yields seconds.

    ledger   states, gradients, inputs ... │ mu_0: floor ... course ... │ mu_1 ...
    budget   M - what is there beside it  = available to a micro-batch
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from anybatch.core.links import Link
from anybatch.errors import BudgetError, NotYetError
from anybatch.execution.case import MICRO_BATCHES, Case, few, first_rows
from anybatch.memory.meter import Meter
from anybatch.memory.stores import BLOCK, Store
from anybatch.memory.timeline import Timeline
from anybatch.offload.chain import Stretch
from anybatch.offload.course import Course, set_course
from anybatch.offload.execute import StepHooks
from anybatch.offload.hooked import Hooked
from anybatch.offload.keeping import without_outside
from anybatch.offload.mover import Mover
from anybatch.offload.recording import Recording
from anybatch.offload.schedule_cache import FAST, link_of
from anybatch.offload.watch import StepRecorder
from anybatch.planner import rehearse
from anybatch.planner.forecast import Forecast, merged, total

LINK = Link(out=FAST, back=FAST)
"""Between a rehearsal without data and nowhere."""


class RehearsedMicroBatch(NamedTuple):
    """One micro-batch of a rehearsal.

    Attributes:
        first: it found no sums of gradients.
        there: bytes that were live when it began.
        begin: kernels counted before it.
        end: kernels counted after it.
        recording: of its own storages.
    """

    first: bool
    there: int
    begin: int
    end: int
    recording: Recording


@dataclass(frozen=True)
class OffloadedStep:
    """Recorded step with all saved tensors offloaded.

    Attributes:
        owners: owners and bytes at its peak.
        between: the most bytes that are live while no micro-batch is computed.
        parts: its first micro-batches.
        link: how fast saved tensors went and returned.
        held: bytes in addition to all this.
        other_peak: owners and bytes at the peak before and after the step.
        clocked: it was run, so its seconds are those of a step.
    """

    owners: dict[str, int]
    between: int
    parts: tuple[RehearsedMicroBatch, ...]
    link: Link
    held: dict[str, int]
    other_peak: dict[str, int]
    clocked: bool

    @property
    def floor(self) -> int:
        """Return the fewest bytes with which such a step can be made."""
        single = max(part.there + part.recording.peak for part in self.parts)
        return max(total(self.all_owners), total(self.held) + single)

    @property
    def all_owners(self) -> dict[str, int]:
        """Return owner -> bytes at the largest peak before, during or after the step."""
        return max(merged(self.owners, self.held), self.other_peak, key=total)

    @property
    def saved(self) -> int:
        """Return the most bytes of saved tensors that a micro-batch can offload."""
        return max(sum(part.recording.sizes) for part in self.parts)

    @property
    def most(self) -> int:
        """Return the bytes that the store needs for the saved tensors, in blocks."""
        return max(sum(size + BLOCK for size in part.recording.sizes) for part in self.parts)

    def within(self, budget: int) -> Fitted:
        """Return the offload plan of the step within a budget.

        Raises:
            BudgetError: it is below the floor.
        """
        if self.floor > budget:
            raise BudgetError("below the floor", needed=self.floor, budget=budget)
        held = total(self.held)
        courses = [
            set_course(part.recording, budget - held - part.there, self.link) for part in self.parts
        ]
        predicted = max(
            total(self.other_peak),
            held + self.between,
            *(held + p.there + c.predicted for p, c in zip(self.parts, courses, strict=True)),
        )
        return Fitted(predicted, self._rooms(predicted), self.parts, tuple(courses))

    def stretches(self, fitted: Fitted) -> tuple[Stretch, ...]:
        """Return the micro-batches in order, with the bytes that are live next to each."""
        held = total(self.held)
        pairs = zip(self.parts, fitted.courses, strict=True)
        return tuple(Stretch(held + part.there, course) for part, course in pairs)

    def _rooms(self, predicted: int) -> tuple[int, int]:
        """Return the bytes that the first micro-batch may make, and any other."""
        first = [part.there for part in self.parts if part.first]
        others = [part.there for part in self.parts if not part.first] or first
        most = predicted - total(self.held)
        return most - max(first or others), most - max(others)


@dataclass(frozen=True)
class Fitted:
    """Offload plan of a step within a budget.

    Attributes:
        predicted: bytes that it holds at most.
        capacity: bytes that its first micro-batch may make, and any other.
        parts: its first micro-batches.
        courses: of each of them.
    """

    predicted: int
    capacity: tuple[int, int]
    parts: tuple[RehearsedMicroBatch, ...]
    courses: tuple[Course, ...]

    def sent(self, count: int) -> int:
        """Return the bytes offloaded in a step of `count` micro-batches."""
        return sum(course.sent for course in self._all(count))

    def remade(self, count: int) -> int:
        """Return the bytes recomputed in such a step, neither resident nor offloaded."""
        return sum(course.remade for course in self._all(count))

    def stall(self, count: int) -> float:
        """Return the seconds in which such a step waits for copies."""
        return sum(course.stall for course in self._all(count))

    def _all(self, count: int) -> list[Course]:
        """Return the course of every micro-batch; those that were not rehearsed are the last."""
        found = list(self.courses[:count])
        return found + [self.courses[-1]] * (count - len(found))


def rehearse_offloaded(
    foreseen: Forecast,
    case: Case,
    n: int,
    size: int,
    make: Callable[[], Store] | None = None,
    tries: int = 0,
) -> OffloadedStep:
    """Run a step with its saved tensors offloaded, on fake tensors or real rows.

    Args:
        foreseen: forecast of such steps.
        case: on fakes, or the real one.
        n: samples in a micro-batch.
        size: N_B, samples in the mini-batch.
        make: returns the store of a real one; None (default) keeps nothing, for fakes.
        tries: bytes that a real one may hold during trials of recomputation. Default 0: no trials,
            for fakes have no values to compare.
    """
    recorders: list[Recorder] = []
    divided, inspection = foreseen.divides(n, size), foreseen.inspection
    held = foreseen.held(size, divided=divided)
    if not divided and foreseen.copied:  # seen on real rows inside a step, which has its own copy
        held = merged(held, {"buffers": foreseen.copied})
    if grown := foreseen.grown(n, size):
        held = merged(held, {"gradients": grown})
    inside = tries - total(held) if make is not None else 0

    def sends(meter: Meter) -> Recorder:
        recorders.append(Recorder(case, meter, make, inside))
        return recorders[0]

    try:
        if divided:
            case = replace(
                first_rows(_rows(case, n, size), size), global_samples=foreseen.global_samples
            )
            line = rehearse.divided(case, n, inspection, accumulator=False, sends=sends)
        else:
            line = rehearse.full_batch(_rows(case, size, size), size, inspection, sends=sends)
    finally:
        for recorder in recorders:
            recorder.close()
    parts = tuple(recorders[0].parts)
    live, tried = line.live.sum(1), recorders[0].tried
    spans = [range(part.begin, part.end) for part in parts]
    outside = [int(b) for t, b in enumerate(live) if not any(t in span for span in spans)]
    return OffloadedStep(
        owners=foreseen.summed(_without(line, tried)),
        between=max([*outside, total(line.final())]),
        parts=parts,
        link=LINK if make is None else recorders[0].link,
        held=held,
        other_peak=max(foreseen.other_peaks(n, size), key=total),
        clocked=make is not None,
    )


def _without(line: Timeline, tried: set[int]) -> Timeline:
    """Return a step without the events in which something was tried: they are no part of it."""
    retained = [t for t in range(len(line.events)) if t not in tried]
    return Timeline(line.owners, tuple(line.events[t] for t in retained), line.live[retained])


def _rows(case: Case, n: int, size: int) -> Case:
    """Return the case with rows enough, where they are real."""
    count = MICRO_BATCHES * n if n < size else n
    return case if case.fake else few(case, min(count, max(size, n)))


class Recorder:
    """Recorder of micro-batches with all their saved tensors offloaded.

    Args:
        case: the case of the dry run.
        meter: counts its bytes.
        make: returns a store; None keeps nothing.
        tries: bytes that may be live during trials of recomputation.

    Attributes:
        parts: the micro-batches so far.
        tried: the events in which it was tried to compute something again.
    """

    def __init__(
        self, case: Case, meter: Meter, make: Callable[[], Store] | None, tries: int
    ) -> None:
        self._device, self._meter, self._tries = case.device, meter, tries
        self._mover = Mover(make or Nowhere, case.device)
        self.parts: list[RehearsedMicroBatch] = []
        self.tried: set[int] = set()

    @property
    def link(self) -> Link:
        """Return how fast saved tensors went and returned."""
        return link_of(self._mover)

    def run(self, work: Callable[[], None], size: int, *, first: bool) -> None:
        """Do `work`, forward and backward of a micro-batch of `size` samples."""
        del size
        there, begin = self._meter.live, self._meter.events
        watch = StepRecorder(self._device, max(0, self._tries - there), None)
        with Hooked(StepHooks(self._mover, self._device, watch, {}), self._mover, watch):
            work()
        if self._meter.events - begin != watch.events:
            raise NotYetError(
                "to offload saved tensors, each kernel of a step must run in two dry runs, and "
                "some run in one only (sparse gradients make others): give more memory, so that "
                "none is offloaded, or sparse=False"
            )
        self.tried.update(begin + t for aside in watch.asides for t in aside)
        self.parts.append(
            RehearsedMicroBatch(first, there, begin, self._meter.events, without_outside(watch))
        )

    def close(self) -> None:
        """Release the stored tensors."""
        self._mover.close()


class Nowhere:
    """A store of tensors without data."""

    def writing(self, key: Hashable, storage: Any) -> Callable[[], None]:
        """Return a function that does nothing."""
        del key, storage
        return _nothing

    def reading(self, key: Hashable, storage: Any) -> Callable[[], None]:
        """Return a function that does nothing."""
        del key, storage
        return _nothing

    def put(self, key: Hashable, data: Tensor) -> None:
        """Keep nothing."""

    def get(self, key: Hashable, out: Tensor) -> None:
        """Fill nothing."""

    def drop(self, key: Hashable) -> None:
        """Forget nothing."""

    def close(self) -> None:
        """Forget nothing."""


def _nothing() -> None:
    """Copy nothing."""
