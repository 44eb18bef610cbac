"""Samples that couple in hiding: exact, refused or not claimed, and never silently wrong.

The cases are those of the benchmark, drawn with its seed; the truth is the undivided batch in
float64 (`benchmarks/mbs/adversary/judge.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from benchmarks.mbs.adversary.cases import HIDINGS, MECHANISMS, SPLITS, Case, draw, parse
from benchmarks.mbs.adversary.forms import FORMS
from benchmarks.mbs.adversary.judge import Truth, judge, keeps_by_hand

DRAWN = draw()
PART = 30
"""Cases of one test: a process of its own for each would take longer than the cases."""

PARTS = [DRAWN[at : at + PART] for at in range(0, len(DRAWN), PART)]


def test_every_coupling_is_drawn_with_every_hiding_and_has_honest_twins() -> None:
    pairs = {(case.coupling, case.hiding) for case in DRAWN if not case.honest}
    assert len(pairs) == len(FORMS) * len(HIDINGS) >= 1000
    twins = Counter(case.coupling for case in DRAWN if case.honest)
    assert all(twins[name] >= 3 for name, form in FORMS.items() if form.twin)
    assert {case.mechanism for case in DRAWN} == set(MECHANISMS)
    assert {case.split for case in DRAWN} == set(SPLITS)


def test_a_case_is_the_same_for_the_same_seed_and_is_read_from_its_name() -> None:
    assert draw() == DRAWN
    assert [parse(case.name) for case in DRAWN] == DRAWN


def test_a_loop_by_hand_is_wrong_where_samples_couple_and_right_for_the_twin() -> None:
    for honest in (False, True):
        case = Case("mean", "none", honest=honest)
        assert keeps_by_hand(case, Truth(case)) is honest


@pytest.mark.large(few=4)
@pytest.mark.parametrize("cases", PARTS, ids=lambda cases: f"from {cases[0].seed}")
def test_no_case_is_silently_wrong_and_no_honest_one_is_refused(
    cases: list[Case], some: Callable[..., list[Case]]
) -> None:
    found = {case: judge(case).outcome for case in some(cases, PART // 4)}
    assert not [c.name for c, outcome in found.items() if outcome in ("silently wrong", "crash")]
    assert not [c.name for c, outcome in found.items() if c.honest and outcome == "refused"]
