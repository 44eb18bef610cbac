"""cuDNN's plans as algorithms, with a package in the place of cuDNN's that computes by torch."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from tests.unit.conv.package import Graph, package
from tests.unit.conv.problems import KERNELS, computed, distance, operands, problem, wanted

from anybatch.conv import algorithms
from anybatch.conv.algorithms import ALGORITHMS, NoPlanError, Planned, Problem, candidates

__all__ = ["package"]
pytestmark = pytest.mark.usefixtures("package")


@pytest.mark.parametrize("dtype", ["plain", "all", "grouped", "depthwise"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_plan_says_what_the_kernel_is(dims: int, kernel: Any, dtype: str) -> None:
    one = problem(kernel, dims, dtype)
    a, b = operands(one, 3)
    for number in range(2):
        found = computed(ALGORITHMS[f"cudnn:{number}"], one, a, b)
        assert distance(found, wanted(one, a, b)) <= 1e-6
    assert len(Graph.made) == 1  # one graph for all its plans


def test_what_cudnn_does_not_support_has_no_plan() -> None:
    one = Problem("forward", 2, 2, (40,), (3,), (1,), (0,), (9,))
    with pytest.raises(NoPlanError, match="not supported"):
        Planned(0)(one, *operands(one, 2))


def test_plans_are_for_cuda_where_the_package_is(monkeypatch: pytest.MonkeyPatch) -> None:
    one = problem("forward", 2, "plain")
    there = Problem(**{**vars(one), "device": "cuda"})
    uncached = algorithms.available.__wrapped__
    monkeypatch.setattr("anybatch.conv.algorithms.available", lambda: True)
    assert "cudnn:0" in candidates(there)
    assert "cudnn:0" not in candidates(one)
    monkeypatch.setattr("anybatch.conv.algorithms.available", lambda: False)
    assert "cudnn:0" not in candidates(there)
    monkeypatch.delitem(sys.modules, "cudnn")
    monkeypatch.setattr(algorithms, "PACKAGE", "no_such_package")
    assert uncached() is False


def test_results_are_in_the_layout_of_the_operands() -> None:
    one = Problem(**{**vars(problem("forward", 2, "plain")), "layout": "channels_last"})
    a, b = operands(one, 3)
    found = Planned(0)(one, a.contiguous(memory_format=torch.channels_last), b)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert distance(found, wanted(one, a, b)) <= 1e-6
