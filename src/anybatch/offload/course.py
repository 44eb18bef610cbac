"""Course, the plan of a recorded step: storages evicted and prefetched at each cut.

    recording ──> trace ──> default policy ──> stages ──> followed cut by cut
                  │          does not fit ──> everything leaves at once and returns on demand
                  └ with cheap storages made again, if something has to leave and that is faster

On demand it holds the bytes of the recording, which are the least that hooks can reach.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from anybatch.core.links import Link
from anybatch.core.units import show_bytes
from anybatch.errors import BudgetError
from anybatch.offload.again import Again, choices, remade
from anybatch.offload.best import plan
from anybatch.offload.recording import Recording
from anybatch.offload.schedule import Schedule, Stage
from anybatch.offload.simulate import simulate


@dataclass(frozen=True)
class Course:
    """Plan of the storages evicted, prefetched and recomputed at the cuts of a recorded step.

    Attributes:
        recording: the step.
        stages: of each interval, and of the recomputations before it; None if everything is
            offloaded and returns on demand.
        predicted: the most bytes that will be there.
        sent: offloaded bytes.
        seconds: how long the step takes, if nothing disturbs it.
        there: bytes that are there all the time: parameters, inputs, gradients of before.
        budget: bytes that the step may hold, these among them.
        link: how fast storages move.
        step: the step that is planned, in which some storages may be made again.
    """

    recording: Recording
    stages: tuple[Stage, ...] | None
    predicted: int
    sent: int
    seconds: float
    there: int
    budget: int
    link: Link
    step: Again

    @cached_property
    def dropped(self) -> frozenset[int]:
        """Return the storages that are recomputed instead of stored."""
        return frozenset(k for made in self.step.made.values() for k in made)

    @property
    def remade(self) -> int:
        """Return the bytes that are made again."""
        return sum(self.recording.sizes[k] for k in self.dropped)

    @property
    def stall(self) -> float:
        """Return the seconds in which the step only waits for copies, beyond its computation."""
        return max(0.0, self.seconds - self.step.trace.seconds)


def set_course(recording: Recording, memory: int, link: Link, more: int = 0) -> Course:
    """Plan a recorded step.

    Args:
        recording: the step.
        memory: bytes that it may hold.
        link: how fast storages move.
        more: bytes that are there by now and were not when it was recorded.

    Raises:
        BudgetError: it does not fit with everything offloaded.
    """
    there = recording.outside + more
    step = remade(recording, ())
    if step.trace.floor <= memory - there:
        course = _planned(recording, step, memory, there, link)
        assert course.stages is not None
        moved = {v for stage in course.stages for v in stage.outs}  # by the number of the storage
        if not moved:
            return course
        others = (remade(recording, chosen) for chosen in choices(recording, link, moved))
        fit = (other for other in others if other.trace.floor <= memory - there)
        courses = (_planned(recording, other, memory, there, link) for other in fit)
        return min([course, *courses], key=lambda one: one.seconds)
    if recording.peak + more > memory:
        raise too_little(recording.peak + more, memory)
    every = sum(recording.sizes)
    seconds = step.trace.seconds + every / link.out + every / link.back
    predicted = recording.peak + more
    return Course(recording, None, predicted, every, seconds, there, memory, link, step)


def _planned(recording: Recording, step: Again, memory: int, there: int, link: Link) -> Course:
    """Return the course of a step that fits."""
    schedule = wanted(plan(step.trace, memory - there, link))
    found = simulate(step.trace, schedule, link)
    sent = found.bytes_out + sum(recording.sizes[k] for k in recording.loose)
    predicted, seconds = there + found.peak, found.seconds
    stages = schedule.stages
    return Course(recording, stages, predicted, sent, seconds, there, memory, link, step)


def wanted(schedule: Schedule) -> Schedule:
    """Return a schedule without the copies of variables that no later stage frees.

    The window rule copies every variable that it passes. A storage that dies while it is copied
    would hold its bytes until the end of the copy, which no schedule counts.
    """
    freed, stages = set[int](), list[Stage]()
    for stage in reversed(schedule.stages):
        stages.append(replace(stage, outs=tuple(v for v in stage.outs if v in freed)))
        freed.update(stage.frees)
    return replace(schedule, stages=tuple(reversed(stages)))


def too_little(needed: int, budget: int) -> BudgetError:
    """Return the error for a step that does not fit with all movable storages offloaded."""
    return BudgetError(
        "a step must fit in memory, and with all saved tensors offloaded it holds "
        f"{show_bytes(needed)} (weights, gradients, and the tensors of its kernels), and the "
        f'budget is {show_bytes(budget)}: give memory="{-(-needed // 1024)}KiB" or more, or a '
        "smaller batch",
        needed=needed,
        budget=budget,
    )
