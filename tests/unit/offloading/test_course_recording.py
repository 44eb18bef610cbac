from __future__ import annotations

import pytest

from anybatch.errors import BudgetError
from anybatch.offloading.course import Cut, Link, Recording, set_course

LINK = Link(1.0, 1.0)


def recording(*, loose: frozenset[int] = frozenset(), rest: int = 1) -> Recording:
    """Three storages are saved one after another, and asked for in the other order."""
    cuts = [Cut(True, k, ("looks",), 10) for k in range(3)] + [Cut(False, k) for k in (2, 1, 0)]
    used = [(), (0,), (1,), (2,), (2,), (1,), (0,)]
    return Recording(
        cuts=tuple(cuts),
        sizes=(10, 10, 10),
        used=tuple(map(frozenset, used)),
        rest=(rest,) * 7,
        seconds=(1.0,) * 7,
        loose=loose,
        outside=5,
        peak=5 + 10 + rest,
    )


def test_intervals_are_functions_and_what_is_no_storage_is_the_rest() -> None:
    trace = recording().trace()
    assert [function.name for function in trace.functions][:3] == ["begin", "pack 0", "pack 1"]
    assert trace.functions[-1].name == "unpack 0"
    assert trace.live == (1, 11, 21, 31, 31, 21, 11)
    assert trace.floor == 11


def test_what_outlives_its_use_is_rest_where_it_is_used() -> None:
    trace = recording(loose=frozenset({1})).trace()
    assert trace.live == (1, 11, 21, 21, 21, 21, 11)


def test_a_course_offloads_what_does_not_fit_and_no_more() -> None:
    assert set_course(recording(), 36, LINK).sent == 0
    course = set_course(recording(), 35, LINK)
    assert course.sent == 10
    assert course.predicted <= 35
    assert course.stages is not None
    assert [(i, stage.outs) for i, stage in enumerate(course.stages) if stage.outs] == [(1, (0,))]
    assert set_course(recording(), 16, LINK).sent == 20
    assert set_course(recording(loose=frozenset({1})), 36, LINK).sent == 10


def test_what_is_there_besides_takes_its_space() -> None:
    assert set_course(recording(), 36, LINK, more=1).sent == 10
    assert set_course(recording(), 36, LINK, more=1).predicted <= 36


def test_where_a_plan_does_not_fit_and_the_recording_did_all_is_on_demand() -> None:
    tight = Recording(**{**vars(recording()), "peak": 12})
    course = set_course(tight, 12, LINK)
    assert (course.stages, course.predicted, course.sent) == (None, 12, 30)
    with pytest.raises(BudgetError, match="with all saved tensors offloaded it holds 12 B"):
        set_course(tight, 11, LINK)
