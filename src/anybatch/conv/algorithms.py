"""Algorithms for convolution kernels: those of torch, and others without a fast path in torch.

    native          torch's kernel on the operands as they are
    channels_last   the same on operands in the other layout
    im2col          every window as a column, and one product of matrices
    fft             products of spectra, of whole images (`anybatch.conv.fourier`)
    overlap_save    products of spectra, of tiles that overlap
    cudnn:0, 1 ...  cuDNN's plans, on CUDA (`anybatch.conv.plans`)

Each computes the same for any samples; which is fastest for how many is measured
(`anybatch.conv.costs`). Some do a thing once for all parts of a mini-batch.

Source: u-cuDNN, sections I and II; Chellapilla, Puri and Simard (2006) for im2col.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from anybatch.conv.circles import Circle, full_circles, tiled
from anybatch.conv.fourier import HALVES, Fourier
from anybatch.conv.plans import PLANS, Planned, available
from anybatch.conv.problem import Problem
from anybatch.core import accelerator

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


class Algorithm(Protocol):
    """A way to compute a kernel, part after part.

        forward, data    shared(w), then part(x, shared) of each
        filter           add(total, dy, x) of each, then finish(total)

    Attributes:
        once: `shared` and `finish` take time, which all parts have in common.
    """

    once: bool

    def shared(self, problem: Problem, w: Tensor) -> Tensor:
        """Return the data of the filters that all parts share."""
        ...

    def part(self, problem: Problem, one: Tensor, shared: Tensor) -> Tensor:
        """Return the result of a forward or of a gradient of the input for some samples."""
        ...

    def add(self, problem: Problem, total: Tensor | None, dy: Tensor, x: Tensor) -> Tensor:
        """Add the contribution of some samples to the gradient of the filters."""
        ...

    def finish(self, problem: Problem, total: Tensor) -> Tensor:
        """Return the gradient of the filters."""
        ...


class Plain:
    """An algorithm that has nothing in common between parts.

    Args:
        compute: a kernel.
    """

    once = False

    def __init__(self, compute: Callable[[Problem, Tensor, Tensor], Tensor]) -> None:
        self.part = compute

    def shared(self, problem: Problem, w: Tensor) -> Tensor:  # noqa: ARG002
        """Return the filters."""
        return w

    def add(self, problem: Problem, total: Tensor | None, dy: Tensor, x: Tensor) -> Tensor:
        """Add the gradient of the filters; sums of half precision are accumulated in float32."""
        found = self.part(problem, dy, x)
        if total is None:
            return found
        return (total.float() if total.dtype in HALVES else total).add_(found)

    def finish(self, problem: Problem, total: Tensor) -> Tensor:  # noqa: ARG002
        """Return the sum."""
        return total


def _smaller(problem: Problem) -> tuple[Circle, ...]:
    """Return the circles of tiles; `candidates` knows that there are some."""
    found = tiled(problem)
    assert found is not None, problem
    return found


ALGORITHMS: dict[str, Algorithm] = {
    NATIVE: Plain(native),
    "channels_last": Plain(channels_last),
    "im2col": Plain(im2col),
    "fft": Fourier(full_circles),
    "overlap_save": Fourier(_smaller),
    **{f"cudnn:{number}": Plain(Planned(number)) for number in range(PLANS)},
}


def computed(way: Algorithm, problem: Problem, one: Tensor, other: Tensor) -> Tensor:
    """Return a kernel of all samples at once."""
    if problem.kernel == "filter":
        return way.finish(problem, way.add(problem, None, one, other))
    return way.part(problem, one, way.shared(problem, other))


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
