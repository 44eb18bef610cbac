"""The simulator's clock against one computed by hand, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anybatch.errors import ScheduleError
from anybatch.offloading.schedule import (
    Function,
    Interval,
    Link,
    Schedule,
    Stage,
    Trace,
    Variable,
    simulate,
)

# a is made, not used for a function, and used again; b takes its place meanwhile.
TRACE = Trace(
    (Variable("x", 2, before=True), Variable("a", 6), Variable("b", 6), Variable("c", 2)),
    (
        Function("f", (0,), (1,), seconds=1.0),
        Function("g", (0,), (2,), seconds=1.0),
        Function("h", (2,), (3,), seconds=1.0),
        Function("k", (1, 3), (), seconds=1.0),
    ),
)
OFFLOADED = Schedule(
    "", 10, (Stage(outs=(1,)), Stage(frees=(1,)), Stage(), Stage(ins=(1,)), Stage())
)
LINK = Link(out=3.0, back=2.0)


def test_the_clock_of_a_schedule_is_that_of_a_calculation_by_hand() -> None:
    # f 0-1, a leaves 1-3 and is awaited: g 3-4, h 4-5, a returns 5-8, k 8-9
    found = simulate(TRACE, OFFLOADED, LINK)
    assert found.outs == ((1, Interval(1.0, 3.0)),)
    assert found.ins == ((1, Interval(5.0, 8.0)),)
    assert [run.begin for run in found.runs] == [0, 3, 4, 8]
    assert (found.seconds, found.stall) == (9.0, 5.0)
    assert found.held == (8, 8, 8, 8, 0)
    assert (found.peak, found.bytes_out, found.bytes_in) == (8, 6, 6)


def test_without_moving_anything_a_step_takes_the_time_of_its_functions() -> None:
    found = simulate(TRACE, Schedule("", 14, (Stage(),) * 5), LINK)
    assert (found.seconds, found.stall, found.held) == (4.0, 0.0, (8, 14, 14, 8, 0))


def test_a_link_that_is_not_duplex_does_one_thing_at_a_time() -> None:
    both = (Stage(outs=(1,)), Stage(outs=(0,)), Stage(frees=(1,), outs=(3,)), Stage(), Stage())
    late = (*both[:3], Stage(ins=(1,)), Stage())
    trace = replace(TRACE, functions=(*TRACE.functions[:3], Function("k", (0, 1, 3), seconds=1.0)))
    duplex = simulate(trace, Schedule("", 14, late), LINK)
    single = simulate(trace, Schedule("", 14, late), replace(LINK, duplex=False))
    # c leaves from 4 on, for 2/3 of a second; a returns beside it, or after it
    assert duplex.ins[0][1].begin == 4.0
    assert single.ins[0][1].begin == pytest.approx(4 + 2 / 3)


def test_what_is_written_to_waits_for_its_copy_and_needs_a_new_one() -> None:
    functions = (TRACE.functions[0], Function("w", (1,), (), (1,)), *TRACE.functions[1:])
    trace = replace(TRACE, functions=functions)
    stages = (Stage(outs=(1,)), Stage(outs=(1,)), *OFFLOADED.stages[1:])
    found = simulate(trace, Schedule("", 10, stages), LINK)
    assert found.runs[1].begin == 3.0
    assert found.outs[1] == (1, Interval(3.0, 5.0))
    with pytest.raises(ScheduleError, match="must be copied before it is freed, and at stage 2"):
        simulate(trace, Schedule("", 10, (stages[0], Stage(), *stages[2:])), LINK)


def stages(**changed: Stage) -> tuple[Stage, ...]:
    return tuple(changed.get(f"at{i}", stage) for i, stage in enumerate(OFFLOADED.stages))


BAD = [
    (stages(at1=Stage()), 10, "at most its budget of 10 bytes, and at stage 1 it holds 14"),
    (stages(at3=Stage()), 10, "must be resident when it is used, and at stage 3 a is offloaded"),
    (stages(at0=Stage()), 10, "must be copied before it is freed, and at stage 1 a is not"),
    (stages(at1=Stage(frees=(1, 1))), 10, "must be resident when it is freed"),
    (
        stages(at3=Stage(ins=(1, 1))),
        20,
        "must be offloaded when it returns, and at stage 3 a is resident",
    ),
    (stages(at2=Stage(ins=(3,))), 20, "must be on the host when it returns, and at stage 2 c"),
    (stages(at3=Stage(ins=(1,), outs=(1,))), 20, "must be resident when it is copied"),
    (
        OFFLOADED.stages[:-1],
        10,
        "one stage more than its trace has functions, and there are 4 for 4",
    ),
]


@pytest.mark.parametrize(("stages", "budget", "what"), BAD, ids=[b[2][:40] for b in BAD])
def test_a_schedule_that_does_not_do_is_refused(
    stages: tuple[Stage, ...], budget: int, what: str
) -> None:
    with pytest.raises(ScheduleError, match=what):
        simulate(TRACE, Schedule("", budget, stages), LINK)


def with_a(**what: bool) -> Trace:
    first, _, *others = TRACE.variables
    return replace(TRACE, variables=(first, Variable("a", 6, **what), *others))


def test_what_must_be_there_at_the_end_or_remain_is_requested() -> None:
    gone = Schedule("", 20, (Stage(), Stage(), Stage(), Stage(outs=(1,)), Stage(frees=(1,))))
    with pytest.raises(
        ScheduleError, match="must be resident at the end, and at stage 4 a is offloaded"
    ):
        simulate(with_a(after=True), gone, LINK)
    with pytest.raises(
        ScheduleError, match="must be on the device throughout, and at stage 1 a is freed"
    ):
        simulate(with_a(stays=True), OFFLOADED, LINK)
