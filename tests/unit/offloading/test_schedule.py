"""A schedule prints, and goes through JSON unchanged."""

from __future__ import annotations

from random import Random

from tests.unit.offloading.traces import network

from anybatch.offloading.policy import belady
from anybatch.offloading.schedule import Schedule


def test_a_schedule_is_data() -> None:
    trace = network(6, Random(1))
    schedule = belady(trace, trace.floor)
    assert Schedule.from_json(schedule.to_json()) == schedule
    outs, ins = schedule.moved(trace)
    assert outs == sum(trace.size(v) for stage in schedule.stages for v in stage.outs) > 0
    assert ins > 0


def test_it_prints_what_moves_around_which_function() -> None:
    trace = network(6, Random(1))
    schedule = belady(trace, trace.floor)
    text = schedule.show(trace)
    assert text.startswith(f"Belady + fit, within {trace.floor} B\n")
    i = next(i for i, stage in enumerate(schedule.stages) if stage.outs)
    name = trace.variables[schedule.stages[i].outs[0]].name
    line = next(line for line in text.splitlines() if line.startswith(f"{i:5} "))
    assert f"{trace.functions[i].name}: " in line
    assert f"out {name} (" in line
