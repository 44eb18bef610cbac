"""Memory of a kernel's results that a dry run does not show.

A kernel on fakes returns the shapes that torch's formulas for them name, and some of these differ
from those of the real kernel. Three cases are known:

    a mean     its scalar lies in the memory of all its terms
    an LSTM    what its forward keeps for backward is foreseen as empty, and its backward returns
               the gradients of two biases, foreseen as one
    BatchNorm  a gradient of its input that nobody has requested is foreseen, and not made

The memory that an LSTM saves is undocumented: some buffers, each of so many bytes a row and rounded
up to a page. So a few rows of zeros are run once, and r rows are bounded by

    bytes(r) <= r * bytes(R) / R + pages

as every buffer of R rows holds at least R times the bytes of a row. That run takes memory: a step
of one row has as much as R = 1 needs, and more rows are run if a budget permits, in powers of two,
so that a larger budget never yields a larger bound. Anything else is found by the small real step
that each forecast is compared with (`anybatch.planner.ladder`).

Source: oneDNN's guide to its RNN primitive, "Workspace".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

FULL = (
    "aten.mse_loss.default",
    "aten.smooth_l1_loss.default",
    "aten.binary_cross_entropy.default",
    "aten.soft_margin_loss.default",
)
"""Kernels whose mean is a scalar in the memory of all its terms; a fake one has only the scalar."""

RECURRENT = "aten.mkldnn_rnn_layer.default"
"""The kernel of one layer and direction of an LSTM on a CPU; its last result is for backward."""

BACKWARD = "aten.mkldnn_rnn_layer_backward.default"
"""Its backward."""

NORMALISED = "aten.native_batch_norm_backward.default"
"""The backward of BatchNorm; its last argument selects the results."""

BIASES = 3, 4
"""Which of its results are the gradients of the two biases."""

OF_ROWS = (0, 5, 6)
"""Its arguments that have rows, [..., rows, features]."""

MOST = 8
"""Rows that are run at most, a power of two: the rounding is an eighth of it for each."""

PAGES = 8 * 4096
"""Bytes that all its buffers are rounded up by, at most."""


def terms(name: str, args: tuple[Any, ...]) -> int:
    """Return the bytes of the terms that a real kernel's mean is a part of; 0 for most kernels."""
    if name not in FULL:
        return 0
    return int(max(args[0].numel(), args[1].numel()) * args[0].element_size())


def completed(name: str, args: tuple[Any, ...], result: Any, spare: int) -> Any:
    """Return a fake kernel's results as large as the real ones are.

    Args:
        name: of the kernel.
        args: that it was given.
        result: its return value.
        spare: bytes within which some rows of zeros may be run.
    """
    if name == RECURRENT and torch.is_grad_enabled():  # without, it keeps nothing
        return _with_workspace(args, result, spare)
    if name == BACKWARD:
        return _with_both_biases(result)
    if name == NORMALISED and not args[-1][0]:
        return None, *result[1:]
    return result


def _with_both_biases(result: Any) -> Any:
    """Return the results of a backward with a gradient for each of the two biases."""
    one, other = (result[index] for index in BIASES)
    if not isinstance(one, FakeTensor) or one is not other:
        return result
    return (*result[: BIASES[1]], torch.empty_like(other), *result[BIASES[1] + 1 :])


def _with_workspace(args: tuple[Any, ...], result: Any, spare: int) -> Any:
    """Return the results of a forward with the buffer that it saves for backward."""
    saved = result[-1]
    if not isinstance(saved, FakeTensor) or saved.numel():
        return result
    rows = int(args[0].shape[-2])
    a_row = _saved_per_row(tuple(map(_described, range(len(args)), args)), spare)
    return (*result[:-1], saved.new_empty(rows * a_row + PAGES))


@dataclass(frozen=True)
class _Sizes:
    """Description of a tensor: its sizes, without its rows, and its dtype."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    dtype: torch.dtype
    has_rows: bool

    def zeros(self, rows: int) -> Tensor:
        """Return such a tensor; weights have the memory of one number."""
        if self.has_rows:
            shape = *self.before, rows, *self.after
            return torch.zeros(shape, dtype=self.dtype, device="cpu")
        return torch.zeros((), dtype=self.dtype, device="cpu").expand(self.before)

    @property
    def bytes(self) -> int:
        """Return the bytes of its elements, or of those of a row."""
        return prod((*self.before, *self.after)) * self.dtype.itemsize


def _described(index: int, value: Any) -> Any:
    """Return an argument, with its description in place of a tensor."""
    if not isinstance(value, Tensor):
        return tuple(value) if isinstance(value, list) else value
    shape = tuple(map(int, value.shape))
    if index in OF_ROWS:
        return _Sizes(shape[:-2], shape[-1:], value.dtype, has_rows=True)
    return _Sizes(shape, (), value.dtype, has_rows=False)


def _saved_per_row(args: tuple[Any, ...], spare: int) -> int:
    """Return the bytes that a layer keeps for each row, but for some pages: it is run."""
    every, _ = _run(args, 1)
    affordable = min(MOST, max(1, spare // every))
    rows = 1 << (affordable.bit_length() - 1)
    return -(-_run(args, rows)[1] // rows)


@cache
def _run(args: tuple[Any, ...], rows: int) -> tuple[int, int]:
    """Return the bytes that a layer of zeros takes, with its rows, and those that it keeps."""
    with unset_fake_temporarily(), torch.enable_grad():
        arguments = [arg.zeros(rows) if isinstance(arg, _Sizes) else arg for arg in args]
        made = torch.ops.aten.mkldnn_rnn_layer.default(*arguments)
        there = [*(arguments[index] for index in OF_ROWS), *made]
        return sum(t.untyped_storage().nbytes() for t in there), int(made[-1].numel())
