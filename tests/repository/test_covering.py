"""A choice of cases holds each value of each parameter, and each pair where that is requested."""

from __future__ import annotations

import random
from itertools import combinations, product
from typing import Any

import pytest
from tests.covering import covering

NAMES = "model", "size", "loss"
PRODUCT = [dict(zip(NAMES, one, strict=True)) for one in product("abcdef", range(4), (min, max))]


def held(cases: list[dict[str, Any]], count: int) -> set[Any]:
    return {chosen for case in cases for chosen in combinations(case.items(), count)}


@pytest.mark.parametrize(("pairs", "least"), [(False, 6), (True, 24)])
def test_few_cases_hold_all_values_or_pairs(pairs: bool, least: int) -> None:
    for seed in range(20):
        chosen = [PRODUCT[at] for at in covering(PRODUCT, random.Random(seed), pairs=pairs)]
        assert held(chosen, 1 + pairs) == held(PRODUCT, 1 + pairs)
        assert least <= len(chosen) <= least + least // 4


def test_the_same_seed_chooses_the_same_cases_and_another_one_others() -> None:
    chosen = [covering(PRODUCT, random.Random(seed)) for seed in (1, 1, 2)]
    assert chosen[0] == chosen[1] != chosen[2]


def test_values_that_are_equal_and_of_other_types_are_others() -> None:
    cases = [{"way": way} for way in (1, True, 1.0, None, "1", 1)]
    assert len(covering(cases, random.Random(0))) == 5


def test_what_is_no_product_stays_whole() -> None:
    cases = [{"name": name, "words": name.upper()} for name in "abc"]
    assert covering(cases, random.Random(0)) == [0, 1, 2]


@pytest.mark.parametrize("model", range(4))
@pytest.mark.parametrize(("size", "loss"), [(1, "a"), (2, "a"), (2, "b")])
def test_of_several_lists_each_case_is_run(
    request: pytest.FixtureRequest, model: int, size: int, loss: str
) -> None:
    """A list that is written by hand stays whole; a soak runs all, and so does its name alone."""
    name = request.node.nodeid.partition("[")[0]
    run = [one.callspec.params for one in request.session.items if one.nodeid.startswith(name)]
    if len(run) > 1 and not request.config.getoption("--soak"):
        assert len(run) == 4
        assert {one["model"] for one in run} == set(range(4))
        assert {(one["size"], one["loss"]) for one in run} == {(1, "a"), (2, "a"), (2, "b")}
