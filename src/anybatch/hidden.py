"""What a kernel's results hold, and a rehearsal on tensors without data does not show.

A kernel on fakes returns the shapes that torch's formulas for them name, and some of these are not
what the real kernel returns. Two kinds are known:

    a mean           its scalar lies in the memory of all its terms
    an LSTM, a GRU   what forward keeps for backward is foreseen as empty

What the second one keeps is the library's secret: some buffers, each of so many bytes a row and
rounded up to a page. So a few rows of zeros are run once, and r rows are bounded by

    bytes(r) <= r * bytes(R) / R + BUFFERS * PAGE           R = 4

as every buffer of R rows holds at least R times what a row does. Anything else is found by the
small real step that each forecast is compared with (`anybatch.ladder`).

Source: design of this project, section 5.5; oneDNN's guide to its RNN primitive, "Workspace".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

FULL = (
    "aten.mse_loss.default",
    "aten.smooth_l1_loss.default",
    "aten.binary_cross_entropy.default",
    "aten.soft_margin_loss.default",
)
"""Kernels whose mean is a scalar in the memory of all its terms; a fake one has only the scalar."""

RECURRENT = "aten.mkldnn_rnn_layer.default"
"""The kernel of one recurrent layer on a CPU; its last result is what backward needs."""

OF_ROWS, TRAIN = (0, 5, 6), 15
"""Its arguments that have rows, [..., rows, features], and whether it keeps anything."""

ROWS = 4
"""Rows that are run to learn what it keeps."""

BUFFERS, PAGE = 8, 4096
"""Parts of what it keeps, and the bytes that each is rounded up to."""


def terms(name: str, args: tuple[Any, ...]) -> int:
    """Return the bytes of the terms that a real kernel's mean is a part of; 0 for most kernels."""
    if name not in FULL:
        return 0
    return int(max(args[0].numel(), args[1].numel()) * args[0].element_size())


def completed(name: str, args: tuple[Any, ...], result: Any) -> Any:
    """Return a fake kernel's results as large as the real ones are.

    Args:
        name: of the kernel.
        args: that it was given.
        result: what it returned.
    """
    if name != RECURRENT or not isinstance(result[-1], FakeTensor):
        return result
    if not args[TRAIN] or not torch.is_grad_enabled():
        return result
    few = tuple(
        _Sizes.of(value, -2 if index in OF_ROWS else None)
        if isinstance(value, Tensor)
        else tuple(value)
        if isinstance(value, list)
        else value
        for index, value in enumerate(args)
    )
    rows = int(args[0].shape[-2])
    return (*result[:-1], result[-1].new_empty(-(-rows * _kept(few) // ROWS) + BUFFERS * PAGE))


@dataclass(frozen=True)
class _Sizes:
    """A tensor of zeros that can be made: its sizes, with `ROWS` rows where it has some."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor, where: int | None) -> _Sizes:
        """Return those of a tensor whose rows are in a dimension, or that has none."""
        shape = [int(size) for size in tensor.shape]
        if where is not None:
            shape[where] = ROWS
        return cls(tuple(shape), tensor.dtype)

    def zeros(self) -> Tensor:
        """Return such a tensor."""
        return torch.zeros(self.shape, dtype=self.dtype)


@cache
def _kept(args: tuple[Any, ...]) -> int:
    """Return the bytes that a recurrent layer of `ROWS` rows keeps: it is run."""
    with _disable_current_modes(), torch.enable_grad():
        real = [value.zeros() if isinstance(value, _Sizes) else value for value in args]
        kept: Tensor = torch.ops.aten.mkldnn_rnn_layer.default(*real)[-1]
        return kept.numel()
