"""`anybatch.chunked_losses`: wide linear maps are not computed until a loss needs a chunk of rows.

A mode replaces the result of a linear map that is much wider than its rows by `Logits`, which hold
their own computation (`anybatch.loss.logits`). A loss of torch's runs it in chunks
(`anybatch.loss.chunked_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling as compiling
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from anybatch.core.barrier import in_forward
from anybatch.core.modules import keywords
from anybatch.loss.chunked_rows import ChunkedLosses, LogitsSource, WideMap
from anybatch.loss.logits import PLAIN, logits_of

WIDE = 4
"""Columns for each feature of a row, above which a linear map is wide. An MLP's first map has 4."""


@contextmanager
def chunked_losses(
    rows: int | None = None, *, columns: int | None = None
) -> Iterator[ChunkedLosses]:
    """Compute wide linear maps and the losses of their results in chunks of rows.

    Logits of a vocabulary are often the largest tensors of a step. In this context a linear map
    with many more columns than features is computed where `torch.nn.functional.cross_entropy`, or
    another loss of each row by itself, asks for it: a chunk of rows at a time, in forward and again
    in backward. Loss and gradients are those of all logits at once up to rounding, and memory is
    that of one chunk.

    The model needs no change: scaling, soft caps, casts, shifts, reshapes, biases, tied weights and
    LoRA are computed in chunks, too. Any other function of logits (topk, a mask that is written to
    them) gets a tensor of all. Enter the context around forward and backward.

    Args:
        rows: of a chunk. Default None: as many as take 4 MiB.
        columns: least number of columns of a wide map. Default None: more than four times its
            features.

    Yields:
        A report of the functions that were computed in chunks, and of those that got all logits.

    Raises:
        ValueError: `rows` or `columns` is less than 1.
        LossError: code writes to logits of which it has made a view before, or to the input or the
            weight of a wide map before the loss has been computed.

    Example:
        >>> with anybatch.chunked_losses():
        ...     loss = model(input_ids=ids, labels=ids).loss
        ...     loss.backward()
    """
    for name, value in (("rows", rows), ("columns", columns)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a number of {name}, 1 at least, and it is {value!r}")
    report = ChunkedLosses()
    with _Defer(report, rows, columns):
        yield report


class _Defer(TorchFunctionMode):
    def __init__(self, report: ChunkedLosses, rows: int | None, columns: int | None) -> None:
        super().__init__()
        self._report, self._rows, self._columns = report, rows, columns

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = keywords(func, kwargs)
        if func in _PRODUCTS and not (compiling() or in_forward() or _in_checkpoint()):
            found = _PRODUCTS[func](*args, **kwargs)
            if found is not None and self._wide(found):
                source = LogitsSource((_cast(found),), self._report, self._rows)
                source = replace(source, versions=tuple(one._version for one in source.tensors))
                return logits_of(source if torch.is_grad_enabled() else source.detached())
        return func(*args, **kwargs)

    def _wide(self, found: WideMap) -> bool:
        """Say whether a map is wide, and made of plain tensors."""
        tensors = [one for one in (found.h, found.w, found.b) if one is not None]
        plain = all(
            type(one) in PLAIN and one.layout == torch.strided and not one.is_inference()
            for one in tensors
        )
        if not plain or found.w.dim() != 2 or found.h.dim() < 2 or not found.h.numel():
            return False
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
            return False
        columns, features = found.w.shape
        one_type = len({one.dtype for one in tensors}) == 1 or torch.is_autocast_enabled(
            found.h.device.type
        )
        wide = columns > WIDE * features if self._columns is None else columns >= self._columns
        return wide and one_type and found.h.is_floating_point() and found.h.shape[-1] == features


def _in_checkpoint() -> bool:
    """Say whether saved tensors are dropped here, and computed again without this mode."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return bool(hooks) and getattr(hooks[0], "__module__", "") == checkpoint.__name__


def _cast(one: WideMap) -> WideMap:
    """Return a map as autocast would compute it."""
    device = one.h.device.type
    if not torch.is_autocast_enabled(device) or one.h.dtype == torch.float64:
        return one
    dtype = torch.get_autocast_dtype(device)
    return replace(
        one, h=one.h.to(dtype), w=one.w.to(dtype), b=None if one.b is None else one.b.to(dtype)
    )


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> WideMap | None:  # noqa: A002
    return WideMap(input, weight, bias)


def _product(input: Tensor, other: Any, **more: Any) -> WideMap | None:  # noqa: A002
    two = isinstance(input, Tensor) and isinstance(other, Tensor) and not more
    return WideMap(input, other.t()) if two and other.dim() == 2 else None


_PRODUCTS: dict[Any, Callable[..., WideMap | None]] = {
    F.linear: _linear,
    torch.matmul: _product,
    torch.mm: _product,
    Tensor.matmul: _product,
    Tensor.mm: _product,
    Tensor.__matmul__: _product,
}
