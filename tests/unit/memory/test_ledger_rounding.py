"""Lines through two sizes, where each allocation is rounded up to a block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.memory.ledger import UNLIMITED, AffineTimeline, NotAffineError, Timeline, record

BLOCK = 512

SIZES = st.tuples(
    st.integers(0, 2000),  # bytes at no sample
    st.integers(0, 700),  # and for each
    st.integers(0, 5),  # live from an event on
    st.integers(1, 6),  # for so many
)


def traced(spans: list[tuple[int, int, int, int]], n: int) -> Timeline:
    found = [("activations", a + b * n, first, first + more) for a, b, first, more in spans]
    return record(found, list("abcdef"), ("activations",), grain=BLOCK)


@given(st.lists(SIZES, max_size=12), st.integers(1, 300))
def test_lines_through_two_sizes_are_exact_at_every_other(
    spans: list[tuple[int, int, int, int]], n: int
) -> None:
    line = AffineTimeline.through(traced(spans, 2), traced(spans, 3), 2, 3)
    assert (line.at(n).live == traced(spans, n).live).all()
    above = line.base + n * line.slope
    assert (above >= line.at(n).live).all()


@given(st.lists(SIZES, max_size=12), st.integers(0, 400_000))
def test_the_largest_that_fits_is_that_of_brute_force(
    spans: list[tuple[int, int, int, int]], budget: int
) -> None:
    line = AffineTimeline.through(traced(spans, 2), traced(spans, 3), 2, 3)
    fits = [n for n in range(1, 900) if traced(spans, n).peak <= budget]
    largest = line.largest(budget)
    if fits and fits[-1] == 899:
        assert largest == UNLIMITED or largest >= 899
    elif fits or largest:
        assert largest == (fits[-1] if fits else 0)


def test_allocations_that_differ_have_a_bound() -> None:
    """Events are the same, and one size frees a storage later: rounding is counted for each."""
    low = record([("a", 700, 0, 2), ("a", 10, 1, 3)], ["x", "y", "z"], ("a",), grain=BLOCK)
    high = record([("a", 900, 0, 3), ("a", 10, 1, 3)], ["x", "y", "z"], ("a",), grain=BLOCK)
    line = AffineTimeline.through(low, high, 2, 3)
    assert line.spans is None
    assert (line.at(2).live >= low.live).all()
    assert (line.at(3).live >= high.live).all()
    with pytest.raises(NotAffineError):
        AffineTimeline.through(low, record([], ["x"], ("a",), grain=BLOCK), 2, 3)
