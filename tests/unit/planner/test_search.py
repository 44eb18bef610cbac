"""The search over steps that train: which size comes next, and which trial is chosen."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import pytest

from anybatch.planner.search import (
    MOST,
    SAME,
    MicroBatchSearch,
    TrialStep,
    even,
    larger,
    least_seconds,
    may_win,
    next_size,
)


def search(
    clock: Callable[[int], float], *, start: int, cap: int, size: int, most: int = MOST
) -> tuple[list[int], MicroBatchSearch]:
    """Run the sizes that are asked for, with known seconds; return them in order."""
    tuning, order = MicroBatchSearch(), list[int]()
    while True:
        n = next_size(
            tuning.of("resident"),
            tuning.counts("resident"),
            start=start,
            cap=cap,
            size=size,
            most=most,
        )
        if n is None:
            return order, tuning
        order.append(n)
        tuning.add(TrialStep(n, "resident"), clock(n))


@pytest.mark.parametrize(
    ("clock", "start", "order", "best"),
    [
        # the largest is the fastest: half of it loses, so nothing smaller is run
        (lambda n: 64 / n, 64, [64, 32, 48], 64),
        # the smallest wins: halves for as long as that pays
        (float, 64, [64, 32, 16, 8, 4, 2, 1], 1),
        # up and down lose clearly, so none between is tried
        (lambda n: 1 + abs(n - 16) / 16, 16, [16, 32, 8], 16),
        # they lose, and those between are tried
        (lambda n: 1 + abs(n - 16) / 80, 16, [16, 32, 8, 24, 12, 16, 12, 24], 16),
        # the same everywhere: the largest, since a larger one is as fast
        (lambda _: 1.0, 64, [64, 32, 48, 64, 48, 32], 64),
        # memory runs out above 16
        (lambda n: inf if n > 16 else 16 / n, 16, [16, 32, 8, 24], 16),
    ],
)
def test_sizes_come_in_this_order(
    clock: Callable[[int], float], start: int, order: list[int], best: int
) -> None:
    found, tuning = search(clock, start=start, cap=64, size=96)
    assert found == order
    assert tuning.best() == TrialStep(best, "resident")
    assert len(found) <= MOST


@pytest.mark.parametrize(("seconds", "chosen"), [(1.0, 32), (0.96, 32), (0.9, 16)])
def test_a_smaller_size_is_chosen_only_where_it_is_faster_than_steps_scatter(
    seconds: float, chosen: int
) -> None:
    tuning = MicroBatchSearch()
    tuning.add(TrialStep(32, "resident"), 1.0)
    tuning.add(TrialStep(16, "resident"), seconds)
    assert tuning.best() == TrialStep(chosen, "resident")
    assert SAME == 1.05


@pytest.mark.parametrize("place", ["offloaded", "paged"])
@pytest.mark.parametrize(("seconds", "leaves"), [(0.95, False), (0.91, False), (0.85, True)])
def test_tensors_leave_only_for_a_clear_win(place: Any, seconds: float, leaves: bool) -> None:
    tuning, trial = MicroBatchSearch(), TrialStep(64, place)
    tuning.add(TrialStep(16, "resident"), 1.0)
    tuning.add(trial, None)  # the step that records is metered
    tuning.add(trial, seconds)
    assert tuning.best() == (trial if leaves else TrialStep(16, "resident"))


def test_the_step_that_records_what_leaves_does_not_count() -> None:
    tuning, trial = MicroBatchSearch(), TrialStep(8, "offloaded")
    tuning.add(trial, 9.0)
    assert tuning.steps == 0
    tuning.add(trial, 1.0)
    assert tuning.of("offloaded") == {8: 1.0}
    tuning.fail(TrialStep(4, "offloaded"))
    assert tuning.best() == trial
    tuning.fail(trial)
    assert tuning.best() is None


def test_words_name_the_trial_and_the_fastest_so_far() -> None:
    tuning = MicroBatchSearch()
    assert tuning.in_words() == ""
    tuning.trial = TrialStep(8, "resident")
    assert tuning.in_words().endswith("this one in micro-batches of 8 samples")
    tuning.add(TrialStep(8, "resident"), 0.25)
    tuning.trial = TrialStep(16, "offloaded")
    assert "16 samples, saved tensors offloaded; so far 8 are the fastest" in tuning.in_words()


@pytest.mark.parametrize("size", [1, 2, 7, 10, 64])
def test_even_micro_batches_are_as_few_as_can_be(size: int) -> None:
    for cap in range(1, size + 3):
        n = even(size, cap)
        assert 1 <= n <= cap
        assert -(-size // n) == -(-size // cap)


def test_larger_sizes_are_of_half_as_many_micro_batches_down_to_one() -> None:
    assert larger(3, 20) == [5, 10, 20]
    assert larger(15, 32) == [16, 32]
    assert larger(16, 20) == [20]
    assert larger(20, 20) == []


def test_offloading_is_not_tried_where_it_cannot_win() -> None:
    steps = {4: 4.0, 8: 3.6}  # a micro-batch: 0.5 and 0.9, so one of 32 takes 3.3
    assert least_seconds(steps, 32, 32) == pytest.approx(3.3)
    assert least_seconds({8: 3.0}, 32, 32) == pytest.approx(0.75)
    near = {6: 4.0, 8: 3.6}  # 0.75 and 0.9
    assert least_seconds(near, 32, 32) == pytest.approx(2.7)
    assert least_seconds({10: 1.0, 12: 1.05}, 24, 24) == pytest.approx(0.525)  # noise
    fixed = {4: 8.0, 8: 4.0}  # each micro-batch takes a second, whatever its samples
    assert may_win(fixed, 4.0, 32, 32, lambda _: 0.0)
    assert not may_win(fixed, 4.0, 32, 32, lambda _: 3.7)  # what is too much takes that to move
    assert not may_win(steps, 3.6, 32, 32, lambda _: 0.0)
