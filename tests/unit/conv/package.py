"""A package in the place of cuDNN's, that computes by torch."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from anybatch.conv import algorithms
from anybatch.conv.algorithms import Problem, native

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


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    types = SimpleNamespace(FLOAT="FLOAT", HALF="HALF", BFLOAT16="BFLOAT16", DOUBLE="DOUBLE")
    cudnn = SimpleNamespace(
        data_type=types,
        heur_mode=SimpleNamespace(A="A", FALLBACK="FALLBACK"),
        pygraph=Graph,
        create_handle=lambda: 7,
        set_stream=lambda handle, stream: None,
        cudnnGraphNotSupportedError=ValueError,
    )
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)  # type: ignore[arg-type]
    stream = SimpleNamespace(cuda_stream=3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(algorithms, "_CACHE", threading.local())
    Graph.made.clear()
