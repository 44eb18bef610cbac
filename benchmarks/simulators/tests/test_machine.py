"""A function computes or waits for memory, whichever takes longer."""

from __future__ import annotations

import pytest
from benchmarks.simulators.machine import Machine

from anybatch.core.plan_sections import Link
from anybatch.offloading.schedule import Function, Trace, Variable

MACHINE = Machine("some", flops=100.0, memory=10.0, link=Link(1, 1))
TRACE = Trace(
    (Variable("x", 1, before=True),),
    (Function("product", (0,), flops=500.0, touched=20), Function("sum", (0,), touched=30)),
)


def test_seconds_are_those_of_the_roofline() -> None:
    assert [function.seconds for function in MACHINE.timed(TRACE).functions] == [5.0, 3.0]


def test_a_machine_is_scaled_to_a_measured_step() -> None:
    scaled = MACHINE.scaled_to(TRACE, 4.0)
    assert scaled.timed(TRACE).seconds == pytest.approx(4.0)
    assert scaled.scaled_to(TRACE, 16.0).scale == pytest.approx(2.0)
