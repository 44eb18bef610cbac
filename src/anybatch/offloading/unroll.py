"""Timeline of a planned step under `offload`: bytes by owner, and copies under way.

A schedule counts bytes stage by stage and has no clock; a simulation has the clock and one sum of
bytes. Run together they show where every storage is at each moment:

    storage   made ── saved ── on its way out ── copied ── away ── on its way back ── saved ── dead
                               └──── copy ───┘                     └──── copy ────┘

Bytes count until they are freed, so a storage whose copy has ended is still resident; and from the
moment at which the schedule requests them, so one that waits for the link is on its way back
already. The sums are those that the schedule was planned with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from anybatch.core.plan_sections import Interval, Link
from anybatch.memory.ledger import Move, Phase, StepTimeline, Timeline, joined
from anybatch.offloading.course import Course
from anybatch.offloading.schedule import Schedule, Simulation, Trace, simulate

THERE, REST, SAVED = "weights, inputs, gradients", "kernels, new gradients", "saved"
LEAVING, COPIED, RETURNING = "on its way out", "copied, not given up", "on its way back"
OWNERS = (THERE, REST, SAVED, LEAVING, COPIED, RETURNING)
"""Owners: existing tensors; operands of kernels and new gradients; saved tensors in four states."""


class _Change(NamedTuple):
    """Change of variable `v` to `state` at `time`; "" for offloaded or dead."""

    time: float
    v: int
    state: str
    why: str


def unroll(trace: Trace, schedule: Schedule, link: Link, *, there: int = 0) -> StepTimeline:
    """Return a scheduled step as it passes.

    Args:
        trace: the step; its functions have their seconds.
        schedule: made for it.
        link: how fast variables move.
        there: bytes in addition to the trace, resident all the time.

    Raises:
        ScheduleError: as from `simulate`.

    Returns:
        The step; its peak is `there` and that of the simulation.
    """
    run = simulate(trace, schedule, link)
    changes = [_Change(0.0, v, _owner(trace, v), "begin") for v in trace.before]
    changes += _changes(trace, schedule, run)
    sizes = [variable.size for variable in trace.variables]
    moves = [
        Move(trace.variables[v].name, sizes[v], back, one.begin, one.end)
        for back, each in ((False, run.outs), (True, run.ins))
        for v, one in each
    ]
    return _played(changes, sizes, there, schedule.budget + there, moves, run.runs, run.seconds)


def of_course(course: Course) -> StepTimeline:
    """Return a step under `offload` as it passes when it follows `course`."""
    if course.stages is None:
        return _on_demand(course)
    schedule = Schedule("", course.budget - course.there, course.stages)
    return unroll(course.step.trace, schedule, course.link, there=course.there)


def _owner(trace: Trace, v: int) -> str:
    variable = trace.variables[v]
    return REST if variable.stays else SAVED


def _changes(trace: Trace, schedule: Schedule, run: Simulation) -> Iterator[_Change]:
    """Yield the state changes of every variable; those that change a sum are in time order."""
    outs, ins = iter(run.outs), iter(run.ins)
    copied: dict[int, float] = {}
    here: dict[int, float] = {}
    last = {v: i for i, stage in enumerate(schedule.stages) for v in stage.frees}
    clock = 0.0
    for i, stage in enumerate(schedule.stages):
        for v in stage.frees:
            clock = max(clock, copied[v], here.pop(v, 0.0))
            yield _Change(clock, v, "", "free")
        for v in stage.ins:
            _, way = next(ins)
            here[v] = way.end
            yield _Change(clock, v, RETURNING, "bring")
            yield _Change(way.end, v, SAVED, "there again")
        if i == len(trace.functions):
            return
        function, at = trace.functions[i], run.runs[i]
        clock = at.end
        for v in function.makes:
            here[v] = at.end
            yield _Change(at.begin, v, _owner(trace, v), function.name)
        for v in trace.dies[i]:
            yield _Change(at.end, v, "", function.name)
        for v in stage.outs:
            _, way = next(outs)
            copied[v] = way.end
            yield _Change(way.begin, v, LEAVING, "leave")
            wanted = last.get(v, -1) <= i  # again, before its bytes were
            yield _Change(way.end, v, SAVED if wanted else COPIED, "copied")


def _on_demand(course: Course) -> StepTimeline:
    """Return a step that offloads everything as soon as possible, to return when needed.

    The storages of an interval and the peak of its rest need not be there at once: the recorded
    peak bounds their sum.
    """
    recording, link = course.recording, course.link
    limit = recording.peak - recording.outside
    stored = len(recording.sizes)
    sizes, changes, moves = list(recording.sizes), list[_Change](), list[Move]()
    runs, clock, offloaded = list[Interval](), 0.0, set[int]()
    last = {k: i for i, used in enumerate(recording.used) for k in used}
    for i, used in enumerate(recording.used):
        before = recording.used[i - 1] if i else frozenset()
        for k in sorted(used - before):
            if k in offloaded:
                changes.append(_Change(clock, k, RETURNING, "bring"))
                begin, clock = clock, clock + sizes[k] / link.back
                moves.append(Move(f"storage {k}", sizes[k], True, begin, clock))
            changes.append(_Change(clock, k, SAVED, "there"))
        sizes.append(max(0, min(recording.rest[i], limit - sum(sizes[k] for k in used))))
        runs.append(Interval(clock, clock + recording.seconds[i]))
        changes.append(_Change(clock, stored + i, REST, f"interval {i}"))
        clock = runs[-1].end
        changes.append(_Change(clock, stored + i, "", f"interval {i}"))
        after = recording.used[i + 1] if i + 1 < len(recording.used) else frozenset()
        for k in sorted(used - after):
            if last[k] > i and k not in offloaded:
                offloaded.add(k)
                changes.append(_Change(clock, k, LEAVING, "leave"))
                begin, clock = clock, clock + sizes[k] / link.out
                moves.append(Move(f"storage {k}", sizes[k], False, begin, clock))
            changes.append(_Change(clock, k, "", "free"))
    return _played(changes, sizes, course.there, course.budget, moves, runs, clock)


def _played(
    changes: list[_Change],
    sizes: list[int],
    there: int,
    budget: int,
    moves: list[Move],
    runs: tuple[Interval, ...] | list[Interval],
    end: float,
) -> StepTimeline:
    """Return the timeline of some state changes, sorted by time; ties are in the order received."""
    state, row = dict[int, str](), dict.fromkeys(OWNERS, 0)
    row[THERE] = there
    rows, events, seconds = [list(row.values())], ["begin"], [0.0]
    for change in sorted(changes, key=lambda change: change.time):
        before = state.get(change.v, "")
        if before == change.state or (not before and change.why in ("leave", "copied")):
            continue
        state[change.v] = change.state
        for owner, sign in ((before, -1), (change.state, 1)):
            if owner:
                row[owner] += sign * sizes[change.v]
        rows.append(list(row.values()))
        events.append(change.why)
        seconds.append(change.time)
    ledger = Timeline(OWNERS, tuple(events), np.array(rows, np.int64))
    return StepTimeline(
        title="a step under offload",
        ledger=ledger,
        budget=budget,
        seconds=tuple(seconds),
        end=end,
        runs=tuple(runs),
        moves=tuple(sorted(moves, key=lambda move: (move.begin, move.end))),
    )


# Timeline of a step of micro-batches that offload saved tensors: their courses in sequence.
#
#     bytes     there │ mu_0's course │ there │ mu_1's course │ there │ mu_2's course │ the rest
#     seconds          ──────────────> ──────────────────────> ──────────────────────>
#
# The work before, between and after them (an inspection, an update) was never timed. If it holds
# more than they do it is one event at the end, so that the peak is that of the full step.

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
    for i, (stretch, step) in enumerate(zip(stretches, steps, strict=True), start=1):
        assert step.seconds is not None
        phases.append(Phase(f"micro-batch {i}", len(seconds)))
        ledgers.append(step.ledger.plus({THERE: stretch.there}))
        seconds += [clock + at for at in step.seconds]
        runs += [Interval(clock + run.begin, clock + run.end) for run in step.runs]
        moves += [
            Move(f"{one.name} of {i}", one.size, one.back, clock + one.begin, clock + one.end)
            for one in step.moves
        ]
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
