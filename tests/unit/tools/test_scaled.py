"""More GPUs, foreseen from what one has shown: Lemma 3.1 where it holds, and sums by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch import Plan
from anybatch.planning import speedup
from anybatch.reports import Evidence, Profile, Scale
from anybatch.tools.scaled import (
    AS_PARTS,
    COMPUTE,
    FREE,
    LOAD,
    PREPARE,
    SHARED,
    TRANSFER,
    UPDATE,
    Goal,
    LoopStage,
    NetworkLink,
    loop_of,
    scaled,
)

some = st.floats(0.01, 10.0)


def profile(workers: int = 0, takes: dict[str, float] | None = None, **shows: float) -> Profile:
    names = {"load": LOAD, "prepare": PREPARE, "compute": COMPUTE, "update": UPDATE}
    seconds, takes = sum(shows.values()), takes or {}
    stages = tuple(
        LoopStage(name, max(show, takes.get(name, 0.0)), show, show / seconds)
        for name, show in ((name, shows.get(word, 0.0)) for word, name in names.items())
    )
    stages += (LoopStage(TRANSFER, 0.0, 0.0, 0.0),)
    waits = seconds / shows["compute"] - 1
    return Profile(stages, 1, 64, seconds, (seconds, seconds), waits, (waits, waits), workers)


@given(some, some, some)
def test_what_is_not_divided_is_the_lemma_to_the_digit(
    compute: float, load: float, update: float
) -> None:
    found = scaled(profile(compute=compute, load=load, update=update), 8, {}, 0, None, Goal())
    for row in found.rows:
        if 64 % row.gpus == 0:
            assert row.speedup == pytest.approx(row.lemma)
            assert row.lemma == pytest.approx(speedup((load + update) / compute, row.gpus))
            assert row.seconds == pytest.approx(compute / row.gpus + load + update)
    assert found.assumed == (SHARED, FREE, AS_PARTS)


def test_preparation_is_divided_and_gradients_are_summed() -> None:
    link = NetworkLink(1e6)
    found = profile(compute=2.0, prepare=1.0, load=0.25, update=0.125)
    loop = loop_of(found, 8, {}, 10**6, link)
    for gpus in (1, 2, 4, 8):
        ring = 2 * (gpus - 1) / gpus
        assert loop.seconds(gpus) == pytest.approx(2 / gpus + 1 / gpus + 0.25 + 0.125 + ring)
    assert scaled(found, 8, {}, 10**6, link, Goal()).assumed == (SHARED, AS_PARTS)


def test_what_workers_hide_shows_again_when_computing_is_short() -> None:
    """Two workers take 1 s for a mini-batch; on four GPUs a quarter of 2 s is less."""
    takes = {LOAD: 2.0}
    loop = loop_of(profile(2, takes, compute=2.0), 8, {}, 0, None)
    assert loop.seconds(1) == pytest.approx(2.0)
    assert loop.seconds(2) == pytest.approx(1.0)
    assert loop.seconds(4) == pytest.approx(1.0)  # one disk
    divided = loop_of(profile(2, {PREPARE: 2.0}, compute=2.0), 8, {}, 0, None)
    assert divided.seconds(4) == pytest.approx(0.5)  # each its own share
    late = profile(2, takes, compute=0.5, load=0.5)  # what shows is what is not hidden
    assert loop_of(late, 8, {}, 0, None).seconds(1) == pytest.approx(1.0)


@given(st.dictionaries(st.sampled_from([1, 2, 4, 8, 16, 32]), some, min_size=1), some)
def test_one_gpu_takes_what_was_profiled_for_any_timing(
    timed: dict[int, float], compute: float
) -> None:
    micro_batch = max(timed)
    loop = loop_of(profile(compute=compute, update=0.5), micro_batch, timed, 0, None)
    assert loop.seconds(1) == pytest.approx(compute + 0.5)
    if 64 % micro_batch == 0:  # a share of two micro-batches takes twice one
        share = 2 * micro_batch / 64
        gpus = 32 // micro_batch
        assert loop.seconds(gpus) == pytest.approx(compute * share + 0.5)


def test_small_shares_are_computed_as_they_were_timed() -> None:
    timed = {4: 0.3, 8: 0.4, 16: 0.7}
    loop = loop_of(profile(compute=2.8), 16, timed, 0, None)
    assert loop.seconds(8) == pytest.approx(0.4)  # 8 samples in one micro-batch
    assert loop.seconds(16) == pytest.approx(0.3)
    assert loop.seconds(2) == pytest.approx(1.4)


@given(some, some, st.floats(1.0, 12.0))
def test_a_goal_is_reached_by_as_few_as_can(compute: float, load: float, wanted: float) -> None:
    found = profile(compute=compute, load=load)
    loop = loop_of(found, 8, {}, 0, None)
    reached = [g for g in range(1, 65) if loop.seconds(1) / loop.seconds(g) >= wanted * (1 - 1e-9)]
    scale = scaled(found, 8, {}, 0, None, Goal(speedup=wanted))
    assert scale.gpus == (reached[0] if reached else None)
    steps = 10
    deadline = loop.seconds(1) * steps / wanted
    by = scaled(found, 8, {}, 0, None, Goal(deadline=deadline, steps=steps))
    assert by.gpus == scale.gpus
    if scale.gpus is None:
        assert "no number of GPUs" in scale.goal
    else:
        assert scale.gpus in [row.gpus for row in scale.rows]


def test_it_is_reported_and_goes_through_json() -> None:
    found = scaled(profile(compute=1.0, load=0.1), 8, {}, 0, None, Goal(gpus=5))
    assert found.gpus == 5
    foreseen = Evidence("not shown", "no step has been run")
    plan = Plan(8, "streaming", "in place", "a loss", foreseen, (), scale=found)
    assert Plan.from_json(plan.to_json()) == plan
    text = str(plan)
    assert "5 GPUs, as requested" in text
    (chosen,) = [line for line in text.splitlines() if line.endswith("<")]
    assert chosen.split()[0] == "5"
    assert isinstance(Plan.from_json(plan.to_json()).scale, Scale)


@given(st.integers(0, 3), some, st.floats(0.0, 10.0), st.floats(0.0, 10.0), st.floats(0.0, 10.0))
def test_one_gpu_takes_what_it_took_for_any_hiding_of_workers(
    workers: int, compute: float, load: float, shows: float, takes: float
) -> None:
    found = profile(workers, {LOAD: takes + load, PREPARE: takes}, compute=compute, load=shows)
    full = sum(one.shows for one in found.stages)
    assert loop_of(found, 8, {}, 0, None).seconds(1) == pytest.approx(full)
