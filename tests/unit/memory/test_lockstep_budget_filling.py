"""The most that a limit holds, beside every subset."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations

import pytest

from anybatch.memory.lockstep_budget import filled


def every(sizes: Counter[int], limit: int) -> int:
    """The best of all subsets."""
    storages = list(sizes.elements())
    sums = {sum(some) for k in range(len(storages) + 1) for some in combinations(storages, k)}
    return max(one for one in sums if one <= limit)


@pytest.mark.parametrize("seed", range(60))
def test_it_is_the_best_of_all_subsets_where_none_is_small(seed: int) -> None:
    rng = random.Random(seed)
    unit = rng.choice([1, 7, 64])
    sizes = Counter(unit * rng.randrange(1, 40) for _ in range(rng.randrange(1, 9)))
    limit = rng.randrange(0, sum(sizes.elements()) + 10)
    assert filled(sizes, limit) == every(sizes, limit)


def test_small_ones_fill_gaps_and_no_more_than_they_are() -> None:
    assert filled({1000: 3}, 2500) == 2000
    assert filled({1000: 3, 1: 10}, 2500) == 2010
    assert filled({1000: 3, 1: 900}, 2500) == 2500
    assert filled({1000: 3, 1: 900}, 10**9) == 3900


def test_of_sizes_with_nothing_in_common_the_limit_is_reported() -> None:
    assert filled({2**40 + 1: 3, 2**40: 3}, 5 * 2**39) == 5 * 2**39
