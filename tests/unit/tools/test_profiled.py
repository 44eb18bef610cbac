from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.tools.profiled import (
    COMPUTE,
    EXCHANGE,
    LOAD,
    PREPARE,
    REFRESH,
    STAGES,
    TRANSFER,
    UPDATE,
    Conditions,
    LoopStage,
    Passed,
    Remedy,
    Waits,
    profiled,
    remedies,
)

CALM = Conditions(cores=8)
seconds = st.floats(0.0, 100.0)
steps = st.lists(st.tuples(*[seconds] * 6, st.floats(0.01, 100.0)), min_size=1, max_size=20)


def passed(*rows: dict[str, float], takes: dict[str, float] | None = None) -> list[Passed]:
    return [Passed(8, row, takes or {}) for row in rows]


@given(steps)
def test_the_overhead_is_what_shows_and_is_not_computing_to_computing(
    rows: list[tuple[float, ...]],
) -> None:
    names = [*(name for name in STAGES if name != COMPUTE), COMPUTE]
    every = [dict(zip(names, row, strict=True)) for row in rows]
    found = profiled(passed(*every), CALM)
    computing = sum(row[COMPUTE] for row in every)
    overhead = sum(sum(row.values()) - row[COMPUTE] for row in every)
    assert found.overhead == pytest.approx(overhead / computing, rel=1e-9, abs=1e-12)
    assert sum(one.share for one in found.stages) == pytest.approx(1)
    low, high = found.interval
    ratios = [(sum(row.values()) - row[COMPUTE]) / row[COMPUTE] for row in every]
    assert min(ratios) - 1e-9 <= low * (1 + 1e-9)
    assert high <= max(ratios) * (1 + 1e-9) + 1e-9
    assert low <= high


def test_steps_that_are_alike_are_beyond_doubt_and_others_are_not() -> None:
    alike = profiled(passed(*[{COMPUTE: 2.0, UPDATE: 0.5}] * 9), CALM)
    assert alike.overhead == alike.interval[0] == alike.interval[1] == 0.25
    separate = profiled(passed({COMPUTE: 2.0, UPDATE: 0.5}, {COMPUTE: 2.0, UPDATE: 1.5}), CALM)
    assert separate.interval == (0.25, 0.75)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    draw, held = np.random.default_rng(0), 0
    truth, times = 0.3, 200
    for number in range(times):
        rows = [
            {COMPUTE: float(c), LOAD: float(truth * o)}
            for c, o in draw.lognormal(0, 0.3, size=(30, 2))
        ]
        low, high = profiled(passed(*rows), CALM, seed=number).interval
        held += low <= truth <= high
    assert 0.89 * times <= held <= 0.99 * times  # the bootstrap of 30 steps is a little narrow


def test_a_stage_takes_what_it_shows_or_more() -> None:
    found = profiled(passed({COMPUTE: 1.0, LOAD: 0.2}, takes={LOAD: 0.9, COMPUTE: 0.1}), CALM)
    assert (found.stage(LOAD).takes, found.stage(LOAD).shows) == (0.9, 0.2)
    assert found.stage(COMPUTE).takes == 1.0
    assert found.bottleneck.name == COMPUTE
    with pytest.raises(ValueError, match="a stage must be one of .* and it is 'coffee'"):
        found.stage("coffee")


def test_it_prints_and_is_data() -> None:
    found = profiled(passed({COMPUTE: 1.0, LOAD: 1.0}, takes={LOAD: 2.0}), replace(CALM, workers=0))
    text = str(found)
    for word in ("1 steps of 8 samples", "R_O", "2 data loading", "7 distributed update"):
        assert word in text
    assert "num_workers=2 in the DataLoader" in text
    again = json.loads(found.to_json())
    assert again["stages"][1] == {"name": LOAD, "takes": 2.0, "shows": 1.0, "share": 0.5}


def test_a_profile_of_no_step_is_refused() -> None:
    with pytest.raises(ValueError, match="needs at least one step, and none was measured"):
        profiled([], CALM)


def advice(
    conditions: Conditions,
    waits: tuple[float, ...] = (0.5,),
    first: tuple[float, ...] = (),
    **shows: float,
) -> tuple[Remedy, ...]:
    """Return the remedies of a step of one second or more, by what it shows and what it takes."""
    names = {name.split()[-1]: name for name in STAGES} | {"load": LOAD, "prepare": PREPARE}
    conditions_shown = {names[k]: v for k, v in shows.items() if not k.startswith("takes_")}
    takes = {names[k[6:]]: v for k, v in shows.items() if k.startswith("takes_")}
    every = sum(conditions_shown.values())
    stages = {
        name: LoopStage(
            name, takes.get(name, conditions_shown.get(name, 0.0)), conditions_shown.get(name, 0.0),
            conditions_shown.get(name, 0.0) / every,
        )
        for name in STAGES
    }  # fmt: skip
    return remedies(stages, every, Waits(first, waits), conditions)


