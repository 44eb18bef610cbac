"""The division of a network's workspace beside every division, and beside HiGHS."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp
from tests.unit.conv.test_divide import measured

from anybatch.conv.divide import front, share
from anybatch.errors import BudgetError
from anybatch.reports import Configuration, KernelPart

Fronts = list[list[Configuration]]


def random_fronts(rng: random.Random, kernels: int, points: int, scale: int) -> Fronts:
    """Fronts as kernels have them; some kernels are alike, as layers of a network are."""
    found: Fronts = []
    while len(found) < kernels:
        if found and rng.random() < 0.3:
            found.append(rng.choice(found))
            continue
        count = rng.randint(1, points)
        spaces = sorted(rng.sample(range(scale), count))
        spaces[0] = 0 if rng.random() < 0.8 else spaces[0]
        seconds = sorted((rng.uniform(0.1, 1) * rng.choice([1, 10]) for _ in spaces), reverse=True)
        parts = zip(seconds, spaces, strict=True)
        found.append([Configuration((KernelPart(1, "a", t, w),)) for t, w in parts])
    return found


def least(fronts: Fronts, total: int) -> float:
    """The fastest of all choices within the total."""
    return min(
        sum(c.seconds for c in choice)
        for choice in itertools.product(*fronts)
        if sum(c.workspace for c in choice) <= total
    )


def by_highs(fronts: Fronts, total: int) -> float:
    """The optimum of Equations 1-4 as a solver finds it."""
    t = np.array([c.seconds for front in fronts for c in front])
    w = np.array([c.workspace for front in fronts for c in front], float)
    ones = np.zeros((len(fronts), len(t)))
    at = 0
    for k, one in enumerate(fronts):
        ones[k, at : at + len(one)] = 1
        at += len(one)
    rules = [LinearConstraint(ones, 1, 1), LinearConstraint(w / total, -np.inf, 1)]
    settings = {"mip_rel_gap": 0.0}
    found = milp(t, constraints=rules, integrality=1, bounds=Bounds(0, 1), options=settings)
    assert found.success
    return float(found.fun)


@pytest.mark.large
@pytest.mark.parametrize("seed", range(1000))
def test_a_division_is_the_fastest_of_all(seed: int) -> None:
    rng = random.Random(seed)
    fronts = random_fronts(rng, rng.randint(1, 6), 5, rng.choice([10, 1000]))
    needed = sum(front[0].workspace for front in fronts)
    total = needed + rng.randint(0, 2 * max(f[-1].workspace for f in fronts))
    found = share(fronts, total)
    assert all(c in front for c, front in zip(found, fronts, strict=True))
    assert sum(c.workspace for c in found) <= total
    assert sum(c.seconds for c in found) == pytest.approx(least(fronts, total), rel=1e-12)


@pytest.mark.large
@pytest.mark.parametrize("seed", range(40))
def test_a_network_as_large_as_resnet_50_is_divided_as_highs_does_it(seed: int) -> None:
    rng = random.Random(seed)
    fronts = random_fronts(rng, 159, 11, 1 << 26)
    most = sum(front[-1].workspace for front in fronts)
    total = int(most * rng.uniform(0.02, 0.9)) + sum(f[0].workspace for f in fronts)
    found = share(fronts, total)
    assert sum(c.workspace for c in found) <= total
    wanted = by_highs(fronts, total)
    # the solver keeps its constraints to a millionth
    assert sum(c.seconds for c in found) <= wanted * (1 + 1e-9)
    assert sum(c.seconds for c in found) >= by_highs(fronts, int(total * (1 + 1e-5))) * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_no_undesirable_configuration_is_in_any_best_division(seed: int) -> None:
    """The paper's proof (III-C1): with all configurations there is nothing faster."""
    rng = random.Random(seed)
    every, fronts = [], []
    for _ in range(3):
        parts = measured(rng, 3) or [KernelPart(3, "native", 1.0, 0)]
        parts += [KernelPart(3, "native", 9.0, 0)]
        chosen = [c for c in _all(parts, 3) if c.workspace <= 30]
        every.append(sorted(chosen, key=lambda c: c.workspace))
        fronts.append(front(parts, 3))
    total = rng.randint(0, 60)
    found = sum(c.seconds for c in share(fronts, total))
    limited = [[c for c in one if c.workspace <= 30] for one in fronts]
    assert found <= least(limited, total) + 1e-9
    assert least(limited, total) == pytest.approx(least(every, total), rel=1e-9)


def _all(parts: list[KernelPart], size: int) -> list[Configuration]:
    found = []
    for count in range(1, size + 1):
        for chosen in itertools.combinations_with_replacement(parts, count):
            if sum(part.size for part in chosen) == size:
                found.append(Configuration(chosen))
    return found


def test_what_cannot_fit_says_what_is_needed() -> None:
    fronts = [[Configuration((KernelPart(1, "fft", 1.0, 2048),))]] * 3
    with pytest.raises(BudgetError, match='give workspace_total="6KiB" or more') as error:
        share(fronts, 6000)
    assert (error.value.needed, error.value.budget) == (6144, 6000)
    assert share([], 0) == []
