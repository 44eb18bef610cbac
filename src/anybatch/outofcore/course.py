"""How a step that was recorded goes from now on: what leaves and returns at which cut.

    recording ──> trace ──> default policy ──> stages ──> followed cut by cut
                              does not fit ──> everything leaves at once and returns on demand

The second holds what was held while the step was recorded, which is the least that hooks can do.
"""

from __future__ import annotations

from dataclasses import dataclass

from anybatch.errors import BudgetError
from anybatch.outofcore.best import plan
from anybatch.outofcore.recording import Recording
from anybatch.outofcore.schedule import Stage
from anybatch.outofcore.simulate import Link, simulate
from anybatch.units import show_bytes


@dataclass(frozen=True)
class Course:
    """What is done at the cuts of a recorded step.

    Attributes:
        recording: the step.
        stages: of each interval; None where everything leaves and returns on demand.
        predicted: the most bytes that will be there.
        sent: bytes that leave.
        seconds: how long the step takes, if nothing disturbs it.
        there: bytes that are there all the time: parameters, inputs, gradients of before.
        budget: bytes that the step may hold, these among them.
        link: how fast storages move.
    """

    recording: Recording
    stages: tuple[Stage, ...] | None
    predicted: int
    sent: int
    seconds: float
    there: int
    budget: int
    link: Link


def set_course(recording: Recording, memory: int, link: Link, more: int = 0) -> Course:
    """Plan a recorded step.

    Args:
        recording: the step.
        memory: bytes that it may hold.
        link: how fast storages move.
        more: bytes that are there by now and were not when it was recorded.

    Raises:
        BudgetError: it does not fit with everything away.
    """
    trace, there = recording.trace(), recording.outside + more
    if trace.floor <= memory - there:
        schedule = plan(trace, memory - there, link)
        found = simulate(trace, schedule, link)
        sent = found.bytes_out + sum(recording.sizes[k] for k in recording.loose)
        stages, predicted = schedule.stages, there + found.peak
        return Course(recording, stages, predicted, sent, found.seconds, there, memory, link)
    if recording.peak + more > memory:
        raise too_little(recording.peak + more, memory)
    every = sum(recording.sizes)
    seconds = trace.seconds + every / link.out + every / link.back
    predicted = recording.peak + more
    return Course(recording, None, predicted, every, seconds, there, memory, link)


def too_little(needed: int, given: int) -> BudgetError:
    """Return the error that says what the step holds with all away that hooks can move."""
    return BudgetError(
        f"a step must fit in memory, and with all that autograd saves away it holds "
        f"{show_bytes(needed)} (weights, gradients, and what its kernels work with), and "
        f'{show_bytes(given)} is given: give memory="{-(-needed // 1024)}KiB" or more, or a '
        "smaller batch",
        needed=needed,
        given=given,
    )
