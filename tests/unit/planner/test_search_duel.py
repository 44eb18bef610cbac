"""Sizes that are close are compared by whole steps, in turns; beside brute force."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.planner.search import (
    DUEL_CLOSE,
    DUEL_LONG,
    MOST,
    TURNS,
    as_in_steps,
    chosen,
    duel,
    fastest,
    step_seconds,
)

Seconds = dict[int, float]


@st.composite
def timings(draw: st.DrawFn) -> tuple[int, Seconds, Seconds]:
    """Return N_B, seconds of micro-batches, and what a step really takes."""
    size = draw(st.integers(1, 64))
    sizes = draw(st.sets(st.integers(1, size), min_size=1, max_size=8))
    timed = {n: draw(st.floats(0.001, 0.05)) for n in sizes}
    real = {n: draw(st.floats(0.8, 1.4)) * step_seconds(timed, n, size) for n in sizes}
    return size, timed, real


@given(timings())
def test_of_close_sizes_the_one_is_chosen_whose_steps_are_fastest(
    world: tuple[int, Seconds, Seconds],
) -> None:
    size, timed, real = world
    ran: list[int] = []

    def step(n: int) -> float:
        ran.append(n)
        return real[n]

    steps = duel(timed, size, step)
    best = min(step_seconds(timed, n, size) for n in timed)
    close = [n for n in timed if step_seconds(timed, n, size) <= DUEL_CLOSE * best]
    if len(close) == 1 or best > DUEL_LONG:
        assert steps == {}
        assert chosen(timed, steps, size) == fastest(timed, size)
        return
    used = sorted(close, key=lambda n: step_seconds(timed, n, size))[:MOST]
    assert ran == used * TURNS  # one after the other, and all of them again
    assert steps == pytest.approx({n: real[n] for n in used}, rel=1e-12)
    assert real[chosen(timed, steps, size)] == min(real[n] for n in used)


@given(timings())
def test_all_sizes_are_longer_by_as_much_as_the_fastest_step_was(
    world: tuple[int, Seconds, Seconds],
) -> None:
    size, timed, real = world
    steps = duel(timed, size, lambda n: real[n])
    found = as_in_steps(timed, steps, size)
    assert found.keys() == timed.keys()
    ratios = [found[n] / timed[n] for n in timed]
    assert ratios == pytest.approx([ratios[0]] * len(ratios), rel=1e-9)
    if steps:
        best = chosen(timed, steps, size)
        assert step_seconds(found, best, size) == pytest.approx(steps[best], rel=1e-9)


def test_a_size_that_runs_out_of_memory_is_out_and_what_cannot_be_timed_ends_it() -> None:
    timed = {2: 1.0, 4: 2.0, 8: 4.1}
    timed = {n: seconds / 100 for n, seconds in timed.items()}
    steps = duel(timed, 8, lambda n: inf if n == 2 else 0.01 * n)
    assert steps == pytest.approx({4: 0.04, 8: 0.08}, rel=1e-12)
    assert chosen(timed, steps, 8) == 4
    assert duel(timed, 8, lambda _: None) == {}
    assert duel(timed, 8, lambda _: inf) == {}
    assert as_in_steps(timed, {}, 8) == timed


def test_a_long_step_is_not_run_again_to_be_compared() -> None:
    def never(n: int) -> float:
        raise AssertionError(n)

    assert duel({2: 0.6, 4: 1.2}, 8, never) == {}
    assert duel({4: 0.1, 8: 0.5}, 8, never) == {}
    assert duel({}, 8, never) == {}
