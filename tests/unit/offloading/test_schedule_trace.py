"""A trace knows who uses what, when it dies, and what it needs at most and at least."""

from __future__ import annotations

from random import Random

import pytest
from tests.unit.offloading.traces import anything

from anybatch.offloading.schedule import NEVER, Function, Trace, Variable


@pytest.mark.parametrize("seed", range(20))
def test_live_bytes_are_those_of_what_is_made_and_still_used(seed: int) -> None:
    trace = anything(Random(seed))
    last = len(trace.functions)
    for i in range(last):
        live = 0
        for v, variable in enumerate(trace.variables):
            uses = [k for k in range(last) if v in trace.functions[k].uses]
            first = -1 if variable.before else uses[0]
            end = last if variable.after else max(uses, default=-2)
            live += variable.size if first <= i <= end else 0
        assert trace.live[i] == live
    assert trace.peak == max(trace.live) >= trace.floor


def test_the_next_use_of_a_dead_variable_is_never() -> None:
    variables = (Variable("x", 1, before=True), Variable("w", 1, before=True, after=True))
    trace = Trace(variables, (Function("f", (0, 1)), Function("g", (1,)), Function("h", (0,))))
    assert [trace.next_use(0, i) for i in (-1, 0, 1, 2)] == [0, 2, 2, NEVER]
    assert trace.next_use(1, 1) == 3  # it must be there at the end
    assert trace.dies == ((), (), (0,))


def test_a_step_without_functions_needs_what_is_there() -> None:
    trace = Trace((Variable("w", 3, before=True, after=True),), ())
    assert (trace.floor, trace.peak, trace.seconds) == (3, 0, 0)


X = Variable("x", 1, before=True)
BAD = [
    ((X, Variable("y", 1)), (Function("f", (1,)),), "made before it is used"),
    ((X,), (Function("f", (), (0,)),), "made once"),
    ((X,), (Function("f", (), (), (0,)),), "read where written"),
]


@pytest.mark.parametrize(("variables", "functions", "what"), BAD, ids=[b[2] for b in BAD])
def test_a_trace_that_cannot_be_is_refused(
    variables: tuple[Variable, ...], functions: tuple[Function, ...], what: str
) -> None:
    with pytest.raises(ValueError, match=f"must be {what}, and function 0, f"):
        Trace(variables, functions)
