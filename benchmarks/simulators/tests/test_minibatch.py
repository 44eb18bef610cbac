"""Equation 6 beside every choice there is and beside HiGHS, and the sweep beside every size."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
from benchmarks.simulators.minibatch import Measured, choose, sweep
from scipy.optimize import Bounds, LinearConstraint, milp

from anybatch.core.plan_sections import KernelPart
from anybatch.errors import BudgetError


def drawn(rng: random.Random, sizes: list[int], layers: int) -> dict[str, list[KernelPart]]:
    """Layers with a slow algorithm that needs little and faster ones that need more, or not."""
    return {
        f"conv{k}": [
            KernelPart(n, f"a{a}", rng.uniform(0.1, 3) * n**0.8, rng.randint(0, 30) * n)
            for n in sizes
            for a in range(rng.randint(1, 4))
        ]
        for k in range(layers)
    }


def every(measured: Measured, n: int, bound: int, *, adds: bool) -> float:
    """The fewest seconds of all choices that fit, infinite where none does."""
    of_size = [[p for p in parts if p.size == n] for parts in measured.values()]
    return min(
        (
            sum(p.seconds for p in choice)
            for choice in itertools.product(*of_size)
            if (sum if adds else max)(p.workspace for p in choice) <= bound
        ),
        default=float("inf"),
    )


def by_highs(measured: Measured, n: int, bound: int) -> float:
    """Equation 6 as a solver has it."""
    parts = [(k, p) for k, ps in enumerate(measured.values()) for p in ps if p.size == n]
    ones = np.zeros((len(measured), len(parts)))
    ones[[k for k, _ in parts], range(len(parts))] = 1
    bytes_ = np.array([p.workspace for _, p in parts], float)
    rules = [LinearConstraint(ones, 1, 1), LinearConstraint(bytes_ / bound, -np.inf, 1)]
    seconds = np.array([p.seconds for _, p in parts])
    options = {"mip_rel_gap": 0.0}
    found = milp(seconds, constraints=rules, integrality=1, bounds=Bounds(0, 1), options=options)
    return float(found.fun) if found.success else float("inf")


@pytest.mark.parametrize("adds", [True, False])
def test_a_choice_is_the_fastest_of_all(adds: bool, counted: Callable[[int], int]) -> None:
    rng = random.Random(0)
    for _ in range(counted(1000)):
        n = rng.choice([1, 4, 10])
        measured, bound = drawn(rng, [n], rng.randint(1, 5)), rng.randint(1, 60) * n
        wanted = every(measured, n, bound, adds=adds)
        if wanted == float("inf"):
            with pytest.raises(BudgetError, match="must fit beside what else there is"):
                choose(measured, n, bound, adds=adds)
            continue
        found = choose(measured, n, bound, adds=adds)
        assert found.seconds == pytest.approx(wanted, rel=1e-12)
        assert found.workspace <= bound
        for name, one in found.layers.items():
            (part,) = one.parts
            assert part in measured[name]


def test_it_is_the_program_that_highs_solves(counted: Callable[[int], int]) -> None:
    rng = random.Random(1)
    for _ in range(counted(100)):
        measured, bound = drawn(rng, [8], rng.randint(5, 40)), rng.randint(400, 6000)
        wanted = by_highs(measured, 8, bound)
        try:
            found = choose(measured, 8, bound).seconds
        except BudgetError:
            found = float("inf")
        assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("adds", [True, False])
def test_a_sweep_finds_the_fastest_size_of_all(adds: bool, counted: Callable[[int], int]) -> None:
    rng = random.Random(2)
    smaller = 0
    for _ in range(counted(300)):
        sizes = sorted(rng.sample(range(1, 40), 5))
        measured = drawn(rng, sizes, rng.randint(1, 4))
        device, each = rng.randint(100, 4000), rng.randint(1, 60)
        table = {n: every(measured, n, device - each * n, adds=adds) / n for n in sizes}
        fits = [n for n in sizes if table[n] < float("inf")]
        if not fits:
            with pytest.raises(BudgetError, match="take a smaller mini-batch"):
                sweep(measured, sizes, lambda n, d=device, e=each: d - e * n, adds=adds)
            continue
        found = sweep(measured, sizes, lambda n, d=device, e=each: d - e * n, adds=adds)
        assert [one.samples for one in found.choices] == fits
        assert set(found.refused) == set(sizes) - set(fits)
        assert all(missing > 0 for missing in found.refused.values())
        assert found.best.per_sample == pytest.approx(min(table.values()), rel=1e-12)
        smaller += found.best.samples < max(fits)
    assert smaller


def test_a_smaller_mini_batch_buys_a_faster_algorithm() -> None:
    """Features leave room for one FFT at 64 samples and for none at 128."""
    measured = {
        name: [
            part
            for n in (32, 64, 128)
            for part in (
                KernelPart(n, "gemm", 0.010 * n + 0.02, 0),
                KernelPart(n, "fft", 0.004 * n + 0.04, 900),
            )
        ]
        for name in ("conv1", "conv2")
    }
    found = sweep(measured, (32, 64, 128), lambda n: 2000 - 15 * n)
    algorithms = {one.samples: sorted(str(c) for c in one.layers.values()) for one in found.choices}
    assert algorithms[128] == ["gemm@128", "gemm@128"]
    assert algorithms[64] == ["fft@64", "gemm@64"]
    assert found.best.samples == 64
    assert found.best.per_sample < 0.8 * found.choices[-1].per_sample
    free = sweep(measured, (32, 64, 128), lambda _: 10**6)
    assert free.best.samples == 128  # with memory to spare the largest is fastest
    shared = sweep(measured, (32, 64, 128), lambda n: 2000 - 15 * n, adds=False)
    assert [str(c) for c in shared.best.layers.values()] == ["fft@64", "fft@64"]


def test_a_division_is_chosen_where_it_is_permitted() -> None:
    measured = {
        "conv": [
            KernelPart(8, "slow", 9.0, 0),
            KernelPart(4, "fast", 1.0, 10),
            KernelPart(8, "fast", 1.5, 20),
        ]
    }
    assert choose(measured, 8, 15).seconds == 9.0
    assert choose(measured, 8, 15, divided=True).seconds == 2.0
    assert choose(measured, 8, 20, divided=True).seconds == 1.5


def test_a_choice_reads_as_a_list() -> None:
    measured = {
        "conv1": [KernelPart(2, "fft", 0.5, 1024)],
        "conv2": [KernelPart(2, "gemm", 0.25, 2048)],
    }
    assert str(choose(measured, 2, 4096)).splitlines() == [
        "2 samples in 0.75 s, workspaces of their own: 3.0 KiB of 4.0 KiB",
        "  conv1: fft@2",
        "  conv2: gemm@2",
    ]
    assert "in one buffer: 2.0 KiB of 4.0 KiB" in str(choose(measured, 2, 4096, adds=False))
    with pytest.raises(BudgetError, match=r"2 layers .* 2 samples they need at least 3.0 KiB"):
        choose(measured, 2, 2048)


def test_what_was_not_measured_is_said() -> None:
    with pytest.raises(ValueError, match=r"'conv' was at \[4\], not at 8: measure it"):
        choose({"conv": [KernelPart(4, "gemm", 1.0, 0)]}, 8, 100)
    with pytest.raises(ValueError, match="sizes must hold at least one mini-batch"):
        sweep({}, [], lambda n: n)
