"""Lemma 3.1 beside a timeline of one step and beside counting GPUs one by one, in fractions."""

from __future__ import annotations

from fractions import Fraction
from math import inf, isinf

import pytest
from benchmarks.simulators.lemma import gpus_for, overhead_limit
from hypothesis import given
from hypothesis import strategies as st

from anybatch.tools.gpus import efficiency, speedup, speedup_limit

overheads = st.integers(0, 300).map(lambda k: Fraction(k, 100))
counts = st.integers(1, 200)


def timed(overhead: Fraction, gpus: int) -> Fraction:
    """How many times as fast a step is whose computing takes 1 and is divided among G GPUs."""
    return (1 + overhead) / (Fraction(1, gpus) + overhead)


@given(overheads, counts)
def test_the_lemma_is_that_of_a_step_whose_computing_is_divided(r: Fraction, gpus: int) -> None:
    assert speedup(float(r), gpus) == pytest.approx(float(timed(r, gpus)), rel=1e-12)
    assert efficiency(float(r), gpus) == pytest.approx(float(timed(r, gpus) / gpus), rel=1e-12)


@given(overheads, st.integers(1, 2000).map(lambda k: Fraction(k, 100)))
def test_the_fewest_gpus_are_those_of_counting(r: Fraction, wanted: Fraction) -> None:
    found = gpus_for(float(wanted), float(r))
    limit = 1 + 1 / r if r else None
    if limit is not None and wanted >= limit:
        assert found.gpus is None
        assert found.limit == pytest.approx(float(limit))
        return
    assert found.gpus is not None
    assert timed(r, found.gpus) >= wanted
    assert found.gpus == 1 or timed(r, found.gpus - 1) < wanted
    if found.gpus < 500:
        assert found.gpus == next(g for g in range(1, 501) if timed(r, g) >= wanted)


@given(overheads.filter(bool), counts)
def test_a_speedup_that_gpus_have_takes_just_them(r: Fraction, gpus: int) -> None:
    assert gpus_for(speedup(float(r), gpus), float(r)).gpus == gpus


@given(st.integers(1, 100).map(lambda k: k / 100), counts)
def test_the_overhead_limit_gives_that_efficiency_and_more_gives_less(
    alpha: float, gpus: int
) -> None:
    limit = overhead_limit(alpha, gpus)
    if isinf(limit):
        assert efficiency(1e12, gpus) >= alpha * (1 - 1e-9)
        return
    assert efficiency(limit, gpus) == pytest.approx(alpha, rel=1e-9)
    assert efficiency(limit * 1.01 + 1e-6, gpus) < alpha or gpus == 1


@given(overheads, overheads, counts, counts)
def test_more_overhead_is_worse_and_more_gpus_are_faster_and_less_well_used(
    r: Fraction, more: Fraction, gpus: int, others: int
) -> None:
    a, b = float(r), float(r + more)
    assert speedup(b, gpus) <= speedup(a, gpus) * (1 + 1e-12)
    assert speedup(a, gpus) <= speedup(a, gpus + others) * (1 + 1e-12)
    assert efficiency(a, gpus + others) <= efficiency(a, gpus) * (1 + 1e-12)
    assert speedup(a, gpus) <= min(gpus, speedup_limit(a)) * (1 + 1e-12)


def test_without_overhead_there_is_no_limit() -> None:
    assert speedup_limit(0) == inf
    assert gpus_for(1000, 0).gpus == 1000


def test_what_is_found_reads_as_a_sentence() -> None:
    assert str(gpus_for(1, 0.1)) == "1 GPU"
    assert str(gpus_for(3, 0.1)) == "4 GPUs"
    no = "no number of GPUs: none gets beyond a speedup of 11"
    assert str(gpus_for(11, 0.1)) == no
    assert str(gpus_for(12, 0.1)) == no


@pytest.mark.parametrize("alpha", [0.0, 1.1, -1.0, float("nan")])
def test_an_efficiency_is_above_0_and_at_most_1(alpha: float) -> None:
    with pytest.raises(ValueError, match="efficiency must be above 0 and at most 1, not"):
        overhead_limit(alpha, 4)


def test_overhead_is_not_negative() -> None:
    with pytest.raises(ValueError, match="overhead must be a finite number of at least 0, not -1"):
        speedup_limit(-1)
    with pytest.raises(ValueError, match="gpus must be an integer of at least 1, not 0"):
        efficiency(0.1, 0)
    with pytest.raises(ValueError, match="speedup must be a finite number above 0, not 0"):
        gpus_for(0, 0.1)
