"""Storages that are made again, also on drawn recordings: budgets hold, and nothing is slower."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from tests.unit.offloading.traces import peak_of

from anybatch.errors import BudgetError
from anybatch.offloading.course import (
    Cut,
    Link,
    Recording,
    Remake,
    Trace,
    choices,
    remade,
    set_course,
)

SLOW, FAST = Link(1.0, 1.0), Link(1e9, 1e9)


def recording(
    sizes: tuple[int, ...], remakes: dict[int, Remake], *, rest: int = 1, loose: int = -1
) -> Recording:
    """Storages are saved one after another, and asked for in the other order."""
    order = range(len(sizes))
    cuts = [Cut(True, k, ("looks",), sizes[k]) for k in order]
    cuts += [Cut(False, k) for k in reversed(order)]
    used = [frozenset[int](), *(frozenset({cut.number}) for cut in cuts)]
    return Recording(
        cuts=tuple(cuts),
        sizes=sizes,
        used=tuple(used),
        rest=(rest,) * len(used),
        seconds=(1.0,) * len(used),
        loose=frozenset({loose} - {-1}),
        outside=5,
        peak=5 + max(sizes) + rest,
        standing=(rest,) * len(cuts),
        remakes=remakes,
    )


PAIRS = recording((10,) * 6, {k: Remake((k - 1,), 0.5) for k in (1, 3, 5)})


def test_where_everything_fits_nothing_is_made_again() -> None:
    course = set_course(PAIRS, 66, SLOW)
    assert (course.sent, course.dropped) == (0, frozenset())
    course = set_course(recording((10,) * 6, PAIRS.remakes, loose=4), 66, SLOW)
    assert (course.sent, course.dropped) == (10, frozenset())


def test_on_a_slow_link_they_are_made_again_and_on_a_fast_one_they_move() -> None:
    course = set_course(PAIRS, 56, SLOW)
    assert (course.sent, len(course.dropped)) == (0, 1)
    assert course.predicted <= 56
    course = set_course(PAIRS, 46, SLOW)
    assert (course.sent, course.dropped) == (0, {1, 3})
    assert set_course(PAIRS, 46, FAST).dropped == frozenset()


def test_what_takes_longer_than_its_travel_is_not_made_again() -> None:
    dear = recording((10,) * 6, {k: Remake((k - 1,), 20.5) for k in (1, 3, 5)})
    assert list(choices(dear, SLOW)) == []
    assert set_course(dear, 46, SLOW).dropped == frozenset()


def test_a_function_makes_it_before_it_is_requested() -> None:
    again = remade(PAIRS, {3})
    assert again.made == {8: (3,)}
    names = [function.name for function in again.trace.functions]
    assert names[9:11] == ["make 3 again", "unpack 3"]
    made = again.trace.functions[9]
    assert made.reads == (2,)
    assert [again.of.get(v) for v in made.makes] == [3, None]
    assert again.trace.functions[10].reads == (made.makes[0],)
    assert again.trace.seconds == PAIRS.trace().seconds + 0.5


def test_other_work_and_what_is_there_counts() -> None:
    heavy = recording((10,) * 6, {5: Remake((4,), 0.5, work=100)}, rest=7)
    assert remade(heavy, {5}).trace.floor == 10 + 10 + 7 + 100
    assert set_course(heavy, 70, SLOW).dropped == frozenset()


def test_what_it_is_made_from_is_made_before() -> None:
    chain = recording((10,) * 4, {1: Remake((0,), 0.5), 2: Remake((1,), 0.5)})
    again = remade(chain, {1, 2})
    assert again.made == {5: (1, 2)}
    names = [function.name for function in again.trace.functions]
    assert names[6:9] == ["make 1 again", "make 2 again", "unpack 2"]
    assert again.trace.functions[7].reads == (again.trace.functions[6].makes[0],)
    assert {1, 2} in list(choices(chain, SLOW))  # they are asked for one after the other
    far = recording((10,) * 14, {1: Remake((0,), 0.5), 12: Remake((1,), 0.5)})
    assert not any({1, 12} <= chosen for chosen in choices(far, SLOW))


def test_what_would_move_is_proposed_first() -> None:
    assert next(iter(choices(PAIRS, SLOW, moved={3, 4}))) == {3}
    assert {1, 3, 5} in list(choices(PAIRS, SLOW))


def test_drawn_steps(counted: Callable[[int], int]) -> None:
    """Every course holds its budget, and is no slower than without."""
    again = 0
    for seed in range(counted(300)):
        rng = Random(seed)
        count = rng.randint(2, 14)
        sizes = tuple(rng.randint(1, 20) for _ in range(count))
        remakes = {
            k: Remake((rng.randrange(k),), rng.uniform(0, 30), rng.randint(0, 9))
            for k in range(1, count)
            if rng.random() < 0.5
        }
        drawn = recording(sizes, remakes, rest=rng.randint(0, 9))
        link = Link(rng.uniform(0.2, 5), rng.uniform(0.2, 5))
        low, high = drawn.trace().floor, drawn.trace().peak
        memory = 5 + rng.randint(low, high)
        ours = set_course(drawn, memory, link)
        without = set_course(recording(sizes, {}, rest=drawn.rest[0]), memory, link)
        assert peak_of(ours) == ours.predicted <= memory
        assert ours.seconds <= without.seconds
        assert ours.dropped <= remakes.keys()
        _lives(remade(drawn, ours.dropped).trace)
        stages = ours.stages or ()
        for i, stage in enumerate(stages):  # what dies while it is copied keeps its bytes
            assert {*stage.outs} <= {v for later in stages[i + 1 :] for v in later.frees}
        again += bool(ours.dropped)
    assert again


def _lives(trace: Trace) -> None:
    """What is made again is made once, and used."""
    for v, uses in enumerate(trace.uses):
        assert uses, trace.variables[v].name


def test_less_than_the_floor_is_refused_as_without() -> None:
    with pytest.raises(BudgetError, match="with all saved tensors offloaded it holds 16 B"):
        set_course(PAIRS, 15, SLOW)
