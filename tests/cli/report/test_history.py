from __future__ import annotations

import json
import math
import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cli.report.pages import log_of

from anybatch.cli.report.history import RunHistory, bins, quartiles, spans, thinned

FLOATS = st.floats(-1e6, 1e6)


def test_a_log_is_read_line_by_line() -> None:
    text = log_of(epochs=2, each=3)
    found = RunHistory.of(text)
    lines = [json.loads(line) for line in text.splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [one.loss for one in found.steps] == [line["loss"] for line in steps]
    assert [one.speed for one in found.steps] == [line["images_per_second"] for line in steps]
    assert [row.test_loss for row in found.epochs] == [2.75, 1.375]
    assert (found.measured, found.broken) == (1 << 20, 0)
    assert RunHistory().measured is None


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind": "step", "step": 7, "lo',
        b"\xff\xfe\x00",
        b"[]",
        b"7",
        b"{}",
        b'{"kind": "step", "step": "7", "loss": 1, "images_per_second": 1}',
        b'{"kind": "step", "step": 7, "loss": "1", "images_per_second": 1}',
        b'{"kind": "step", "step": 7, "loss": 1, "images_per_second": true}',
        b'{"kind": "step", "step": 7, "loss": 1, "images_per_second": 1, "peak_bytes": "x"}',
        b'{"kind": "epoch", "epoch": 1, "metric": "accuracy"}',
        b'{"kind": "epoch", "epoch": 1, "metric": ["a"]}',
        b'{"kind": "batchnorm"}',
        b"[" * 100_000,
        b'{"kind": "step", "step": 7, "images_per_second": 1, "loss": 1' + b"0" * 400 + b"}",
        b"",
    ],
    ids=str,
)
def test_a_broken_line_is_counted_and_the_others_are_read(line: bytes) -> None:
    full = log_of(epochs=1)
    found = RunHistory.of(full + line + b"\n" + full)
    assert found.broken == 1
    assert len(found.steps) == 2 * len(RunHistory.of(full).steps)
    assert len(found.epochs) == 2


def test_a_change_on_the_way_is_a_sentence() -> None:
    line = {"kind": "batchnorm", "epoch": 4, "step": 9, "change": "BatchNorm is exact now"}
    found = RunHistory.of(json.dumps(line).encode())
    assert found.changes == ("After epoch 4: BatchNorm is exact now.",)


@given(count=st.integers(0, 300), most=st.integers(1, 50))
def test_stretches_cover_everything_once_and_are_alike(count: int, most: int) -> None:
    found = spans(count, most)
    assert [i for a, b in found for i in range(a, b)] == list(range(count))
    assert len(found) == min(count, most)
    lengths = [b - a for a, b in found]
    assert max(lengths, default=0) - min(lengths, default=0) <= 1


@given(values=st.lists(FLOATS, min_size=1, max_size=60), most=st.integers(1, 20))
def test_bins_hold_the_quartiles_of_their_steps(values: list[float], most: int) -> None:
    steps = list(range(11, 11 + len(values)))
    found = bins(steps, values, most)
    assert [n for one in found for n in range(one.first, one.last + 1)] == steps
    for one in found:
        inside = values[one.first - 11 : one.last - 10]
        assert one.middle == pytest.approx(statistics.median(inside), abs=1e-9)
        assert min(inside) <= one.low <= one.middle <= one.high <= max(inside)
        assert one.steps == (str(one.first) if len(inside) == 1 else f"{one.first} to {one.last}")


def test_quartiles_are_of_what_is_a_number() -> None:
    values = [1.0, math.nan, 3.0, math.inf, 2.0, 5.0, 4.0, -math.inf]
    assert quartiles(values) == tuple(statistics.quantiles([1, 2, 3, 4, 5], method="inclusive"))
    assert all(math.isnan(one) for one in quartiles([math.nan]))
    assert bins([], [], 5) == []


@given(count=st.integers(0, 300), most=st.integers(1, 50))
def test_thinned_places_are_few_even_and_end_with_the_last(count: int, most: int) -> None:
    found = thinned(count, most)
    assert len(found) <= most
    assert found[-1:] == ([count - 1] if count else [])
    assert len({b - a for a, b in pairwise(found)}) <= 1
