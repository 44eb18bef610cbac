"""Check of rows that are as long as the longest row of their batch: ``pad_packed_sequence``.

Without ``total_length`` its result ends where the longest row of a micro-batch ends, and a mean
over it is another for the full batch. A few rows are made one step longer: NaN in that step shows
whether it is read, and padding whether that matters.

    rows of 3, 5 and 2 steps      out [3, 5, C]      out.mean(1): another in a batch with 6 steps
    one step more, NaN            out [3, 6, C]      out[rows, length - 1]: as before
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from anybatch.core import tree
from anybatch.core.functions import keywords
from anybatch.core.memory_errors import out_of_memory
from anybatch.execution.proof.verdict import UNDIVIDED

PADS = "_pad_packed_sequence"
"""torch's function: data, sizes of the steps, whether the batch is first, padding, steps."""

CALLER, NEAR = "pad_packed_sequence", 8
"""The function whose argument is the length, and the most frames up to it."""

ROUNDING = 1e-3
"""Relative change of a mean over a thousand steps that gets one step more."""


def as_long_as_the_longest(args: tuple[Any, ...]) -> bool:
    """Say whether a call of `PADS` pads to its longest row; a mode asks when it receives it."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(NEAR):  # other modes may have been told before
        if frame is not None and frame.f_code.co_name == CALLER:
            return frame.f_locals.get("total_length") is None
        frame = None if frame is None else frame.f_back
    return bool(args[-1] == len(args[1]))


class Longer(TorchFunctionMode):
    """Makes rows in the body one step longer than the longest.

    Args:
        fill: value of the step; None (default) is the user's padding.
    """

    def __init__(self, fill: float | None = None) -> None:
        super().__init__()
        self._fill = fill

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Pad one step more."""
        kwargs = keywords(func, kwargs)
        if getattr(func, "__name__", "") != PADS or not as_long_as_the_longest(args):
            return func(*args, **kwargs)
        *leading, steps = args
        padded, lengths = func(*leading, steps + 1, **kwargs)
        if self._fill is not None:
            padded.narrow(1 if args[2] else 0, steps, 1).fill_(self._fill)
        return padded, lengths


def matters(call: Callable[[], Any], outputs: Any, *, draws: bool) -> bool | None:
    """Return whether outputs depend on the length of the longest row; None where it is unknown.

    Args:
        call: runs forward on the same rows, without a graph, each time as the first time.
        outputs: its outputs.
        draws: it draws numbers, which one step more would change.
    """
    try:
        with Longer(math.nan):
            of_nan = call()
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if out_of_memory(error):
            raise
        return True  # something else is as long as the longest row
    read = any(map(_holds_nan, tree.flat(of_nan)))
    if draws:
        return None if read else False
    with Longer():
        padded = call()
    if not _alike(padded, outputs):  # also where nanmean, or a comparison, has left NaN out
        return True
    return None if read or not _alike(of_nan, outputs) else False


def depends(path: str) -> str:
    """Return the refusal of outputs that depend on the longest row."""
    return (
        "the computation of a row must not depend on the other rows when the batch is split, and "
        f"pad_packed_sequence in {path} makes rows as long as the longest of a micro-batch, on "
        f"which the outputs depend: give it total_length=x.shape[1], or {UNDIVIDED}"
    )


def _holds_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isnan().any())


def _alike(one: Any, other: Any) -> bool:
    pairs = zip(tree.flat(one), tree.flat(other), strict=True)
    return all(a.shape == b.shape and _close(a, b) for a, b in pairs)


def _close(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    # Half of the digits: a sum with one more zero may be rounded in another way
    # (test_one_step_more_matters_where_it_is_no_rounding).
    bound = min(ROUNDING, torch.finfo(a.dtype).eps ** 0.5)
    largest = max(float(b.abs().max()) if b.numel() else 0.0, torch.finfo(a.dtype).tiny)
    return bool(torch.allclose(a, b, rtol=0.0, atol=bound * largest, equal_nan=True))
