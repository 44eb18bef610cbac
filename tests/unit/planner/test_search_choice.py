"""The search against brute force over every size, with times that are known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.planner.search import fastest, search, step_seconds


def valley(best: int, fixed: float, grows: float) -> dict[int, float]:
    """Seconds of a micro-batch: a fixed part, one a sample, and one for what leaves the cache."""
    return {n: fixed + n * (1 + grows * max(0, n - best) / best) for n in range(1, 2049)}


@given(
    st.sampled_from([1, 2, 3, 5, 8, 24, 64, 200, 1000]),
    st.floats(0.0, 20.0),
    st.floats(0.05, 3.0),
    st.integers(1, 2048),
    st.integers(1, 2048),
)
def test_the_choice_is_nearly_the_best_of_a_full_sweep(
    best: int, fixed: float, grows: float, cap: int, size: int
) -> None:
    seconds = valley(best, fixed, grows)
    timed = search(cap, size, seconds.get)
    chosen = fastest(timed, size)
    sweep = min(step_seconds(seconds, n, size) for n in range(1, min(cap, size) + 1))
    assert max(timed) <= min(cap, size)
    assert step_seconds(seconds, chosen, size) <= 1.15 * sweep


def test_few_sizes_are_timed_and_the_large_ones_not_at_all() -> None:
    seconds, requested = valley(32, 10.0, 1.0), []

    def timer(n: int) -> float:
        requested.append(n)
        return seconds[n]

    timed = search(1024, 1024, timer)
    assert set(requested) == set(timed)
    assert len(timed) <= 10
    assert max(requested) <= 256


def test_noise_that_passes_is_forgotten() -> None:
    seconds, calls = valley(64, 1.0, 0.5), 0

    def timer(n: int) -> float:
        nonlocal calls
        calls += 1
        return seconds[n] * 0.001 * (5 if 3 <= calls <= 6 else 1)  # somebody else computes

    timed = search(1024, 1024, timer)
    best = min(step_seconds(seconds, n, 1024) for n in range(1, 1025))
    assert step_seconds(seconds, fastest(timed, 1024), 1024) <= 1.05 * best


def test_a_size_that_runs_out_of_memory_is_no_candidate() -> None:
    timed = search(64, 64, lambda n: None if n > 10 else float(5 + n))
    assert sorted(timed) == [4, 6, 8]


def test_nothing_that_runs_is_nothing_that_is_chosen() -> None:
    assert search(64, 64, lambda _: None) == {}


def test_the_ragged_last_micro_batch_counts() -> None:
    timed = {4: 4.0, 8: 6.0}
    assert step_seconds(timed, 8, 20) == 16.0  # 8, 8, 4
    assert step_seconds(timed, 8, 22) == 12.0 + 5.0  # 6 samples: between 4 and 8
    assert step_seconds(timed, 4, 9) == 8.0 + 4.0  # one sample costs what four do
    assert fastest(timed, 8) == 8
    assert fastest({4: 3.0, 8: 6.0}, 8) == 4  # of two equals the smaller


@pytest.mark.parametrize("cap", [1, 2, 3])
def test_caps_below_the_first_size(cap: int) -> None:
    assert search(cap, 100, lambda n: float(n + 3)).keys() <= {1, 2, 3}
    assert cap in search(cap, 100, lambda n: float(n + 3))
