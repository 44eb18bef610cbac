"""Algorithms for convolution kernels: those of torch, and others without a fast path in torch.

    native          torch's kernel on the operands as they are
    channels_last   the same on operands in the other layout
    im2col          every window as a column, and one product of matrices
    fft             products of spectra, of whole images (`anybatch.conv.fourier`)
    overlap_save    products of spectra, of tiles that overlap
    cudnn:0, 1 ...  cuDNN's plans, on CUDA

Each computes the same for any samples; which is fastest for how many is measured
(`anybatch.conv.measure`). Some do a thing once for all parts of a mini-batch.

Source: u-cuDNN, sections I and II; Chellapilla, Puri and Simard (2006) for im2col.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from anybatch.conv.circles import Circle, full_circles, tiled
from anybatch.conv.fourier import HALVES, Fourier
from anybatch.conv.problem import Problem
from anybatch.core import accelerator
from anybatch.core.accelerators import cudnn_stream
from anybatch.core.plan_sections import Configuration, KernelPart

# cuDNN's own plans for a convolution, each with the workspace that it requires.
#
# torch uses one plan of cuDNN, with any workspace. Here its first few are algorithms of their own,
# so that each can be measured, and chosen within a workspace:
#
#     problem, samples ──> graph ──> plan 0   plan 1   plan 2 ...      by heuristics, best first
#                                    80 MiB   12 MiB   0 B             of workspace
#
# They need the optional package nvidia-cudnn-frontend; without it torch's own kernel, which is
# cuDNN's choice, is measured on every size. Sums are of float32, or of float64 for operands in it.
#
# Source: u-cuDNN, section III-A: cudnnFind and cudnnGet algorithms under a workspace limit.

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
        """Compute a kernel."""
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


NATIVE = "native"
"""The default algorithm."""

LARGE = 128
"""Places of a window above which its columns are not tried: they are that much memory."""

LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Dimensions of a tensor -> its layout with channels last; torch has none for one direction."""


def native(problem: Problem, one: Tensor, other: Tensor) -> Tensor:
    """Compute a kernel as torch does."""
    place = (problem.stride, problem.padding, problem.dilation, False)
    zeros = [0] * len(problem.image)
    if problem.kernel == "forward":
        y: Tensor = torch.ops.aten.convolution.default(
            *(one, other, None), *place, zeros, problem.groups
        )
        return y
    data = problem.kernel == "data"
    x = one.new_empty(()).expand(problem.result(len(one))) if data else other
    w = other if data else one.new_empty(()).expand(problem.weight)
    dx, dw, _ = torch.ops.aten.convolution_backward.default(
        *(one, x, w, None), *place, zeros, problem.groups, [data, not data, False]
    )
    found: Tensor = dx if data else dw
    return found


def channels_last(problem: Problem, one: Tensor, other: Tensor) -> Tensor:
    """Compute a kernel as torch does, on operands with channels last."""
    layout = LAYOUTS[one.dim()]
    return native(
        problem, one.contiguous(memory_format=layout), other.contiguous(memory_format=layout)
    )


def im2col(problem: Problem, one: Tensor, other: Tensor) -> Tensor:
    """Compute a kernel as a product of matrices."""
    groups, filters = problem.groups, problem.filters // problem.groups
    if problem.kernel == "forward":
        weight = other.reshape(groups, filters, -1)
        found = weight @ _columns(problem, one)
        return found.reshape(problem.result(len(one)))
    dy = one.reshape(len(one), groups, filters, -1)
    if problem.kernel == "data":
        weight = other.reshape(groups, filters, -1)
        return _images(problem, weight.transpose(1, 2) @ dy)
    columns = _columns(problem, other)
    found = torch.einsum("ngfo,ngko->gfk", dy, columns)
    return found.reshape(problem.weight)


def _columns(problem: Problem, x: Tensor) -> Tensor:
    """Return every window as a column: [N, groups, channels of one x window, outputs]."""
    size, dims = len(x), len(problem.image)
    padded = F.pad(x, [p for p in reversed(problem.padding) for _ in range(2)]).contiguous()
    steps = padded.stride()[2:]
    outer = [t * s for t, s in zip(steps, problem.stride, strict=True)]
    inner = [t * d for t, d in zip(steps, problem.dilation, strict=True)]
    view = padded.as_strided(
        (size, problem.channels, *problem.window, *problem.outputs),
        (*padded.stride()[:2], *inner, *outer),
    )
    assert view.dim() == 2 + 2 * dims
    per = problem.channels // problem.groups * prod(problem.window)
    return view.reshape(size, problem.groups, per, prod(problem.outputs))


def _images(problem: Problem, columns: Tensor) -> Tensor:
    """Return images to which every column was added where its window is."""
    size, padding, image = len(columns), problem.padding, problem.image
    padded = [h + 2 * p for h, p in zip(image, padding, strict=True)]
    found = columns.new_zeros((size, problem.channels, *padded))
    shape = (size, problem.channels, prod(problem.window), *problem.outputs)
    for number, window in enumerate(columns.view(shape).unbind(2)):
        found[_inner(_places(problem, number))] += window
    ends = zip(padding, image, strict=True)
    return found[_inner([slice(p, p + h) for p, h in ends])]


def _inner(places: list[slice]) -> Any:
    """Return an index of the last dimensions."""
    return (..., *places)


