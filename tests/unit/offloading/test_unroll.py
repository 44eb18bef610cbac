"""A scheduled step as it passes: the bytes of the simulation at every moment, told by owner."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from benchmarks.simulators.baselines import naive, on_demand
from benchmarks.simulators.window import window
from tests.unit.offloading.test_course_recording import recording
from tests.unit.offloading.traces import anything, course_of, network, planned, simulated

from anybatch.offloading.unroll import (
    COPIED,
    LEAVING,
    RETURNING,
    THERE,
    Link,
    Schedule,
    Trace,
    of_course,
    unroll,
)

LINKS = (Link(7.0, 5.0), Link(1e9, 1e9), Link(4.0, 4.0, duplex=False))


def schedules(trace: Trace, link: Link) -> list[Schedule]:
    budget = (trace.floor + trace.peak) // 2
    makers = (
        lambda: planned(trace, budget, link),
        lambda: window(trace, budget, budget // 4),
        lambda: on_demand(trace, budget),
        lambda: naive(trace, budget),
    )
    return [make() for make in makers]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("link", LINKS, ids=["slow", "fast", "one way"])
def test_bytes_are_those_of_the_simulation_at_every_moment(seed: int, link: Link) -> None:
    rng = Random(seed)
    trace = network(rng.randint(1, 9), rng) if seed % 2 else anything(rng)
    for schedule in schedules(trace, link):
        step, run = unroll(trace, schedule, link, there=3), simulated(trace, schedule, link)
        live, edges = step.ledger.live, step.edges
        assert (live >= 0).all()
        assert (np.diff(edges) >= 0).all()
        assert step.peak == run.peak + 3 <= step.budget
        assert step.end == run.seconds <= edges[-1]  # copies nobody waits for end later
        assert step.stall == pytest.approx(run.stall)
        assert sum(m.size for m in step.moves if m.back) == run.bytes_in
        assert sum(m.size for m in step.moves if not m.back) == run.bytes_out
        column = {name: live[:, i] for i, name in enumerate(step.ledger.owners)}
        assert (column[THERE] == 3).all()
        last = {v: run.runs[uses[-1]].end for v, uses in enumerate(trace.uses) if uses}
        keeps = {v for v, variable in enumerate(trace.variables) if variable.after}
        for i, (begin, end) in enumerate(pairwise(edges)):
            if begin == end:
                continue
            now = (begin + end) / 2
            held = [h for h, r in zip(run.held, run.runs, strict=False) if r.begin < now < r.end]
            assert held in ([], [live[i].sum() - 3])
            leaving = sum(
                trace.size(v)
                for v, way in run.outs
                if way.begin < now < way.end and (v in keeps or now < last[v])
            )
            assert column[LEAVING][i] == leaving
            coming = sum(trace.size(v) for v, way in run.ins if way.begin < now < way.end)
            assert column[RETURNING][i] >= coming


def test_a_storage_is_followed_from_its_making_to_its_end() -> None:
    course = course_of(recording(), 35, Link(5.0, 10.0))  # storage 0 alone leaves
    step = of_course(course)
    assert (step.peak, step.budget, step.end) == (course.predicted, 35, course.seconds)
    assert [(m.name, m.back, m.begin, m.end) for m in step.moves] == [
        ("storage 0", False, 2.0, 4.0),
        ("storage 0", True, 6.0, 7.0),
    ]
    at = dict(zip(step.ledger.owners, step.ledger.live.T, strict=True))
    owners = [
        (time, name)
        for i, time in enumerate(step.seconds or ())
        for name in (LEAVING, COPIED, RETURNING)
        if at[name][i] and (i == 0 or not at[name][i - 1])
    ]
    assert owners == [(2.0, LEAVING), (4.0, COPIED), (6.0, RETURNING)]


@pytest.mark.parametrize("more", [0, 4])
def test_on_demand_everything_leaves_once_and_returns_when_it_is_needed(more: int) -> None:
    tight = replace(recording(), peak=16, rest=(1, 9, 0, 1, 1, 1, 1))
    course = course_of(tight, 16 + more, Link(5.0, 10.0), more)
    assert course.stages is None
    step = of_course(course)
    assert (step.peak, step.budget) == (course.predicted, 16 + more)
    assert step.end == course.seconds - 2 - 1  # storage 2 is used until it dies: it stays
    assert step.stall == pytest.approx(4 + 2)
    assert [(m.name, m.back) for m in step.moves] == [
        *(("storage 0", False), ("storage 1", False)),
        *(("storage 1", True), ("storage 0", True)),
    ]
    assert step.ledger.final() == {THERE: 5 + more}
