"""cuDNN's plans as algorithms, with a package in the place of cuDNN's that computes by torch."""

from __future__ import annotations

import sys
import threading
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.conv.problems import computed, distance, operands, problem, wanted
from torch import Tensor

from anybatch.conv import algorithms
from anybatch.conv.algorithms import ALGORITHMS, NoPlanError, Planned, candidates, native
from anybatch.conv.divide import front
from anybatch.conv.measure import Costs, held, measure
from anybatch.conv.problem import KERNELS, Problem

SPACES = (5000, 100, 0)


class Name:
    """A tensor of a graph."""

    def __init__(self, dim: list[int], stride: list[int]) -> None:
        self.dim, self.stride = dim, stride

    def set_output(self, yes: bool) -> Name:
        assert yes
        return self

    def set_dim(self, dim: list[int]) -> Name:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Name:
        self.stride = stride
        return self

    def set_data_type(self, dtype: str) -> Name:
        assert dtype == "FLOAT"
        return self


class Graph:
    """What cuDNN's graph is asked for, kept and computed by torch."""

    made: list[Graph] = []  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        assert options["handle"] == 7
        assert options["compute_data_type"] == "FLOAT"
        self.kernel, self.place, self.operands = "", dict[str, Any](), list[Name]()
        self.built: set[int] = set()
        Graph.made.append(self)

    def tensor(self, dim: list[int], stride: list[int], data_type: str) -> Name:
        assert data_type == "FLOAT"
        return Name(dim, stride)

    def _take(self, kernel: str, one: Name, other: Name, place: Any) -> Name:
        self.kernel, self.place, self.operands = kernel, place, [one, other]
        return Name([], [])

    def conv_fprop(self, image: Name, weight: Name, **place: Any) -> Name:
        return self._take("forward", image, weight, place)

    def conv_dgrad(self, loss: Name, filter: Name, **place: Any) -> Name:  # noqa: A002
        return self._take("data", loss, filter, place)

    def conv_wgrad(self, image: Name, loss: Name, **place: Any) -> Name:
        return self._take("filter", loss, image, place)

    def validate(self) -> None:
        if self.place["dilation"][-1] == 9:
            raise RuntimeError("not supported")

    def build_operation_graph(self) -> None:
        pass

    def create_execution_plans(self, modes: list[str]) -> None:
        assert modes == ["A", "FALLBACK"]

    def get_execution_plan_count(self) -> int:
        return len(SPACES)

    def build_plan_at_index(self, index: int) -> None:
        self.built.add(index)

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        assert index in self.built
        return SPACES[index]

    def execute_plan_at_index(
        self, options: dict[Name, Tensor], workspace: Tensor, index: int, handle: int
    ) -> None:
        assert handle == 7
        assert workspace.nbytes >= SPACES[index]
        one, other, result = options.values()
        for name, tensor in options.items():
            assert (name.dim, name.stride) == (list(tensor.shape), list(tensor.stride()))
        shapes = {
            "forward": (one.shape, other.shape),
            "data": (result.shape, other.shape),
            "filter": (other.shape, result.shape),
        }
        images, filters = shapes[self.kernel]
        place = (tuple(self.place[name]) for name in ("stride", "padding", "dilation"))
        groups = images[1] // filters[1]
        wide: Any = self.kernel, images[1], filters[0], tuple(images[2:]), tuple(filters[2:])
        result.copy_(native(Problem(*wide, *place, groups), one, other))


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    types = SimpleNamespace(FLOAT="FLOAT", HALF="HALF", BFLOAT16="BFLOAT16", DOUBLE="DOUBLE")
    package = SimpleNamespace(
        data_type=types,
        heur_mode=SimpleNamespace(A="A", FALLBACK="FALLBACK"),
        pygraph=Graph,
        create_handle=lambda: 7,
        set_stream=lambda handle, stream: None,
        cudnnGraphNotSupportedError=ValueError,
    )
    monkeypatch.setitem(sys.modules, "cudnn", package)  # type: ignore[arg-type]
    stream = SimpleNamespace(cuda_stream=3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(algorithms, "_CACHE", threading.local())
    Graph.made.clear()


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


def test_plans_are_measured_with_their_workspace_and_missing_ones_never_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = problem("forward", 2, "plain")
    result = 4 * torch.Size(one.result(2)).numel()
    spaces = [measure(one, 2, f"cudnn:{number}")[1] for number in range(4)]
    # the package here computes by torch, which makes another result
    assert spaces[:3] == [2 * result + 5000, 2 * result + 100, 2 * result + 1]
    assert measure(one, 2, "cudnn:3") == (inf, 0, 0.0)
    assert held(one, 2, "cudnn:0") == result  # without computing, nobody tells more
    names = ["native", "cudnn:0", "cudnn:5"]
    monkeypatch.setattr("anybatch.conv.measure.candidates", lambda _: names)
    parts = Costs().parts(one, 2, "powerOfTwo", 1 << 30)
    assert {p.algorithm for p in parts} == set(names)
    used = {p.algorithm for c in front(parts, 2) for p in c.parts}
    assert "cudnn:5" not in used


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
