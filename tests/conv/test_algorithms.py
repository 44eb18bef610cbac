"""Every algorithm for every kernel of every kind of convolution, beside torch in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.conv.problems import KINDS, bound, distance, drawn, operands, problem, wanted

from anybatch.conv.algorithms import ALGORITHMS, candidates, native
from anybatch.conv.fourier import good_length
from anybatch.conv.problem import KERNELS, Problem


def check(one: Problem, size: int) -> None:
    """Require that all algorithms are as near to the truth as torch's own."""
    a, b = operands(one, size)
    true = wanted(one, a, b)
    scale = float(a.double().norm() * b.double().norm())
    own = distance(native(one, a, b), true, scale)
    for name in candidates(one):
        found = ALGORITHMS[name](one, a, b)
        assert found.shape == one.result(size), name
        assert distance(found, true, scale) <= bound(one, own), (name, one)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_algorithm_is_as_exact_as_torchs_own(
    kernel: str, dims: int, kind: str, dtype: str
) -> None:
    one = replace(problem(kernel, dims, kind), dtype=dtype)
    for size in (1, 3):
        check(one, size)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_of_any_problem(dtype: str, counted: Callable[[int], int]) -> None:
    rng = random.Random(3)
    for _ in range(counted(1000)):
        check(drawn(rng, dtype), rng.randint(1, 3))


@pytest.mark.parametrize("kernel", KERNELS)
def test_half_precision_is_summed_in_float32(kernel: str) -> None:
    one = replace(problem(kernel, 2, "padded"), dtype="bfloat16")
    a, b = operands(one, 3)
    found = ALGORITHMS["fft"](one, a, b)
    assert found.dtype == torch.float32
    assert distance(found, wanted(one, a, b)) <= 1e-6


def test_good_lengths_are_even_and_have_small_factors() -> None:
    for least in range(1, 400):
        length = good_length(least)
        assert length >= least
        assert length % 2 == 0
        between = range(least + least % 2, length, 2)
        assert not any(_seven_smooth(other) for other in between)
        assert _seven_smooth(length)


def _seven_smooth(number: int) -> bool:
    return number > 0 and 2**10 * 3**8 * 5**6 * 7**5 % number == 0


def test_a_problem_says_what_it_is() -> None:
    one = problem("data", 2, "all")
    assert one.operands(2) == ((2, 6, 8, 5), (6, 2, 3, 5))
    assert one.result(2) == (2, 4, 13, 11)
    words = "data 4x13x11 -> 6, window 3x5, stride 2x2, padding 3x3, dilation 2x2, groups 2"
    assert str(one) == words
