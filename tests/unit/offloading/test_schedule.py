"""A schedule counts the bytes that it moves."""

from __future__ import annotations

from random import Random

from tests.unit.offloading.traces import network

from anybatch.offloading.policy import belady


def test_a_schedule_counts_the_bytes_that_it_moves() -> None:
    trace = network(6, Random(1))
    schedule = belady(trace, trace.floor)
    outs, ins = schedule.moved(trace)
    assert outs == sum(trace.size(v) for stage in schedule.stages for v in stage.outs) > 0
    assert ins > 0
