"""The refined model: the lemma as its special case, and every answer beside trying all of them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.tools import gpus as lemma
from anybatch.tools.gpus import WORTH, Affine, GradientSum, Loop, Measured, NetworkLink, Work

MANY = 840
"""Samples that 1 to 8 GPUs divide evenly, and many more counts do."""


def drawn(seed: int) -> Loop:
    """A loop with parts of any size, some of them missing."""
    rng = random.Random(seed)

    def some(most: float) -> float:
        return rng.choice([0.0, rng.uniform(0, most)])

    n = rng.randint(1, 60)
    line = Affine(some(0.3), rng.uniform(0.001, 0.1))
    timed = {k: line.seconds(k) * rng.uniform(0.9, 1.1) for k in rng.sample(range(1, n + 1), 1)}
    link = NetworkLink(rng.uniform(1e6, 1e9), some(1e-2))
    return Loop(
        n,
        rng.choice([line, Measured({n: line.seconds(n), **timed})]),
        Work(some(0.5), some(1)),
        Work(some(2), some(4)),
        some(0.2),
        rng.choice([None, GradientSum(rng.randint(0, 10**8), link, some(1))]),
    )


def by_hand(loop: Loop, gpus: int) -> float:
    """T(G), written once more."""
    largest = max(len(range(rank, loop.samples, gpus)) for rank in range(gpus))
    compute = loop.compute.seconds(largest)
    seconds = compute + loop.work.serial + loop.work.parallel / gpus + loop.update
    if loop.gradients is not None:
        ring = loop.gradients.link.all_reduce(loop.gradients.size, gpus)
        seconds += max(ring * (1 - loop.gradients.overlap), ring - compute)
    return max(seconds, loop.hidden.serial + loop.hidden.parallel / gpus)


loops = st.integers(0, 10**6).map(drawn)


@given(loops, st.integers(1, 80))
def test_a_step_is_the_sum_of_its_parts_or_what_is_loaded_behind_it(loop: Loop, g: int) -> None:
    assert loop.seconds(g) == pytest.approx(by_hand(loop, g), rel=1e-9)
    assert loop.speedup(g) == pytest.approx(by_hand(loop, 1) / by_hand(loop, g), rel=1e-9)
    assert loop.efficiency(g) == pytest.approx(loop.speedup(g) / g)
    assert min(vars(loop.step(g)).values()) >= -1e-12


@given(st.floats(0, 2), st.sampled_from([g for g in range(1, 41) if MANY % g == 0]))
def test_the_lemma_is_a_loop_with_one_overhead_that_stays(overhead: float, gpus: int) -> None:
    loop = Loop(MANY, Affine(0, 1 / MANY), Work(serial=overhead))
    assert loop.overhead == pytest.approx(overhead, abs=1e-12)
    assert loop.speedup(gpus) == pytest.approx(lemma.speedup(overhead, gpus), rel=1e-9)
    assert loop.efficiency(gpus) == pytest.approx(lemma.efficiency(overhead, gpus), rel=1e-9)


@given(loops, st.floats(0.1, 40))
def test_the_fewest_gpus_for_a_speedup_are_those_of_trying_all(loop: Loop, wanted: float) -> None:
    times = [by_hand(loop, g) for g in range(1, loop.samples + 1)]
    fits = [g for g, t in enumerate(times, 1) if times[0] / t >= wanted * (1 - 1e-9)]
    found = loop.gpus_for(wanted)
    assert found.gpus == (fits[0] if fits else None)
    assert found.limit == pytest.approx(times[0] / min(times), rel=1e-9)


@given(loops, st.floats(0.01, 1e5), st.integers(1, 1000), st.integers(1, 10))
def test_the_fewest_gpus_by_a_deadline_are_those_of_trying_all(
    loop: Loop, deadline: float, steps: int, epochs: int
) -> None:
    every = range(1, loop.samples + 1)
    fits = [g for g in every if by_hand(loop, g) * steps * epochs <= deadline * (1 + 1e-9)]
    assert loop.gpus_by(deadline, steps=steps, epochs=epochs).gpus == (fits[0] if fits else None)


@given(loops)
def test_saturation_is_where_no_later_gpu_gains_five_percent(loop: Loop) -> None:
    times = {g: by_hand(loop, g) for g in range(1, loop.samples + 1)}
    found = loop.saturation()
    assert times[found.fastest] == pytest.approx(min(times.values()), rel=1e-12)
    assert all(times[g] > times[found.fastest] * (1 - 1e-12) for g in range(1, found.fastest))

    def gains(g: int, slack: float) -> bool:
        return any(times[g] >= times[h] * (1 + WORTH) ** (h - g) * slack for h in times if h > g)

    assert not gains(found.worth, 1 + 1e-9)
    assert all(gains(g, 1 - 1e-6) for g in range(1, found.worth))


@given(loops, st.floats(0.001, 1))
def test_more_work_is_never_faster_and_a_better_link_never_slower(loop: Loop, more: float) -> None:
    for g in (1, 2, 3, 8):
        worse = Loop(
            loop.samples,
            loop.compute,
            Work(loop.work.serial + more, loop.work.parallel),
            loop.hidden,
            loop.update,
            loop.gradients,
        )
        assert worse.seconds(g) >= loop.seconds(g) * (1 - 1e-12)
        if loop.gradients is not None:
            link = loop.gradients.link
            faster = GradientSum(
                loop.gradients.size, NetworkLink(2 * link.bandwidth, link.latency / 2)
            )
            plain = GradientSum(loop.gradients.size, link)
            a, b = (
                Loop(loop.samples, loop.compute, loop.work, loop.hidden, loop.update, sums)
                for sums in (faster, plain)
            )
            assert a.seconds(g) <= b.seconds(g) * (1 + 1e-12)


@given(loops.filter(lambda loop: loop.gradients is None))
def test_without_a_sum_more_gpus_are_never_slower(loop: Loop) -> None:
    line = Loop(loop.samples, Affine(0.1, 0.01), loop.work, loop.hidden, loop.update)
    times = [line.seconds(gpus) for gpus in range(1, 21)]
    assert all(a >= b * (1 - 1e-12) for a, b in pairwise(times))


def test_a_mini_batch_must_be_measured() -> None:
    with pytest.raises(ValueError, match="computing must be measured up to the mini-batch"):
        Loop(32, Measured({16: 1.0}))
    with pytest.raises(ValueError, match="compute must be a finite number above 0"):
        Loop(32, Affine(0, 0))
    with pytest.raises(ValueError, match="deadline must be a finite number above 0"):
        drawn(1).gpus_by(0, steps=1)
