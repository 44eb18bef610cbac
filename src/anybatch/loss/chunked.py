"""`anybatch.chunked_losses`: wide linear maps are not computed until a loss needs a chunk of rows.

A mode replaces the result of a linear map that is much wider than its rows by `Logits`, which hold
their own computation (`anybatch.loss.logits`). A loss of torch's runs it in chunks
(`anybatch.loss.chunked_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling as compiling
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from anybatch.core.barrier import in_forward
from anybatch.core.modules import keywords
from anybatch.core.pytree import map_tensors
from anybatch.loss.chunked_rows import ChunkedLosses, LogitsSource, WideMap
from anybatch.loss.logits import Logits, in_checkpoint, logits_of, transformed
from anybatch.loss.row_functions import PLAIN

WIDE = 4
"""Columns for each feature of a row, above which a linear map is wide. An MLP's first map has 4."""


@contextmanager
def chunked_losses(
    rows: int | None = None, *, columns: int | None = None
) -> Iterator[ChunkedLosses]:
    """Compute wide linear maps and the losses of their results in chunks of rows.

    Logits of a vocabulary are often the largest tensors of a step. In this context a linear map
    with many more columns than features is computed where `torch.nn.functional.cross_entropy`, or
    another loss of each row by itself, asks for it: a chunk of rows at a time. Of a sum or a mean
    the gradient is computed there, too; of other functions backward computes logits again. Loss and
    gradients are those of all logits at once up to rounding, and memory is that of one chunk.

    The model needs no change: scaling, soft caps, casts, shifts, reshapes, biases, tied weights and
    LoRA are computed in chunks, too. Any other function of logits (topk, a mask that is written to
    them) gets a tensor of all. Enter the context around forward and backward. Between the call of
    the model and the loss write to no weight through ``.data``, numpy or a fused optimizer, which
    nothing notices; other writes are refused. There are no second derivatives.

    Args:
        rows: of a chunk. Default None: as many as take 16 MiB; if more, as many as there are
            features, but at most 256; on a GPU 4,096.
        columns: least number of columns of a wide map. Default None: more than four times its
            features.

    Yields:
        A report of the functions that were computed in chunks, and of those that got all logits.

    Raises:
        ValueError: `rows` or `columns` is less than 1.
        LossError: code writes to the input or the weight of a wide map before the loss has been
            computed, asks for a gradient of logits after their loss, or for second derivatives.

    Example:
        >>> with anybatch.chunked_losses():
        ...     loss = model(input_ids=ids, labels=ids).loss
        ...     loss.backward()
    """
    for name, value in (("rows", rows), ("columns", columns)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a number of {name}, 1 at least, and it is {value!r}")
    report = ChunkedLosses()
    with Deferring(report, rows, columns):
        yield report


class Deferring(TorchFunctionMode):
    """Mode in which wide linear maps are not computed.

    Args:
        report: receives the functions of their results.
        rows: as in `chunked_losses`.
        columns: as in `chunked_losses`.
        planned: by an engine; else its steps are left alone.
        few: for an inspection, which computes few columns.
    """

    def __init__(
        self,
        report: ChunkedLosses,
        rows: int | None = None,
        columns: int | None = None,
        *,
        planned: bool = False,
        few: bool = False,
    ) -> None:
        super().__init__()
        self._report, self._rows, self._columns = report, rows, columns
        self._planned, self._few = planned, few

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Defer a product, and pass everything else on."""
        kwargs = keywords(func, kwargs)
        mine = func in _PRODUCTS and (self._planned or not in_forward())
        if mine and not (compiling() or in_checkpoint()):
            found = _PRODUCTS[func](*args, **kwargs)
            if found is not None and self._wide(found):
                fixed = tuple((one, one._version) for one in found.tensors)
                called = _cast(found.as_called())
                source = LogitsSource(
                    maps=(called,),
                    report=self._report,
                    rows=self._rows or self._report.rows(called),
                    fixed=fixed,
                    few=self._few,
                )
                return logits_of(source if torch.is_grad_enabled() else source.detached())
        return func(*args, **kwargs)

    def _wide(self, found: WideMap) -> bool:
        tensors, h, w, device = found.tensors, found.h, found.w, found.h.device.type
        plain = all(
            type(one) in PLAIN and one.layout == torch.strided and not one.is_inference()
            for one in tensors
        )
        if not plain or w.dim() != 2 or h.dim() < 2 or not h.numel() or h.shape[-1] != w.shape[1]:
            return False
        if device == "meta" or transformed():
            return False
        columns, features = w.shape
        one_type = len({one.dtype for one in tensors}) == 1 or torch.is_autocast_enabled(device)
        wide = columns > WIDE * features if self._columns is None else columns >= self._columns
        flat = found.b is None or found.b.shape == (columns,)
        return wide and one_type and flat and h.is_floating_point()


def _cast(one: WideMap) -> WideMap:
    device = one.h.device.type
    if not torch.is_autocast_enabled(device) or one.h.dtype == torch.float64:
        return one
    dtype = torch.get_autocast_dtype(device)
    return one.each(lambda tensor: tensor.to(dtype))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> WideMap | None:  # noqa: A002
    return WideMap(input, weight, bias)


def _product(*args: Any, **more: Any) -> WideMap | None:
    if len(args) != 2 or more or not all(isinstance(one, Tensor) for one in args):
        return None
    h, w = args
    return WideMap(h, w.t()) if w.dim() == 2 else None


def _matrices(*args: Any, **more: Any) -> WideMap | None:
    found = _product(*args, **more)
    return found if found is not None and found.h.dim() == 2 else None


_PRODUCTS: dict[Any, Callable[..., WideMap | None]] = {
    F.linear: _linear,
    torch.matmul: _product,
    torch.mm: _matrices,
    Tensor.matmul: _product,
    Tensor.mm: _matrices,
    Tensor.__matmul__: _product,
}


def with_few_columns(forward: Callable[[], Any], nbytes: int) -> Any:
    """Run forward for an inspection: few columns of wide linear maps are computed."""
    with Deferring(ChunkedLosses(nbytes=nbytes), planned=True, few=True):
        return forward()


def stand_ins(forward: Callable[[], Any]) -> Any:
    """Return the outputs of a model, in an inspection with one column in the place of logits."""
    return map_tensors(_stand_in, forward())


def _stand_in(one: Tensor) -> Tensor:
    source = one.few_source if isinstance(one, Logits) else None
    return one if source is None else source.stand_in()
