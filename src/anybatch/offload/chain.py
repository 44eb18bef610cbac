"""Timeline of a step of micro-batches that offload saved tensors: their courses in sequence.

    bytes     there │ mu_0's course │ there │ mu_1's course │ there │ mu_2's course │ the rest
    seconds          ──────────────> ──────────────────────> ──────────────────────>

The work before, between and after them (an inspection, an update) was never timed. If it holds more
than they do it is one event at the end, so that the peak is that of the full step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from anybatch.core.links import Interval
from anybatch.memory.step_timeline import Move, Phase, StepTimeline
from anybatch.memory.timeline import Timeline, joined
from anybatch.offload.course import Course
from anybatch.offload.unroll import OWNERS, THERE, of_course

OUTSIDE = "before, between or after"
"""The phase outside of micro-batches."""


class Stretch(NamedTuple):
    """One micro-batch.

    Attributes:
        there: bytes in addition to its own.
        course: its plan.
    """

    there: int
    course: Course


def chained(stretches: Sequence[Stretch], *, budget: int, most: int, clocked: bool) -> StepTimeline:
    """Return a step as it passes.

    Args:
        stretches: its micro-batches, in order.
        budget: bytes that it may hold.
        most: bytes that it holds at most, outside of micro-batches too.
        clocked: they were run; else their seconds mean nothing, and only the order is shown.
    """
    steps = [of_course(one.course) for one in stretches]
    phases, ledgers = list[Phase](), list[Timeline]()
    seconds, runs, moves, clock = list[float](), list[Interval](), list[Move](), 0.0
    for i, (one, step) in enumerate(zip(stretches, steps, strict=True), start=1):
        assert step.seconds is not None
        phases.append(Phase(f"micro-batch {i}", len(seconds)))
        ledgers.append(step.ledger.plus({THERE: one.there}))
        seconds += [clock + at for at in step.seconds]
        runs += [Interval(clock + run.begin, clock + run.end) for run in step.runs]
        moves += [_later(move, clock, f"{move.name} of {i}") for move in step.moves]
        clock += step.end
    ledger = joined(ledgers)
    if most > ledger.peak:
        phases.append(Phase(OUTSIDE, len(seconds)))
        seconds.append(clock)
        row = [[most if owner == THERE else 0 for owner in OWNERS]]
        ledger = joined([ledger, Timeline(OWNERS, (OUTSIDE,), np.array(row, np.int64))])
    step = StepTimeline("", ledger, budget, tuple(phases))
    if not clocked:
        return step
    return StepTimeline(
        step.title, ledger, budget, step.phases, tuple(seconds), clock, tuple(runs), tuple(moves)
    )


def _later(move: Move, by: float, name: str) -> Move:
    return Move(name, move.size, move.back, by + move.begin, by + move.end)
