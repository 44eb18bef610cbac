"""States that wait on the host between steps: the paper schedules all variables."""

from __future__ import annotations

from random import Random

import pytest
from benchmarks.simulators.baselines import fixed_distance, naive, on_demand, prefetch
from benchmarks.simulators.fragmentation import events
from benchmarks.simulators.window import window
from tests.unit.offloading.traces import anything, network

from anybatch.core.plan_sections import Link
from anybatch.errors import BudgetError, ScheduleError
from anybatch.offloading.policy import belady, ends, plan
from anybatch.offloading.schedule import Function, Schedule, Stage, Trace, Variable, simulate

LINK = Link(5, 7)
ALWAYS = {
    "belady": belady,
    "ends": ends,
    "naive": naive,
    "on demand": on_demand,
    "default": lambda trace, budget: plan(trace, budget, LINK),
}
SOMETIMES = {
    "window": lambda trace, budget: window(trace, budget, budget // 2),
    "prefetch": lambda trace, budget: prefetch(trace, budget, 2),
    "distance": lambda trace, budget: fixed_distance(trace, budget, 3, 2),
}


def steps() -> list[Trace]:
    found = [network(seed % 9 + 1, Random(seed)) for seed in range(12)]
    found += [anything(Random(seed)) for seed in range(20)]
    return [trace.with_states_on_the_host() for trace in found]


@pytest.mark.parametrize("name", ALWAYS)
def test_from_the_floor_on_a_step_begins_and_ends_without_its_states(name: str) -> None:
    for trace in steps():
        for budget in {trace.floor, (trace.floor + trace.peak) // 2, trace.peak}:
            schedule = ALWAYS[name](trace, budget)
            found = simulate(trace, schedule, LINK)
            assert found.peak <= budget
            assert found.bytes_in >= trace.bytes_of(trace.hosted)  # each comes at least once
            changed = [v for v in trace.hosted if trace.written[v]]
            assert found.bytes_out >= trace.bytes_of(changed)
            assert found.held[-1] == trace.bytes_of(trace.after)
        if trace.floor:
            with pytest.raises(BudgetError):
                ALWAYS[name](trace, trace.floor - 1)


@pytest.mark.parametrize("name", SOMETIMES)
def test_other_policies_do_or_say_that_they_cannot(name: str) -> None:
    did = 0
    for trace in steps():
        try:
            schedule = SOMETIMES[name](trace, (trace.floor + trace.peak) // 2)
        except BudgetError:
            continue
        did += 1
        assert simulate(trace, schedule, LINK).peak <= schedule.budget
    assert did > 5


def test_what_is_only_read_is_not_copied_to_the_host() -> None:
    variables = (Variable("w", 8, before=True, after=True, host=True), Variable("y", 1))
    trace = Trace(variables, (Function("f", (0,), (1,), seconds=1.0),))
    found = simulate(trace, belady(trace, 9), Link(1, 4))
    assert (found.bytes_out, found.bytes_in, found.seconds) == (0, 8, 3.0)


def test_what_was_written_to_is_waited_for_in_the_end() -> None:
    variables = (Variable("w", 8, before=True, after=True, host=True),)
    trace = Trace(variables, (Function("update", (0,), (), (0,), seconds=1.0),))
    found = simulate(trace, ends(trace, 8), Link(2, 4))
    assert (found.bytes_out, found.bytes_in, found.seconds) == (8, 8, 2 + 1 + 4)


def test_states_larger_than_the_device_fit_a_few_at_a_time() -> None:
    trace = network(12, Random(5))
    states = trace.bytes_of(v for v, one in enumerate(trace.variables) if one.after)
    hosted = trace.with_states_on_the_host()
    assert trace.floor >= states > hosted.floor
    assert simulate(hosted, plan(hosted, hosted.floor, LINK), LINK).peak <= hosted.floor
    assert hosted.peak == trace.peak


def test_an_allocator_is_called_for_them_when_they_arrive() -> None:
    trace = network(5, Random(1)).with_states_on_the_host()
    held = 0
    sizes: dict[int, int] = {}
    for event in events(trace, plan(trace, trace.floor, LINK)):
        held += event.size if event.size else -sizes.pop(event.v)
        if event.size:
            sizes[event.v] = event.size
        assert held <= trace.floor
    assert held == 0


def test_what_is_left_on_the_device_is_refused() -> None:
    variables = (Variable("w", 8, before=True, after=True, host=True),)
    trace = Trace(variables, (Function("f", (0,)),))
    left = Schedule("left", 8, (Stage(ins=(0,)), Stage()))
    with pytest.raises(ScheduleError, match="on the host at the end"):
        simulate(trace, left, LINK)


def test_what_is_on_the_host_between_steps_is_there_before_and_after() -> None:
    for wrong in (
        {"before": True},
        {"after": True},
        {"before": True, "after": True, "stays": True},
    ):
        with pytest.raises(ValueError, match="set before and after"):
            Trace((Variable("w", 8, host=True, **wrong),), ())
