"""The parts of a step; the ring is counted message by message."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.tools.gpus import Affine, GradientSum, Measured, NetworkLink, Work


def ring(size: int, gpus: int, link: NetworkLink) -> float:
    """Every GPU sends its chunk to the next, once around to add and once around to hand out."""
    seconds = 0.0
    for _round in range(2):
        for _step in range(gpus - 1):
            seconds += link.latency + size / gpus / link.bandwidth
    return seconds


@given(
    st.integers(0, 10**9),
    st.integers(1, 64),
    st.floats(1e6, 1e11),
    st.floats(0, 1e-2),
)
def test_an_all_reduce_is_a_ring(size: int, gpus: int, bandwidth: float, latency: float) -> None:
    link = NetworkLink(bandwidth, latency)
    wanted = pytest.approx(ring(size, gpus, link), rel=1e-9, abs=1e-12)
    assert link.all_reduce(size, gpus) == wanted


@given(st.floats(0, 1), st.floats(0, 10), st.integers(1, 16))
def test_what_is_hidden_of_a_sum_is_its_share_and_no_longer_than_computing(
    overlap: float, compute: float, gpus: int
) -> None:
    link = NetworkLink(1e8, 1e-4)
    full = link.all_reduce(10**9, gpus)
    found = GradientSum(10**9, link, overlap).seconds(gpus, compute)
    assert found == pytest.approx(max(full * (1 - overlap), full - compute), abs=1e-12)
    assert 0 <= found <= full


def test_a_line_and_a_table_agree_where_the_table_is_one() -> None:
    line = Affine(0.5, 0.25)
    table = Measured({n: line.seconds(n) for n in (1, 4, 16)})
    for n in range(1, 17):
        assert table.seconds(n) == pytest.approx(line.seconds(n))


def test_below_what_was_measured_a_share_costs_the_smallest_and_above_it_is_refused() -> None:
    table = Measured({4: 1.0, 8: 1.5})
    assert table.seconds(1) == 1.0
    with pytest.raises(ValueError, match="9 samples are requested and 8 measured at most"):
        table.seconds(9)
    with pytest.raises(ValueError, match="timed must hold at least one size"):
        Measured({})


def test_work_is_divided_or_not() -> None:
    assert Work(2.0, 6.0).seconds(1) == 8.0
    assert Work(2.0, 6.0).seconds(3) == 4.0
    with pytest.raises(ValueError, match="serial must be a finite number of at least 0"):
        Work(serial=-1)
    with pytest.raises(ValueError, match="bandwidth must be a finite number above 0"):
        NetworkLink(0)
    with pytest.raises(ValueError, match="overlap must be a share from 0 to 1"):
        GradientSum(1, NetworkLink(1), 2)
