"""Kernels and samples of a call of torch's convolutions.

    aten::convolution            forward
    aten::convolution_backward   data, filter, or both, as its mask says

Transposed, empty, complex and unusual calls are left to torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anybatch.conv.algorithms import LAYOUTS
from anybatch.conv.network import Key
from anybatch.conv.problem import Kernel, Problem

FORWARD, BACKWARD = "aten::convolution", "aten::convolution_backward"

DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}

Place = tuple[Sequence[int], Sequence[int], Sequence[int], int]
"""Stride, padding and dilation as torch has them, and groups."""


def takes(x: Tensor, w: Tensor, *, transposed: bool) -> bool:
    """Return whether a call of a convolution is one that this library may compute.

    Args:
        x: the input of the layer.
        w: its filters.
        transposed: as torch has it.
    """
    return not (
        transposed
        or x.dim() != w.dim()
        or not 3 <= x.dim() <= 5
        or x.dtype != w.dtype
        or x.dtype not in DTYPES
        or not x.numel()
        or not w.numel()
    )


def problem_of(kernel: Kernel, x: Tensor, w: Tensor, place: Place, device: str) -> Problem:
    """Return a kernel of a layer.

    Args:
        kernel: which.
        x: the input of the layer.
        w: its filters.
        place: where windows lie.
        device: type of device.
    """
    dims = x.dim() - 2
    stride, padding, dilation, groups = place
    return Problem(
        kernel,
        x.shape[1],
        w.shape[0],
        tuple(x.shape[2:]),
        tuple(w.shape[2:]),
        _several(stride, dims),
        _several(padding, dims),
        _several(dilation, dims),
        groups,
        DTYPES[x.dtype],
        device,
        layout_of(x),
    )


def kernels_of(name: str, args: Sequence[Any]) -> list[Key]:
    """Return the kernels that a call asks for, on tensors with data or without.

    Args:
        name: of the operator, such as "aten::convolution".
        args: as the dispatcher has them.
    """
    if name == FORWARD:
        x, w, _, stride, padding, dilation, transposed, _, groups = args
        wanted: list[Kernel] = ["forward"]
    elif name == BACKWARD:
        _, x, w, _, stride, padding, dilation, transposed, _, groups, mask = args
        both: list[tuple[Kernel, bool]] = [("data", mask[0]), ("filter", mask[1])]
        wanted = [kernel for kernel, requested in both if requested]
    else:
        return []
    if not takes(x, w, transposed=transposed):
        return []
    place = stride, padding, dilation, groups
    return [(problem_of(kernel, x, w, place, x.device.type), len(x)) for kernel in wanted]


def layout_of(x: Tensor) -> str:
    """Return "channels_last" for a tensor that is so and not contiguous, else "contiguous"."""
    last = x.dim() in LAYOUTS and not x.is_contiguous()
    return (
        "channels_last"
        if last and x.is_contiguous(memory_format=LAYOUTS[x.dim()])
        else "contiguous"
    )


def _several(values: Sequence[int], dims: int) -> tuple[int, ...]:
    return tuple(values) if len(values) == dims else tuple(values) * dims
