"""Recorded steps, found by their first cuts, and the course of each within a memory.

A step that differs from the recording is recorded again: more often in a row the more often that
happens, for shapes may change from step to step. A step is planned once for every limit and number
of other bytes.

    recorded ──> found by its first cut ──> course within a memory ──> followed ── missed ┐
       ^                                                                                  │
       └──────────────────────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

from anybatch.core.links import Link
from anybatch.errors import BudgetError
from anybatch.offload.course import Course, set_course
from anybatch.offload.mover import Mover
from anybatch.offload.recording import Cut, Recording
from anybatch.offload.watch import StepRecorder, gradient_bytes

FAST = 1e12
"""Bytes a second of a link that nothing has gone over."""

MOST = 8
"""Steps of a signature that are recorded in a row, at most, while shapes change."""

CAPACITY = 16
"""Recorded steps of a signature that are cached at a time."""


class ScheduleCache:
    """Recorded steps by first cut, and the number of steps to record before the next plan.

    Attributes:
        to_record: steps that are recorded before one is planned again.
        recorded: the steps, by their first cuts.
    """

    def __init__(self) -> None:
        self.to_record = 1
        self.recorded: dict[Cut, Recorded] = {}
        self._misses = 0

    def learn(self, one: Recorded) -> None:
        """Take in a step that was recorded; one that has saved nothing needs no course."""
        self.to_record -= 1
        cuts = one.recording.cuts
        if cuts:
            if len(self.recorded) == CAPACITY:
                del self.recorded[next(iter(self.recorded))]
            self.recorded[cuts[0]] = one

    def missed(self) -> None:
        """Have the next ones recorded: a step has done nothing that was recorded."""
        self._misses += 1
        self.to_record = min(self._misses, MOST)


class Recorded:
    """A recorded step, and the courses that were set for it.

    Args:
        recording: the step.
        link: how fast storages have gone.
        watch: recorded it; has the leaves whose gradients may exist by now. None (default) if other
            bytes are counted elsewhere.
        there: bytes that were allocated before, if counted. Default 0.

    Attributes:
        recording: the step.
    """

    def __init__(
        self, recording: Recording, link: Link, watch: StepRecorder | None = None, there: int = 0
    ) -> None:
        self.recording, self._link = recording, link
        self._leaves = {} if watch is None else watch.leaves
        self._then = there or (0 if watch is None else watch.gradients)
        self._courses: dict[tuple[int, int], Course | None] = {}

    def more(self, there: int) -> int:
        """Return the bytes there now that were not: on the CPU gradients, on CUDA anything."""
        leaves = (leaf for ref in self._leaves.values() if (leaf := ref()) is not None)
        return max(0, (there or sum(map(gradient_bytes, leaves))) - self._then)

    def course(self, memory: int, more: int = 0) -> Course | None:
        """Return the course of the step within a memory; None where no course fits.

        Args:
            memory: bytes.
            more: bytes that are there by now and were not. Default 0.
        """
        key = memory, more
        if key not in self._courses:
            try:
                self._courses[key] = set_course(self.recording, memory, self._link, more)
            except BudgetError:
                self._courses[key] = None
        return self._courses[key]


def link_of(mover: Mover) -> Link:
    """Return how fast storages have gone so far."""
    rates = [size / spent if spent else FAST for size, spent in mover.rates]
    return Link(out=rates[0], back=rates[1])
