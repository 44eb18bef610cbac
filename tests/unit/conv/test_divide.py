"""Divisions of one convolution kernel beside every division there is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest

from anybatch.conv.divide import front, sizes
from anybatch.reports import Configuration, KernelPart

ALGORITHMS = ("native", "im2col", "fft", "winograd")


def measured(
    rng: random.Random, size: int, policy: str = "all", setups: int = 0
) -> list[KernelPart]:
    """Parts as they might be measured; some algorithms fail at some sizes.

    So many algorithms, or less, do something once for all of their parts.
    """
    parts = []
    once = {name: round(rng.uniform(0, 4), 3) for name in rng.sample(ALGORITHMS, setups)}
    for n in sizes(policy, size):
        for name in ALGORITHMS:
            if rng.random() < 0.7:
                workspace = rng.choice([0, rng.randint(0, 40), n * rng.randint(1, 9)])
                parts.append(KernelPart(n, name, round(rng.uniform(0.1, 3) * n**0.8, 3), workspace))
                parts[-1] = replace(parts[-1], setup=once.get(name, 0.0))
    return parts


def every(parts: list[KernelPart], size: int) -> Iterator[Configuration]:
    """Every set of parts that adds up to `size`."""

    def paid(left: int, first: int) -> Iterator[tuple[KernelPart, ...]]:
        if left == 0:
            yield ()
        for at in range(first, len(parts)):
            if parts[at].size <= left:
                for rest in paid(left - parts[at].size, at):
                    yield (parts[at], *rest)

    return (Configuration(found) for found in paid(size, 0))


def total_seconds(configuration: Configuration) -> float:
    """Seconds of all parts, and of each algorithm's set-up."""
    setups = {part.algorithm: part.setup for part in configuration.parts}
    return sum(part.seconds for part in configuration.parts) + sum(setups.values())


def pareto(found: Iterator[Configuration]) -> list[tuple[float, int]]:
    """Seconds and workspace of those that none beats in both."""
    best: list[tuple[float, int]] = []
    pairs = {(round(total_seconds(c), 9), c.workspace) for c in found}
    for seconds, workspace in sorted(pairs, key=lambda pair: (pair[1], pair[0])):
        if not best or seconds < best[-1][0]:
            best.append((seconds, workspace))
    return best


def recursion(parts: list[KernelPart], size: int, limit: int) -> float:
    """The paper's T(n) = min(t*(n), min_k T(k) + T(n - k)) within a workspace."""

    @cache
    def least(n: int) -> float:
        single = [p.seconds for p in parts if p.size == n and p.workspace <= limit]
        halves = [least(k) + least(n - k) for k in range(1, n // 2 + 1)]
        return min([*single, *halves], default=float("inf"))

    return least(size)


def sets(parts: list[KernelPart], size: int) -> list[tuple[float, int]]:
    """The paper's recursion on sets of desirable configurations, pruned at every size."""

    @cache
    def desirable(n: int) -> tuple[Configuration, ...]:
        single = [Configuration((p,)) for p in parts if p.size == n]
        joined = [
            Configuration((*a.parts, *b.parts))
            for k in range(1, n // 2 + 1)
            for a in desirable(k)
            for b in desirable(n - k)
        ]
        found = sorted([*single, *joined], key=lambda c: (c.workspace, c.seconds))
        retained: list[Configuration] = []
        for one in found:
            if not retained or one.seconds < retained[-1].seconds - 1e-12:
                retained.append(one)
        return tuple(retained)

    return [(round(c.seconds, 9), c.workspace) for c in desirable(size)]


def points(found: list[Configuration]) -> list[tuple[float, int]]:
    return [(round(c.seconds, 9), c.workspace) for c in found]


@pytest.mark.large
@pytest.mark.parametrize("seed", range(1000))
def test_a_front_is_that_of_all_divisions(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(1, 7)
    parts = measured(rng, size, setups=rng.randint(0, 3))
    found = front(parts, size)
    assert points(found) == pareto(every(parts, size))
    assert all(c.size == size for c in found)
    assert set(itertools.chain(*(c.parts for c in found))) <= set(parts)
    limit = rng.randint(0, 40)
    assert points(front(parts, size, limit)) == [p for p in points(found) if p[1] <= limit]


@pytest.mark.parametrize("policy", ["all", "powerOfTwo", "undivided"])
def test_it_is_the_papers_recursion(policy: str, counted: Callable[[int], int]) -> None:
    rng = random.Random(1)
    for _ in range(counted(200)):
        size = rng.randint(1, 24)
        parts = measured(rng, size, policy)
        limit = rng.randint(0, 60)
        wanted = recursion(parts, size, limit)
        heavy = measured(rng, size, policy, setups=2)
        best = min(
            recursion([p for p in heavy if p.algorithm not in without], size, limit)
            + sum({p.algorithm: p.setup for p in heavy if p.algorithm not in without}.values())
            for count in range(len(ALGORITHMS) + 1)
            for without in itertools.combinations(ALGORITHMS, count)
        )
        dearer = front(heavy, size, limit)
        assert (dearer[-1].seconds if dearer else float("inf")) == pytest.approx(best, rel=1e-12)
        found = front(parts, size, limit)
        assert (found[-1].seconds if found else float("inf")) == pytest.approx(wanted, rel=1e-12)
        assert all(one.workspace <= limit for one in found)
        if size <= 16:
            assert points(front(parts, size)) == sets(parts, size)


def test_parts_of_an_algorithm_follow_each_other() -> None:
    parts = [
        KernelPart(3, "fft", 1.0, 9, 0.5),
        KernelPart(1, "fft", 1.0, 9, 0.5),
        KernelPart(2, "native", 1.0, 9),
    ]
    (found,) = front(parts, 6)
    assert (str(found), found.seconds) == ("fft@3 x 2", 2.5)
    (found,) = front([*parts[:2], KernelPart(2, "native", 0.1, 9)], 4)
    assert (str(found), found.seconds) == ("native@2 x 2", 0.2)
    (found,) = front(
        [*parts[:2], KernelPart(2, "native", 1.2, 9), KernelPart(1, "native", 9.0, 9)], 6
    )
    assert str(found) == "fft@3 x 2"
    (found,) = front([*parts[:2], KernelPart(2, "native", 0.1, 9)], 7)
    assert str(found) == "fft@3, native@2 x 2"
    assert found.seconds == pytest.approx(1.7)


def test_a_limit_decides_what_is_the_fastest() -> None:
    parts = [KernelPart(1, "fft", 1.0, 5000), KernelPart(4, "fft", 1.0, 9000)]
    assert front(parts, 4, 100) == []
    assert str(front(parts, 4, 5000)[-1]) == "fft@1 x 4"
    assert str(front(parts, 4, 9000)[-1]) == "fft@4"
    assert front([KernelPart(2, "fft", 1.0, 0)], 3) == []


def test_policies() -> None:
    assert sizes("all", 3) == [1, 2, 3]
    assert sizes("powerOfTwo", 8) == [1, 2, 4, 8]
    assert sizes("powerOfTwo", 11) == [1, 2, 4, 8, 11]
    assert sizes("undivided", 11) == [11]
    with pytest.raises(ValueError, match="policy must be"):
        sizes("half", 4)


def test_what_takes_for_ever_is_never_chosen() -> None:
    parts = [KernelPart(n, "native", float(n), 0) for n in (1, 2)]
    parts += [KernelPart(n, "cudnn:5", float("inf"), 0) for n in (1, 2)]
    assert {p.algorithm for c in front(parts, 2) for p in c.parts} == {"native"}
