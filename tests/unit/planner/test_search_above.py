"""Which sizes above the largest that fits are tried, against times that are known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.planner.search import GAIN, SLOWER, above, least_seconds, step_seconds, try_above


@pytest.mark.parametrize(
    ("cap", "size", "wanted"),
    [(8, 64, [16, 32, 64]), (3, 20, [6, 12, 20]), (1, 2, [2]), (7, 7, [])],
)
def test_sizes_double_up_to_all(cap: int, size: int, wanted: list[int]) -> None:
    assert above(cap, size) == wanted


@given(
    st.floats(0.0, 10.0),
    st.floats(0.01, 1.0),
    st.floats(0.0, 2.0),
    st.integers(1, 64),
    st.integers(2, 8),
    st.integers(0, 63),
)
def test_no_step_is_faster_than_the_least(
    fixed: float, rise: float, bend: float, cap: int, times: int, more: int
) -> None:
    """Where a sample costs no less the more of them there are."""

    def seconds(n: int) -> float:
        return fixed + rise * n + bend * max(0, n - cap / 2)

    timed = {n: seconds(n) for n in (cap // 4, cap // 2, cap) if n}
    n = times * cap
    size = 3 * n + more
    real = timed | {n: seconds(n)}
    assert least_seconds(timed, n, size) <= step_seconds(real, n, size) * (1 + 1e-9)


def tried(
    timed: dict[int, float],
    offloaded: dict[int, float | None],
    size: int,
    moving: float = 0.0,
) -> tuple[dict[int, float], list[tuple[int, float]]]:
    """What was timed, and what was requested, with the time that is enough."""
    requested: list[tuple[int, float]] = []

    def trial(n: int, enough: float) -> float | None:
        requested.append((n, enough))
        return offloaded[n]

    best = min(step_seconds(timed, n, size) for n in timed)
    sizes = above(max(timed), size)
    found = try_above(timed, best, sizes, size, moving=lambda n: n * moving, trial=trial)
    return found, requested


DEAR = {n: 1.0 + 0.01 * n for n in (2, 4, 8)}
"""Seconds of micro-batches that all cost nearly the same: a step of 64 takes 8.64 in eights."""


def test_sizes_are_tried_for_as_long_as_that_pays() -> None:
    found, requested = tried(DEAR, {16: 1.3, 32: 1.7, 64: 4.0}, 64)
    assert found == {16: 1.3, 32: 1.7, 64: 4.0}  # 5.2, 3.4 and then 4.0 a step
    assert [n for n, _ in requested] == [16, 32, 64]
    bests = [8 * DEAR[8], 4 * 1.3, 2 * 1.7]
    wanted = [SLOWER * best * n / 64 for best, n in zip(bests, (16, 32, 64), strict=True)]
    assert [enough for _, enough in requested] == pytest.approx(wanted)
    found, requested = tried(DEAR, {16: 3.0, 32: 5.0}, 64)
    assert found == {16: 3.0, 32: 5.0}
    assert [n for n, _ in requested] == [16, 32]  # both have lost
    found, requested = tried(DEAR, {16: 3.0, 32: 3.0, 64: 7.0}, 64)
    assert found == {16: 3.0, 32: 3.0, 64: 7.0}  # the second one has won
    found, requested = tried(DEAR, {16: None}, 64)
    assert found == {}


def test_two_that_have_lost_do_not_end_it_where_the_line_through_them_can_win() -> None:
    """Moving costs the same at every size here: only large micro-batches pay for it."""
    timed = {1: 2.9}  # a step of 64: 185.6
    offloaded = {n: 10.0 + n for n in (2, 4, 8, 16, 32, 60, 64)}
    found, requested = tried(timed, dict(offloaded), 64)
    assert [n for n, _ in requested] == [2, 4, 8, 16, 32, 64]  # 384, 224, 144 ...
    assert found == {n: offloaded[n] for n in (2, 4, 8, 16, 32, 64)}
    dear = {n: 10.0 + 2.8 * n for n in offloaded}  # no size wins a twentieth
    found, requested = tried(timed, dict(dear), 64)
    assert [n for n, _ in requested] == [2, 4]
    found, requested = tried(timed, dict(dear), 60)  # nor do 16 by their last one of 12
    assert [n for n, _ in requested] == [2, 4]


def test_nothing_is_tried_where_nothing_is_to_be_won() -> None:
    flat = {n: float(n) for n in (4, 8, 16)}  # a sample costs the same at every size
    assert tried(flat, {}, 64) == ({}, [])
    worse = {4: 4.0, 8: 7.0, 16: 18.0}  # the largest is not the fastest
    assert tried(worse, {}, 64) == ({}, [])
    assert tried(DEAR, {}, 64, moving=1.0) == ({}, [])  # the store is too slow
    nearly = {8: 1.0, 16: 2 * (1 - GAIN / 2)}
    assert tried(nearly, {}, 64) == ({}, [])


def test_a_size_that_cannot_win_is_passed_over_for_one_that_can() -> None:
    timed = {4: 4.5, 8: 8.4}  # a step of 512: 537.6, and in sixteens no less than 518.4
    found, requested = tried(timed, {32: 34.0, 64: 70.0}, 512)
    assert found == {32: 34.0, 64: 70.0}
    assert [n for n, _ in requested] == [32, 64]
