"""Probabilities beside every draw there is, and beside drawing many."""

from __future__ import annotations

import itertools
from fractions import Fraction
from math import comb, prod

import numpy as np
import pytest
from benchmarks.simulators import class_counts
from benchmarks.simulators.class_counts import every_class, samples_for
from hypothesis import given
from hypothesis import strategies as st

weights = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def shares_of(counts: list[int]) -> list[float]:
    return [one / sum(counts) for one in counts]


def tried(shares: list[float], samples: int) -> float:
    """The chance of every mini-batch that holds all classes, added up."""
    names = range(len(shares))
    return sum(
        prod(shares[c] for c in batch)
        for batch in itertools.product(names, repeat=samples)
        if set(batch) == set(names)
    )


def alike(classes_: int, samples: int) -> float:
    """Classes of the same share, by inclusion and exclusion in whole numbers."""
    count = sum((-1) ** k * comb(classes_, k) * (classes_ - k) ** samples for k in range(classes_))
    return float(Fraction(count, classes_**samples))


@given(weights, st.integers(1, 6))
def test_a_probability_is_that_of_all_draws(counts: list[int], samples: int) -> None:
    found = every_class(shares_of(counts), samples)
    assert found.least == found.most
    assert found.least == pytest.approx(tried(shares_of(counts), samples), abs=1e-12)


@given(weights, st.integers(1, 60))
def test_bounds_hold_what_is_exact(counts: list[int], samples: int) -> None:
    shares = shares_of(counts)
    exact = every_class(shares, samples).least
    missing = [(1 - one) ** samples for one in shares]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(class_counts, "EXACT", 0)
        bounds = every_class(shares, samples)
    assert bounds.least <= exact + 1e-12
    assert exact <= bounds.most + 1e-12
    assert bounds.most - bounds.least <= sum(missing) + 1e-12


@pytest.mark.parametrize("classes_", [10, 12, 13, 100, 1000])
def test_classes_alike_are_a_coupon_collectors(classes_: int) -> None:
    shares = [1 / classes_] * classes_
    for samples in (classes_, 3 * classes_, 10 * classes_):
        exact, found = alike(classes_, samples), every_class(shares, samples)
        assert found.least <= exact + 1e-9
        assert exact <= found.most + 1e-9
        if classes_ <= class_counts.EXACT:
            assert found.least == pytest.approx(exact, abs=1e-9)
    wanted = samples_for(shares, 0.95)
    assert alike(classes_, wanted) >= 0.95
    assert alike(classes_, wanted) <= 0.96  # near, though a bound
    if classes_ <= class_counts.EXACT:
        assert alike(classes_, wanted - 1) < 0.95


def test_bounds_of_uneven_classes_hold_what_is_drawn() -> None:
    shares = np.arange(1, 31) / np.arange(1, 31).sum()
    drawn = np.random.default_rng(0).multinomial(1200, shares, size=20_000)
    observed = float((drawn > 0).all(1).mean())
    found = every_class(shares.tolist(), 1200)
    assert found.least - 0.01 <= observed <= found.most + 0.01


@given(weights, st.floats(0, 0.999))
def test_the_smallest_mini_batch_is_that_of_trying_all(counts: list[int], p: float) -> None:
    shares = shares_of(counts)
    wanted = next(n for n in itertools.count(1) if every_class(shares, n).least >= p)
    assert samples_for(shares, p) == wanted


@given(weights, st.integers(1, 50))
def test_more_samples_are_never_less_likely(counts: list[int], samples: int) -> None:
    shares = shares_of(counts)
    more, fewer = every_class(shares, samples + 1), every_class(shares, samples)
    assert more.least >= fewer.least - 1e-12


def test_shares_add_up_to_one() -> None:
    with pytest.raises(ValueError, match="shares of classes must add up to 1, and they add up to"):
        every_class([0.5, 0.4], 3)
    with pytest.raises(ValueError, match="share_of_a_class must be a finite number above 0"):
        every_class([1.5, -0.5], 3)
    with pytest.raises(ValueError, match="probability must be from 0 to below 1, not 1"):
        samples_for([1.0], 1)
    assert every_class([0.5, 0.5], 1) == class_counts.Chance(0.0, 0.0)
    assert samples_for([1.0], 0.5) == 1
