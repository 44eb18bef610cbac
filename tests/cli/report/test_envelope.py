from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cli.test_timeline import ordered, timed

from anybatch.cli.report.drawing import BANDS, HATCHES
from anybatch.cli.report.history import Envelope
from anybatch.cli.timeline import COLORS
from anybatch.reports import StepTimeline

STEPS = {"order": ordered(40), "one event": ordered(1), "times": timed(), "tight": timed(36)}


def highest(step: StepTimeline, begin: float, end: float) -> int:
    """Return the most bytes live at any moment between two edges, event by event."""
    edges, total = step.edges, step.ledger.live.sum(1)
    inside = (edges[:-1] < end - 1e-12) & (edges[1:] > begin + 1e-12)
    return int(total[inside].max(initial=0))


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("most", [1, 7, 400])
def test_each_stretch_is_shown_by_its_highest_moment(name: str, most: int) -> None:
    step = STEPS[name]
    found = Envelope.of(step, most)
    sums = [sum(row) for row in found.live]
    assert len(sums) <= most
    assert max(sums) == found.peak == step.peak
    assert (found.edges[0], found.edges[-1]) == pytest.approx((step.edges[0], step.edges[-1]))
    for begin, end, peak in zip(found.edges, found.edges[1:], sums, strict=False):
        assert peak >= highest(step, begin, end)
        assert peak in step.ledger.live.sum(1)
    there = {
        name for name, most in zip(step.ledger.owners, step.ledger.live.max(0), strict=True) if most
    }
    assert set(found.owners) == there


@given(most=st.integers(1, 60))
def test_merged_stretches_keep_the_highest_and_the_peak(most: int) -> None:
    full = Envelope.of(timed(), 50)
    few = full.merged(most)
    assert len(few.live) == min(most, 50)
    assert len(few.edges) == len(few.live) + 1
    assert set(few.edges) <= set(full.edges)
    for begin, end, row in zip(few.edges, few.edges[1:], few.live, strict=False):
        inside = [i for i, edge in enumerate(full.edges[:-1]) if begin <= edge < end]
        assert sum(row) == max(sum(full.live[i]) for i in inside)
        assert row in [full.live[i] for i in inside]
    lengths = np.diff(few.edges)
    times = [np.array([row[i] for row in few.busy]) @ lengths for i in range(3)]
    before = [np.array([row[i] for row in full.busy]) @ np.diff(full.edges) for i in range(3)]
    assert times == pytest.approx(before)


@pytest.mark.parametrize("name", STEPS)
def test_what_was_written_is_read_again(name: str) -> None:
    found = Envelope.of(STEPS[name])
    assert Envelope.from_json(found.to_json()) == found


def test_an_owner_has_one_style_in_every_step_and_no_two_share_it() -> None:
    colored_owners = {"parameters", "optimizer", "activations"}
    first, other = Envelope.of(ordered()), Envelope.of(ordered(3))
    styles = [dict(zip(one.owners, one.styles, strict=True)) for one in (first, other)]
    assert [{styles[0][name], styles[1][name]} for name in colored_owners] == [
        {styles[0][name]} for name in colored_owners
    ]
    fewer = replace(first, owners=("optimizer", "nobody's"))
    assert fewer.styles[0] == styles[0]["optimizer"]
    for one in STEPS.values():
        found = Envelope.of(one).styles
        assert len(set(found)) == len(found)
        assert max(found) < BANDS
    assert len(set(HATCHES)) == BANDS
    assert len(set(COLORS.values())) == BANDS


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"title": 1}', "half"])
def test_what_is_no_step_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a step must hold what to_json writes, and"):
        Envelope.from_json(text)


def test_rows_of_other_lengths_are_refused() -> None:
    found = json.loads(Envelope.of(ordered()).to_json())
    for spoilt in ({"edges": [0.0]}, {"busy": []}, {"owners": ["one"]}):
        with pytest.raises(ValueError, match="its rows are not as long as they must be"):
            Envelope.from_json(json.dumps(found | spoilt))
