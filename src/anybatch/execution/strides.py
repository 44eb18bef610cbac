"""BatchNorm's backward of one row, which torch gets wrong on the CPU where a stride is unusual.

The stride of a dimension of size 1 has no meaning, and transposing, viewing and expanding set any
number there. torch's kernel tests its two operands twice: whether each is dense, which ignores that
number, and whether their memory formats are the same, which does not. So an image with adjacent
channels is read as one with adjacent columns, in the wrong order.

    dy [1, C, H, W], strides (C, 1, W C, C)      dense: yes, channels last     format: rows first
    x  [1, C, H, W], strides (C H W, H W, W, 1)  dense: yes, rows first        format: rows first

A batch that is divided has such rows where the undivided one has none. Instance normalisation is
that kernel, too, and its own view makes the unusual stride. So during a step the kernel is given
the strides that a new tensor would have: a view, nothing is copied.

The report for torch is in ``docs/decisions/batchnorm.md``, the sweep over kernels in its test.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Dimensions -> the memory format that torch has besides the usual one."""

NAMES = ("native_batch_norm_backward", "batch_norm_backward")
"""The kernels that mistake one format for the other; first come dy and x."""


def standard(x: Tensor) -> Tensor:
    """Return a view with the strides of a new tensor of its format in dimensions of size 1."""
    shape, other = x.shape, FORMATS.get(x.dim())
    if other is None or 1 not in shape or x.is_contiguous():
        return x
    if not x.is_contiguous(memory_format=other):
        return x  # read by strides, and right
    strides, step = [0] * x.dim(), 1
    for d in (1, *range(x.dim() - 1, 1, -1), 0):
        strides[d], step = step, step * shape[d]
    return x.as_strided(shape, strides)


class _Kernels:
    """Registry of the running steps, and of the replacements of torch's kernels."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # an interrupt may come before its end is heard
        self.steps: set[object] = set()  # a count would need a lock, and an interrupt could keep it
        self._library: Library | None = None

    def replace(self) -> None:
        """Replace torch's kernels once: the dispatcher must not change while it is called."""
        with self._lock:
            if self._library is not None:
                return
            library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
            with warnings.catch_warnings():  # torch warns of what is meant here
                warnings.simplefilter("ignore")
                for name in NAMES:
                    kernel = partial(self._call, get_kernel(f"aten::{name}", "CPU").call_boxed)
                    library.impl(  # type: ignore[no-untyped-call]
                        name, kernel, "CPU", with_keyset=True, allow_override=True
                    )
            self._library = library

    def _call(self, own: Callable[..., Any], keys: Any, dy: Tensor, x: Tensor, *others: Any) -> Any:
        if self.steps:
            dy, x = standard(dy), standard(x)
        return own(keys, dy, x, *others)


_KERNELS = _Kernels()


class StandardStrides:
    """Context in which BatchNorm's backward is right, from the first `one_row` on.

    Outside, torch's kernels are unchanged.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        try:
            _KERNELS.steps.add(self)
        except BaseException:  # an interrupt on the way back from it
            _KERNELS.steps.discard(self)
            raise

    def __exit__(self, *_: object) -> None:
        _KERNELS.steps.discard(self)


def one_row() -> None:
    """Take in that a model is called with a single row, for which torch's kernels are replaced."""
    if _KERNELS._library is None:
        _KERNELS.replace()
