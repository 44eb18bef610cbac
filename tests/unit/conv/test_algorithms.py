"""Every algorithm for every kernel of every kind of convolution, beside torch in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.unit.conv.problems import (
    KERNELS,
    KINDS,
    any_circles,
    bound,
    computed,
    distance,
    drawn,
    operands,
    problem,
    wanted,
)

from anybatch.conv.algorithms import (
    ALGORITHMS,
    Fourier,
    Problem,
    candidates,
    full_circles,
    native,
    tiled,
)


def check(one: Problem, size: int) -> None:
    """Require that all algorithms are as near to the truth as torch's own."""
    a, b = operands(one, size)
    true = wanted(one, a, b)
    scale = float(a.double().norm() * b.double().norm())
    own = distance(native(one, a, b), true, scale)
    for name in candidates(one):
        found = computed(ALGORITHMS[name], one, a, b)
        assert found.shape == one.result(size), name
        assert distance(found, true, scale) <= bound(one, own), (name, one)


@pytest.mark.parametrize("variant", KINDS)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_algorithm_is_as_exact_as_torchs_own(
    kernel: str, dims: int, variant: str, dtype: str
) -> None:
    one = replace(problem(kernel, dims, variant), dtype=dtype)
    for size in (1, 3):
        check(one, size)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_of_any_problem(dtype: str, counted: Callable[[int], int]) -> None:
    rng = random.Random(3)
    for _ in range(counted(1000)):
        check(drawn(rng, dtype), rng.randint(1, 3))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_of_any_tiles(dtype: str, counted: Callable[[int], int]) -> None:
    rng, tiles = random.Random(5), 0
    for _ in range(counted(1000)):
        one = drawn(rng, dtype)
        more = 20 if len(one.image) < 3 else 7
        one = replace(one, image=tuple(h + rng.randint(0, more) for h in one.image))
        circles = any_circles(one, rng)
        way, size = Fourier(dict.fromkeys([one], circles).__getitem__), rng.randint(1, 3)
        a, b = operands(one, size)
        true = wanted(one, a, b)
        scale = float(a.double().norm() * b.double().norm())
        own = distance(native(one, a, b), true, scale)
        found = computed(way, one, a, b)
        assert found.shape == one.result(size)
        assert distance(found, true, scale) <= bound(one, own), (one, circles)
        tiles += any(circle.count > 1 for circle in circles)
    assert tiles > counted(1000) // 3


def test_tiles_are_for_images_much_larger_than_the_window() -> None:
    long = Problem("forward", 32, 32, (4096,), (255,), (1,), (127,), (1,))
    found = tiled(long)
    assert found is not None
    assert found[0].length < full_circles(long)[0].length // 2
    assert candidates(long)[-1] == "overlap_save"
    short = replace(long, image=(255,))
    assert tiled(short) is None
    assert candidates(short)[-1] == "fft"


@pytest.mark.parametrize("kernel", KERNELS)
def test_half_precision_is_summed_in_float32(kernel: str) -> None:
    one = replace(problem(kernel, 2, "padded"), dtype="bfloat16")
    a, b = operands(one, 3)
    found = computed(ALGORITHMS["fft"], one, a, b)
    assert found.dtype == torch.float32
    assert distance(found, wanted(one, a, b)) <= 1e-6
