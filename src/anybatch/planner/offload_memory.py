"""Choice of a micro-batch size with saved tensors offloaded, and of the bytes to offload.

Smaller micro-batches send less: the same bytes hold a larger share of them. Larger ones compute
faster. So the first step is in the size that sends least, and steps in others tell. Where nothing
fits otherwise, the first one runs dry once more on real rows, all of it offloaded, because kernels
may have workspace that no fake shows; that also measures the speed of the store.

    floor on fakes <= budget ──> sizes ──> one ──> recorded on real rows ──> capacity, stall
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import takewhile
from typing import Any, NamedTuple

import torch

from anybatch.core.absent import absent
from anybatch.core.batch import count_micro_batches
from anybatch.core.plan import OffloadPlan
from anybatch.core.plan_sections import Candidate, Link
from anybatch.core.units import show_samples
from anybatch.errors import BudgetError, NotYetError
from anybatch.execution.signature import MICRO_BATCHES, Case, RunPlan, few, first_rows
from anybatch.memory.ledger import Timeline
from anybatch.memory.meter import STEP, Meter
from anybatch.memory.spill import clocked, maker, require_space
from anybatch.memory.stores import BLOCK, BOUNCE, Store
from anybatch.offloading.course import Recording, set_course
from anybatch.offloading.mover import SMALL, Mover
from anybatch.offloading.recorder import FAST, StepRecorder, link_of
from anybatch.offloading.saved_tensors import StepHooks, without_outside
from anybatch.offloading.unroll import Stretch, chained
from anybatch.planner import rehearsal
from anybatch.planner.forecast import Forecast, merged, total
from anybatch.planner.memory_model import MemoryModel, finite
from anybatch.planner.search import doubling

MOVED = 0.5
"""Share of the excess that has to move at least: the rest may be recomputed instead."""

SAVED = "saved tensors"
"""The owner of resident saved tensors, where some of them are offloaded."""


WORTH = 10
"""Steps that a dry run may take as long as, to try whether offloading is faster."""

KERNEL = 250e-6
"""About the seconds of a kernel in a dry run on fakes; with shapes that are new it takes longer."""


class OffloadedSizes(MemoryModel):
    """Choice of a size with saved tensors offloaded, for one signature."""

    place = "offloaded"
    _steps: dict[int, OffloadedStep]

    @cached_property
    def largest(self) -> int:
        """Return the most samples that fit fully offloaded, of 1, 2, 4 ... and most; or 0."""
        if self._request.full_batch:
            return self._size if self._most >= self._size and self.fits(self._size) else 0
        *fitting, last = [0, *takewhile(self.fits, doubling(self._most))]
        return last if fitting or not self.fits(self._most) else self._most

    def fits(self, n: int) -> bool:
        """Return whether micro-batches of `n` fit with all saved tensors offloaded."""
        return self.floor(n) <= self._budget

    def pays(self, seconds: float) -> bool:
        """Say whether a dry run takes no longer than a few steps of so many `seconds`.

        Its kernels tell, and no clock. Something must be large enough to offload: the activations
        of the undivided batch are more than any storage of them.
        """
        owners = self.foreseen.owners(self._size, self._size)
        if self.foreseen.case is None or owners.get(STEP, 0) < SMALL:
            return False
        kernels = MICRO_BATCHES * len(self.foreseen.undivided.at(self._size).events)
        return KERNEL * kernels <= WORTH * seconds

    def moving(self, n: int) -> float:
        """Return a lower bound on the seconds of copies in a step in micro-batches of `n`."""
        much = max(0, self.foreseen.peak(n, self._size) - self._budget)
        link, count = self._link, count_micro_batches(self._size, n)
        return MOVED * much * count * (1 / link.out + 1 / link.back)

    @cached_property
    def _link(self) -> Link:
        """How fast a few bytes have gone where saved tensors would, and returned."""
        owners = self.foreseen.owners(1, self._size)
        available = self._budget - sum(owners.values()) + owners.get(STEP, 0)
        try:
            return clocked(self._where, min(BOUNCE, max(available, BLOCK)), self._device)
        except OSError:  # a trial will say it
            return Link(out=FAST, back=FAST)

    def least(self, cap: int) -> int:
        """Return the size up to `cap` with the fewest bytes offloaded; the larger on a tie."""
        rehearsed = [n for n in self._steps if n <= cap and self.fits(n)]
        count = partial(count_micro_batches, self._size)
        sent = {n: self._steps[n].within(self._budget).copies(count(n))[0] for n in rehearsed}
        return min(sent, key=lambda n: (sent[n], -n))

    def rows(self, n: int = 0) -> tuple[Candidate, ...]:
        """Return the sizes that fit with all offloaded, of those recorded so far, and `n`."""
        return tuple(
            Candidate(
                k, one.within(self._budget).predicted, finite(self._seconds.get(k)), offloaded=True
            )
            for k, one in sorted(self._steps.items())
            if k == n or one.floor <= self._budget
        )

    def planned(self, n: int, *, checked: bool = False) -> RunPlan:
        """Return how a batch is run in micro-batches of `n`, `checked` on real rows or not."""
        if self.fits(n):
            require_space(self._step(n).most, self._where)
            if checked and self.foreseen.case is not None and absent() is None:
                self._step(n, real=True)
        if not self.fits(n):
            fits = 0 if self._request.full_batch else self._most_below(n)
            cut = "undivided" if n >= self._size else f"with micro-batches of {show_samples(n)}"
            raise self._too_small(
                self.floor(n),
                f"{cut}, with all saved tensors offloaded,",
                self._step(n).all_owners,
                size=f"micro_batch={fits} or less, or " if fits else "",
            )
        found, foreseen = self._step(n), self.foreseen
        fitted = found.within(self._budget)
        sent, remade, stall = fitted.copies(count_micro_batches(self._size, n))
        owners = found.all_owners
        resident = fitted.predicted - total(owners)
        if resident > 0:
            owners = merged(owners, {SAVED: resident})
        memory = self._memory(
            owners,
            fitted.predicted,
            how=", with all saved tensors offloaded",
            floor=min(one.floor for one in self._steps.values()),
            candidates=self.rows(n),
        )
        offload = OffloadPlan(
            store=self._request.spill.store(self._device),
            folder=self._request.spill.folder,
            capacity=fitted.capacity,
            saved=found.saved,
            sent=sent,
            most=found.most,
            stall=stall if found.clocked else None,
            remade=remade,
        )
        within = {"budget": self._budget, "most": fitted.predicted}
        passes = partial(chained, fitted.stretches, clocked=found.clocked, **within)
        coupled, loss = foreseen.inspection.coupled, foreseen.inspection.loss
        return RunPlan(n, False, memory, coupled, loss, offload=offload, passes=passes)

    @property
    def smallest(self) -> int:
        """Return the size that holds the least: one sample, or all, without sums of gradients."""
        if self._request.full_batch or self._most < self._size:
            return self._size if self._request.full_batch else 1
        return min((1, self._size), key=lambda n: (self.floor(n), n))

    def floor(self, n: int) -> int:
        """Return the fewest bytes in which micro-batches of `n` can be run."""
        return self._step(n).floor

    def saved(self, n: int) -> int:
        """Return the bytes of saved tensors of `n` samples; 0 is the size with least memory."""
        return self._step(n or self.smallest).saved

    def _most_below(self, n: int) -> int:
        """Return the most samples below `n` that fit; 0 for none."""
        low, high = 0, n
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        return low

    def _step(self, n: int, *, real: bool = False) -> OffloadedStep:
        """Return a dry run, which is made once; a `real` one on rows, in place of any."""
        if real or n not in self._steps:
            fakes = None if real else self.foreseen.case
            case = fakes or self._request.case()
            make = maker(self._where, self._device) if fakes is None else None
            found = rehearse_offloaded(self.foreseen, case, n, self._size, make, self._budget)
            self._steps[n] = found
        return self._steps[n]

    @property
    def _device(self) -> torch.device:
        return self._request.case().device

    @property
    def _where(self) -> str:
        return self._request.spill.where(self._device)


# Dry run of a step with all saved tensors offloaded: its floor, and its plan for a budget.
#
# A dry run on tensors without data yields the bytes of a step; with hooks that drop all saved
# tensors it yields the rest: the floor of a step out of core. The same dry run records each
# micro-batch for the planners, so a budget is turned into an offload plan before anything has run.
# On real rows, with a real store, it also yields seconds.
#
#     ledger   states, gradients, inputs ... │ mu_0: floor ... course ... │ mu_1 ...
#     budget   M - what is there beside it  = available to a micro-batch

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
        """Return the offload plan of the step within a budget of its floor or more."""
        if self.floor > budget:
            raise BudgetError("below the floor", needed=self.floor, budget=budget)
        held = total(self.held)
        there = [held + part.there for part in self.parts]
        stretches = tuple(
            Stretch(nbytes, set_course(part.recording, budget - nbytes, self.link))
            for nbytes, part in zip(there, self.parts, strict=True)
        )
        predicted = max(
            total(self.other_peak),
            held + self.between,
            *(nbytes + course.predicted for nbytes, course in stretches),
        )
        first = [part.there for part in self.parts if part.first]
        others = [part.there for part in self.parts if not part.first] or first
        most = predicted - held
        capacity = most - max(first or others), most - max(others)
        return Fitted(predicted, capacity, stretches)


@dataclass(frozen=True)
class Fitted:
    """Offload plan of a step within a budget.

    Attributes:
        predicted: bytes that it holds at most.
        capacity: bytes that its first micro-batch may make, and any other.
        stretches: its first micro-batches in order, with the bytes that are live next to each.
    """

    predicted: int
    capacity: tuple[int, int]
    stretches: tuple[Stretch, ...]

    def copies(self, count: int) -> tuple[int, int, float]:
        """Return the bytes offloaded and recomputed in a step of `count` micro-batches, and a wait.

        It is the seconds for which the step waits. Micro-batches that were not rehearsed are like
        the last one.
        """
        courses = [course for _, course in self.stretches]
        every = [*courses[:count], *courses[-1:] * (count - len(courses))]
        sent, remade = sum(one.sent for one in every), sum(one.remade for one in every)
        return sent, remade, sum(one.stall for one in every)


def rehearse_offloaded(
    foreseen: Forecast,
    case: Case,
    n: int,
    size: int,
    make: Callable[[], Store] | None = None,
    tries: int = 0,
) -> OffloadedStep:
    """Run a step with its saved tensors offloaded, on fake tensors or real rows.

    `make` returns the store of a real one, which may hold `tries` bytes during trials of
    recomputation; fakes have no store, and no values to compare.
    """
    divided, inspection = foreseen.divides(n, size), foreseen.inspection
    held = foreseen.throughout(n, size)
    if not divided and foreseen.copied:  # seen on real rows inside a step, which has its own copy
        held = merged(held, {"buffers": foreseen.copied})
    inside = tries - total(held) if make is not None else 0

    case = _rows(case, n if divided else size, size)
    recorder = Recorder(case.device, make, inside)
    with closing(recorder.mover):
        if divided:
            case = replace(first_rows(case, size), global_samples=foreseen.global_samples)
            line = rehearsal.divided(case, n, inspection, accumulator=False, sends=recorder)
        else:
            line = rehearsal.full_batch(case, size, inspection, sends=recorder)[0]
    parts = tuple(recorder.parts)
    live, tried = line.live.sum(1), recorder.tried
    spans = [range(part.begin, part.end) for part in parts]
    outside = [int(b) for t, b in enumerate(live) if not any(t in span for span in spans)]
    return OffloadedStep(
        owners=foreseen.summed(_without(line, tried)),
        between=max([*outside, total(line.final())]),
        parts=parts,
        link=LINK if make is None else link_of(recorder.mover),
        held=held,
        other_peak=foreseen.other_peak(n, size),
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

    They go to a store that `make` returns, or nowhere; `tries` bytes may be live during trials of
    recomputation.

    Attributes:
        mover: of saved tensors; it knows how fast they went and returned.
        parts: the micro-batches so far.
        tried: the events in which it was tried to compute something again.
    """

    meter: Meter

    def __init__(self, device: torch.device, make: Callable[[], Store] | None, tries: int) -> None:
        self._device, self._tries = device, tries
        self.mover = Mover(make or Nowhere, device)
        self.parts, self.tried = list[RehearsedMicroBatch](), set[int]()

    def run(self, work: Callable[[], None], size: int, *, first: bool) -> None:
        """Do `work`, forward and backward of a micro-batch of `size` samples."""
        del size
        there, begin = self.meter.live, self.meter.events
        watch = StepRecorder(self._device, max(0, self._tries - there), None)
        with StepHooks(self.mover, self._device, watch, {}):
            work()
        if self.meter.events - begin != watch.events:
            raise NotYetError(
                "to offload saved tensors, each kernel of a step must run in two dry runs, and "
                "some run in one only (sparse tensors make others): give more memory, so that none "
                "is offloaded, or dense tensors (sparse=False)"
            )
        self.tried.update(begin + t for aside in watch.asides for t in aside)
        self.parts.append(
            RehearsedMicroBatch(first, there, begin, self.meter.events, without_outside(watch))
        )


class Nowhere:
    """A store of tensors without data: it keeps and copies nothing."""

    def drop(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def writing(self, *_: Any, **__: Any) -> Callable[[], None]:
        """Return a function that does nothing."""
        return self.drop

    close, reading = drop, writing
