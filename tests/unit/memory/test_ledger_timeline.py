"""The ledger against brute force: every event, every size, every budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.memory.ledger import (
    UNLIMITED,
    AffineTimeline,
    BentTimeline,
    NotAffineError,
    Timeline,
    record,
)

OWNERS = ("states", "activations")
LINES = st.lists(
    st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(-9, 9), st.integers(0, 9)),
    min_size=1,
    max_size=6,
)


def timeline(rows: list[list[int]]) -> Timeline:
    return Timeline(OWNERS, tuple(map(str, range(len(rows)))), np.array(rows))


def at(lines: list[tuple[int, int, int, int]], n: int) -> Timeline:
    return timeline([[a + c * n, b + d * n] for a, b, c, d in lines])


@given(LINES, st.integers(1, 5), st.integers(1, 7), st.integers(1, 30))
def test_two_sizes_tell_every_other_one(
    lines: list[tuple[int, int, int, int]], n: int, more: int, wanted: int
) -> None:
    found = AffineTimeline.through(at(lines, n), at(lines, n + more), n, n + more)
    assert (found.at(wanted).live == at(lines, wanted).live).all()
    held = [a + b + (c + d) * wanted for a, b, c, d in lines]
    assert found.at(wanted).peak == max(0, *held)


@given(LINES, st.integers(0, 400))
def test_the_largest_that_fits_is_that_of_brute_force(
    lines: list[tuple[int, int, int, int]], budget: int
) -> None:
    grown = [(a, b, abs(c), d) for a, b, c, d in lines]  # memory grows with the samples
    found = AffineTimeline.through(at(grown, 2), at(grown, 3), 2, 3)
    fits = [n for n in range(1, 500) if at(grown, n).peak <= budget]
    largest = found.largest(budget)
    if fits and fits[-1] == 499:
        assert largest == UNLIMITED or largest >= 499
    else:
        assert largest == (fits[-1] if fits else 0)


def test_a_margin_rounds_the_slope_up() -> None:
    low, high = timeline([[10, 0]]), timeline([[20, 0]])
    line = AffineTimeline.through(low, high, 2, 5)  # 10 / 3 a sample, and as much at none
    assert [line.at(n).peak for n in (0, 2, 8)] == [4, 12, 36]
    assert AffineTimeline.through(low, high, 2, 5, margin=1.5).at(4).peak == 4 + 4 * 5


def test_what_is_not_on_a_line_gets_bytes_while_it_lives() -> None:
    events = ["a", "b", "c"]

    def at(straight: int, rounded: int) -> Timeline:
        spans = [("states", straight, 0, 3), ("activations", rounded, 1, 2)]
        return record(spans, events, OWNERS)

    found = at(40, 4096).rounded([(at(20, 4096), 2), (at(160, 12288), 16)], 4, 100)
    assert found.owners == (*OWNERS, "rounding")
    assert found.live.tolist() == [[40, 0, 0], [40, 4096, 100], [40, 0, 0]]


def test_other_events_are_no_line() -> None:
    low = timeline([[1, 1]])
    high = Timeline(OWNERS, ("another",), np.array([[2, 2]]))
    with pytest.raises(NotAffineError):
        AffineTimeline.through(low, high, 1, 2)


def test_a_bent_line_takes_the_side_of_its_bend() -> None:
    few = AffineTimeline.through(timeline([[0, 10]]), timeline([[0, 20]]), 1, 2)
    many = AffineTimeline.through(timeline([[8, 10]]), timeline([[8, 20]]), 1, 2)
    bent = BentTimeline(few, many, 4)
    assert [bent.at(n).peak for n in (1, 3, 4, 5)] == [10, 30, 48, 58]
    assert [bent.largest(b) for b in (9, 10, 39, 47, 48, 58)] == [0, 1, 3, 3, 4, 5]


def test_the_peak_by_owner_adds_up_to_the_peak() -> None:
    found = timeline([[1, 5], [2, 9], [3, 0]]).plus({"optimizer": 7, "states": 1})
    assert found.at_peak() == {"states": 3, "activations": 9, "optimizer": 7}
    assert sum(found.at_peak().values()) == found.peak == 19
    assert found.final() == {"states": 4, "optimizer": 7}


def test_nothing_happened() -> None:
    empty = Timeline(OWNERS, (), np.zeros((0, 2), np.int64))
    assert (empty.peak, empty.at_peak(), empty.final()) == (0, {}, {})


SPANS = st.lists(
    st.tuples(st.sampled_from(OWNERS), st.integers(0, 50), st.integers(0, 9), st.integers(0, 9))
)


@given(SPANS)
def test_allocations_become_the_bytes_after_each_event(
    spans: list[tuple[str, int, int, int]],
) -> None:
    spans = [(owner, size, min(a, b), max(a, b)) for owner, size, a, b in spans]
    found = record(spans, [str(t) for t in range(8)], OWNERS)
    for t in range(8):
        for column, owner in enumerate(OWNERS):
            live = sum(s for o, s, first, end in spans if o == owner and first <= t < end)
            assert found.live[t, column] == live


@given(st.integers(0, 9999), st.integers(2, 40))
def test_bytes_that_are_no_allocation_are_not_rounded_up(constant: int, n: int) -> None:
    def at(samples: int) -> Timeline:
        spans = [("activations", 700 * samples, 0, 2), ("activations", 99, 1, 2)]
        return record(spans, ["a", "b", "c"], OWNERS, grain=512).plus({"states": constant})

    line = AffineTimeline.through(at(2), at(3), 2, 3)
    assert (line.at(n).live >= at(n).live).all()
    assert (line.at(n).live[:, 0] == constant).all()
    assert (line.at(n).live[:, 1] <= at(n).live[:, 1] + 2 * 511).all()
