"""cuDNN's own plans for a convolution, each with the workspace that it requires.

torch uses one plan of cuDNN, with any workspace. Here its first few are algorithms of their own, so
that each can be measured, and chosen within a workspace:

    problem, samples ──> graph ──> plan 0   plan 1   plan 2 ...      by heuristics, best first
                                   80 MiB   12 MiB   0 B             of workspace

They need the optional package nvidia-cudnn-frontend; without it torch's own kernel, which is
cuDNN's choice, is measured on every size. Sums are of float32, or of float64 for operands in it.

Source: u-cuDNN, section III-A: cudnnFind and cudnnGet algorithms under a workspace limit.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from anybatch.conv.problem import Problem
from anybatch.core.accelerators import cudnn_stream

PLANS = 6
"""Plans of a kernel that are measured, the first ones by cuDNN's heuristics."""

PACKAGE = "cudnn"

DTYPES = {
    "float16": "HALF",
    "bfloat16": "BFLOAT16",
    "float32": "FLOAT",
    "float64": "DOUBLE",
}


class NoPlanError(Exception):
    """There is no such plan for a kernel, or it does not run on this device."""


@cache
def available() -> bool:
    """Say whether the package is installed."""
    return importlib.util.find_spec(PACKAGE) is not None


@dataclass(frozen=True)
class Built:
    """A graph of one convolution.

    Attributes:
        graph: cuDNN's.
        names: its two operands and its result, as it knows them.
        count: plans that it has.
    """

    graph: Any
    names: tuple[Any, Any, Any]
    count: int


_CACHE = threading.local()
"""Graphs and handles of a thread: a handle must not be used by two at a time."""


class Planned:
    """The algorithm that is cuDNN's plan of some number.

    Args:
        number: of the plan, from 0.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, problem: Problem, one: Tensor, other: Tensor) -> Tensor:
        """Compute a kernel.

        Raises:
            NoPlanError: it has no such plan.
        """
        result = _empty(problem, one)
        if isinstance(one, FakeTensor):
            return result
        wide = [_planar(tensor) for tensor in (one, other, result)]
        built = _built(problem, wide)
        if self._number >= built.count:
            raise NoPlanError(f"{problem} has {built.count} plans")
        graph, handle = built.graph, _handle(one.device)
        try:
            graph.build_plan_at_index(self._number)
            space = graph.get_workspace_size_plan_at_index(self._number)
            workspace = torch.empty(max(space, 1), dtype=torch.uint8, device=one.device)
            operands = dict(zip(built.names, wide, strict=True))
            graph.execute_plan_at_index(operands, workspace, self._number, handle=handle)
        except RuntimeError as error:
            raise NoPlanError(f"plan {self._number} of {problem}: {error}") from error
        return result


def _empty(problem: Problem, one: Tensor) -> Tensor:
    """Return memory for the result, in the layout of the first operand."""
    shape = problem.result(len(one))
    found = one.new_empty(shape)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}
    if problem.layout == "channels_last" and problem.kernel != "filter" and len(shape) in last:
        return found.contiguous(memory_format=last[len(shape)])
    return found


def _planar(tensor: Tensor) -> Tensor:
    """Return a tensor of two directions or more: cuDNN has no single one."""
    return tensor.unsqueeze(2) if tensor.dim() == 3 else tensor


def _built(problem: Problem, tensors: Sequence[Tensor]) -> Built:
    """Return the graph of a kernel on such operands; it is made once in a thread."""
    key = problem, *((tuple(t.shape), t.stride()) for t in tensors), tensors[0].device
    cached: dict[Any, Built] = _CACHE.__dict__.setdefault("graphs", {})
    if key not in cached:
        cached[key] = _build(problem, tensors)
    return cached[key]


def _build(problem: Problem, tensors: Sequence[Tensor]) -> Built:
    cudnn = importlib.import_module(PACKAGE)
    data_type = getattr(cudnn.data_type, DTYPES[problem.dtype])
    sums = cudnn.data_type.DOUBLE if problem.dtype == "float64" else cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=data_type,
        intermediate_data_type=sums,
        compute_data_type=sums,
        handle=_handle(tensors[0].device),
    )
    one, other, result = tensors
    first, second = (
        graph.tensor(dim=list(t.shape), stride=list(t.stride()), data_type=data_type)
        for t in (one, other)
    )
    flat = len(problem.image) == 1
    place = {
        "padding": [0] * flat + list(problem.padding),
        "stride": [1] * flat + list(problem.stride),
        "dilation": [1] * flat + list(problem.dilation),
    }
    if problem.kernel == "forward":
        found = graph.conv_fprop(image=first, weight=second, **place)
    elif problem.kernel == "data":
        found = graph.conv_dgrad(loss=first, filter=second, **place)
    else:
        found = graph.conv_wgrad(image=second, loss=first, **place)
    found.set_output(True).set_dim(list(result.shape)).set_stride(list(result.stride()))
    found.set_data_type(data_type)
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        count = graph.get_execution_plan_count()
    except (RuntimeError, cudnn.cudnnGraphNotSupportedError) as error:
        raise NoPlanError(f"{problem}: {error}") from error
    return Built(graph, (first, second, found), count)


def _handle(device: torch.device) -> Any:
    """Return the handle of this thread for a device, on its present stream."""
    cudnn = importlib.import_module(PACKAGE)
    cached: dict[Any, Any] = _CACHE.__dict__.setdefault("handles", {})
    if device not in cached:
        cached[device] = cudnn.create_handle()
    stream = cudnn_stream(device)
    cudnn.set_stream(handle=cached[device], stream=stream)
    return cached[device]
