"""The search for the fastest size against an exhaustive oracle: every size, with known seconds.

No model, no clock. Seconds of a micro-batch are convex in its samples, as they are where it
outgrows a cache. What the search runs fits; it is over in a few steps; nothing that it ran is
clearly faster than what it chose; and how far from the best of all it may stay follows from its
neighbours: half, twice, and between.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from anybatch.planner.search import MOST, SAME, MicroBatchSearch, TrialStep, even, next_size

ROUNDED = 1 + 1e-9
"""Sums of seconds in another order."""


@dataclass(frozen=True)
class World:
    """Seconds of steps.

    Attributes:
        size: N_B.
        cap: the most samples that fit.
        start: samples of the first step.
        micro_batch: samples -> seconds of a micro-batch.
    """

    size: int
    cap: int
    start: int
    micro_batch: dict[int, float]

    def step(self, n: int) -> float:
        """Return the seconds of a step in micro-batches of `n`, which fit."""
        assert 1 <= n <= self.cap
        full, rest = divmod(self.size, n)
        return full * self.micro_batch[n] + (self.micro_batch[rest] if rest else 0.0)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    size, floats = draw(st.integers(2, 512)), st.floats
    fixed, each = draw(floats(0.0, 8.0)), draw(floats(0.01, 1.0))
    bend, grows = draw(st.integers(1, size)), draw(floats(0.0, 0.3))
    seconds = {n: fixed + each * n * (1 + grows * max(0, n - bend)) for n in range(1, size + 1)}
    cap = draw(st.integers(1, size))
    return World(size, cap, even(size, draw(st.integers(1, cap))), seconds)


def found_by_search(world: World) -> MicroBatchSearch:
    tuning = MicroBatchSearch()
    following = partial(next_size, start=world.start, cap=world.cap, size=world.size, most=MOST)
    while (n := following(tuning.of("resident"), tuning.counts("resident"))) is not None:
        tuning.add(TrialStep(n, "resident"), world.step(n))
    return tuning


@given(worlds())
def test_the_search_is_short_and_what_it_chose_is_the_fastest_that_it_ran(world: World) -> None:
    tuning = found_by_search(world)
    best = tuning.best()
    assert best is not None
    assert 1 <= tuning.steps <= MOST
    ran = tuning.of("resident")
    assert ran[best.micro_batch] <= ROUNDED * SAME * min(ran.values())
    assert len(ran) == len(set(ran))


@given(worlds())
def test_what_was_not_run_takes_half_at_least(world: World) -> None:
    """Of the sizes between half and twice the fastest that was run; of all, where steps were left.

    Half of a size, and twice as many samples, are run unless they do not fit or steps are used up.
    """
    tuning = found_by_search(world)
    ran = tuning.of("resident")
    best = min(ran, key=lambda n: (ran[n], -n))
    near = [n for n in range(1, world.cap + 1) if best < 2 * n < 4 * best or tuning.steps < MOST]
    assert ran[best] <= 2 * ROUNDED * min(map(world.step, near))


def drawn(rng: random.Random) -> World:
    """Draw a world as the strategy does, evenly."""
    size, fixed, each = rng.randint(2, 512), 8 * rng.random() ** 2, rng.uniform(0.01, 1.0)
    bend, grows = rng.randint(1, size), rng.choice([0.0, rng.uniform(0.0, 0.3)])
    seconds = {n: fixed + each * n * (1 + grows * max(0, n - bend)) for n in range(1, size + 1)}
    cap = rng.randint(1, size)
    return World(size, cap, even(size, rng.randint(1, cap)), seconds)


def test_of_drawn_worlds_nineteen_in_twenty_are_within_a_twentieth_of_the_best(
    counted: Callable[[int], int],
) -> None:
    """The best of all sizes, by known seconds; the search runs eight of them at most."""
    rng, count = random.Random(0), counted(20_000)
    near = 0
    for _ in range(count):
        world = drawn(rng)
        best = found_by_search(world).best()
        assert best is not None
        seconds = world.step(best.micro_batch)
        near += 0.95 * seconds <= min(map(world.step, range(1, world.cap + 1)))
    assert near >= 0.95 * count