def orders(found: tuple[Remedy, ...]) -> list[str]:
    return [one.what for one in found]


def test_as_many_workers_as_hide_loading_and_no_more_than_there_are_cores() -> None:
    now = Conditions(cores=8, workers=0)
    (found,) = advice(now, load=0.5, prepare=1.0, computing=0.6)
    assert found.what == "num_workers=3 in the DataLoader"  # 1.5 s behind 0.6
    assert found.gain == pytest.approx(1.5 / 2.1)
    assert "takes 1.5 s to load and prepare, the rest of a step 0.6 s" in found.because
    few = replace(now, cores=3)  # one of them computes
    assert "prepare samples once" in orders(advice(few, load=0.5, prepare=1.0, computing=0.6))[0]
    assert "faster disk" in orders(advice(few, load=1.0, prepare=0.5, computing=0.6))[0]
    gpu = replace(few, cuda=True, pinned=True)
    assert orders(advice(gpu, load=0.5, prepare=1.0, computing=0.6)) == [
        "num_workers=3 in the DataLoader"
    ]


def test_bursts_ask_for_prefetching_and_a_bare_loop_for_a_loader() -> None:
    now = Conditions(cores=8, workers=2)
    shows = {"load": 0.1, "prepare": 0.0, "takes_load": 0.9, "computing": 0.9}
    assert orders(advice(now, (0.01, 0.01, 0.3), **shows)) == [
        "a larger prefetch_factor in the DataLoader"
    ]
    assert advice(now, (0.1, 0.1, 0.1), **shows) == ()
    assert orders(advice(now, (0.1, 0.1), (0.9,), **shows)) == [
        "persistent_workers=True in the DataLoader"
    ]
    assert advice(replace(now, persistent=True), (0.1, 0.1), (0.9,), **shows) == ()
    bare = orders(advice(Conditions(cores=8), load=0.5, computing=0.5))
    assert bare[0].startswith("load mini-batches ahead")


def test_page_locked_memory_is_for_a_gpu_whose_loader_has_none() -> None:
    cuda = Conditions(cores=8, workers=4, cuda=True)
    assert orders(advice(cuda, device=0.2, computing=0.8)) == ["pin_memory=True in the DataLoader"]
    assert advice(replace(cuda, pinned=True), device=0.2, computing=0.8) == ()


@pytest.mark.parametrize(
    ("stage", "conditions", "order"),
    [
        (UPDATE, Conditions(cores=8, workers=4, fused=False), "fused=True"),
        (EXCHANGE, Conditions(cores=8, workers=4, ranks=4), "larger mini-batch"),
        (TRANSFER, Conditions(cores=8, workers=4, cuda=True), "pin_memory"),
        (REFRESH, Conditions(cores=8, workers=4, ranks=4, fused=False, cuda=True), None),
    ],
)
def test_a_remedy_needs_its_condition_and_a_few_percent(
    stage: str, conditions: Conditions, order: str | None
) -> None:
    def advised(share: float, now: Conditions) -> list[str]:
        shows = {stage: share, COMPUTE: 1 - share}
        stages = {
            n: LoopStage(n, shows.get(n, 0.0), shows.get(n, 0.0), shows.get(n, 0.0)) for n in STAGES
        }
        return orders(remedies(stages, 1.0, Waits((), (0.0,)), now))

    found = advised(0.2, conditions)
    assert ([order] if order else []) == [o for o in [order] if found and o and o in found[0]]
    assert len(found) == (1 if order else 0)
    assert advised(0.04, conditions) == []
    assert advised(0.2, Conditions(cores=8, workers=4)) == []


def test_more_memory_where_the_largest_that_fits_is_the_fastest() -> None:
    now = Conditions(
        cores=8,
        workers=4,
        budget=1 << 20,
        times=((8, 2.0), (4, 3.0), (2, 5.0)),
        micro_batch=8,
        samples=64,
    )
    (found,) = advice(now, computing=2.0)
    assert found.what == "more memory for larger micro-batches"
    assert found.gain == pytest.approx(1 / 3)
    assert advice(replace(now, micro_batch=4), computing=2.0) == ()
    assert advice(replace(now, samples=8), computing=2.0) == ()  # there are no larger ones
    assert advice(replace(now, budget=None), computing=2.0) == ()
    assert advice(replace(now, times=((8, 2.9), (4, 3.0))), computing=2.0) == ()