def _places(problem: Problem, number: int) -> list[slice]:
    """Return where one entry of all windows lies in a padded image."""
    offsets = [int(i) for i in np.unravel_index(number, problem.window)]
    rows = zip(offsets, problem.dilation, problem.outputs, problem.stride, strict=True)
    return [slice(i * d, i * d + (o - 1) * s + 1, s) for i, d, o, s in rows]


class Plain:
    """A way to compute a kernel, part after part, that has nothing in common between parts.

        forward, data    shared(w), then part(x, shared) of each
        filter           add(total, dy, x) of each, then finish(total)

    Args:
        compute: a kernel.

    Attributes:
        once: `shared` and `finish` take time, which all parts have in common.
    """

    once = False

    def __init__(self, compute: Callable[[Problem, Tensor, Tensor], Tensor]) -> None:
        self.part = compute

    def shared(self, problem: Problem, w: Tensor) -> Tensor:  # noqa: ARG002
        """Return the data of the filters that all parts share."""
        return w

    def add(self, problem: Problem, total: Tensor | None, dy: Tensor, x: Tensor) -> Tensor:
        """Add the gradient of the filters; sums of half precision are accumulated in float32."""
        found = self.part(problem, dy, x)
        if total is None:
            return found
        return (total.float() if total.dtype in HALVES else total).add_(found)

    def finish(self, problem: Problem, total: Tensor) -> Tensor:  # noqa: ARG002
        """Return the gradient of the filters."""
        return total


def _smaller(problem: Problem) -> tuple[Circle, ...]:
    """Return the circles of tiles; `candidates` knows that there are some."""
    found = tiled(problem)
    assert found is not None, problem
    return found


ALGORITHMS: dict[str, Plain | Fourier] = {
    NATIVE: Plain(native),
    "channels_last": Plain(channels_last),
    "im2col": Plain(im2col),
    "fft": Fourier(full_circles),
    "overlap_save": Fourier(_smaller),
    **{f"cudnn:{number}": Plain(Planned(number)) for number in range(PLANS)},
}


def candidates(problem: Problem) -> list[str]:
    """Return the names of the algorithms that can compute a kernel, `NATIVE` first."""
    found = [NATIVE, "im2col"] if prod(problem.window) <= LARGE else [NATIVE]
    if problem.layout == "contiguous" and len(problem.image) + 2 in LAYOUTS:
        found.append("channels_last")
    supported = ("float16", "bfloat16", "float32", "float64")
    if problem.dtype in supported and prod(problem.window) > 1:
        found.append("fft")
        if tiled(problem) is not None:
            found.append("overlap_save")
    if accelerator.of(problem.device).cudnn and problem.dtype in supported and available():
        found += [f"cudnn:{number}" for number in range(PLANS)]
    return found


# A configuration is run: micro-batch after micro-batch into one result.
#
#     forward, data   every part computes its own samples of the result
#     filter          every part is added to the sum: the gradients of all samples
#
# Parts of one algorithm follow each other, and their common part is computed once for them, and not
# stored: weights may change unnoticed from call to call. Half-precision sums stay in float32 until
# all parts are added.
#
# Source: u-cuDNN, section II: BackwardFilter is divided by accumulating.


def run(
    problem: Problem,
    configuration: Configuration,
    operands: tuple[Tensor, Tensor],
    strides: Sequence[int],
    bias: Tensor | None = None,
) -> Tensor:
    """Compute a kernel as it was divided.

    Args:
        problem: which.
        configuration: of as many samples as the operands have.
        operands: as `Problem.operands` has them.
        strides: of the result.
        bias: [F], added to a forward before it is rounded. Default None.
    """
    one, other = operands
    size = len(one)
    result = torch.empty_strided(
        problem.result(size), tuple(strides), dtype=one.dtype, device=one.device
    )
    if problem.kernel == "filter":
        return _summed(problem, configuration, one, other, result)
    begin = 0
    for name, parts in _runs(configuration):
        way = ALGORITHMS[name]
        shared = way.shared(problem, other)
        for part in parts:
            end = begin + part.size
            found = way.part(problem, one[begin:end], shared)
            if bias is not None:
                found += bias.view(-1, *(1 for _ in problem.image))
            result[begin:end].copy_(found)
            del found  # before the next part has its own
            begin = end
        del shared
    return result


def _summed(
    problem: Problem, configuration: Configuration, dy: Tensor, x: Tensor, result: Tensor
) -> Tensor:
    """Return the sum of the gradients of all parts, in `result`."""
    runs, begin, accumulated = _runs(configuration), 0, result
    if len(runs) > 1 and result.dtype in HALVES:
        accumulated = torch.empty_like(result, dtype=torch.float32)
    for number, (name, parts) in enumerate(runs):
        way, total = ALGORITHMS[name], None
        for part in parts:
            end = begin + part.size
            total = way.add(problem, total, dy[begin:end], x[begin:end])
            begin = end
        assert total is not None
        found = way.finish(problem, total)
        del total
        accumulated = accumulated.add_(found) if number else accumulated.copy_(found)
        del found
    return accumulated if accumulated is result else result.copy_(accumulated)


def _runs(configuration: Configuration) -> list[tuple[str, list[KernelPart]]]:
    """Return ``(algorithm, parts)`` for parts of one algorithm that follow each other."""
    groups = groupby(configuration.parts, key=lambda part: part.algorithm)
    return [(name, list(parts)) for name, parts in groups]
