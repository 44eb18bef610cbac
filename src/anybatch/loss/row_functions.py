"""Functions of logits that are not there: of each row by itself, and of rows as they move.

Each takes the source of logits and the call, and returns the source of the result, or the result in
chunks; None where it needs all logits at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import Parameter
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from anybatch.loss import functionals
from anybatch.loss.chunked_rows import FEW, LogitsSource, few_of
from anybatch.loss.row_gradients import CrossEntropy
from anybatch.loss.terms import tensors_of

PLAIN = (Tensor, Parameter, FakeTensor)


LEAST = 1e-6
"""Numbers by which logits are scaled before they are computed, at least, and 1 by it at most."""

ADDS = frozenset("add __add__ __radd__".split())

SCALES = {"mul": 1, "__mul__": 1, "__rmul__": 1, "div": -1, "true_divide": -1, "__truediv__": -1}

POINTWISE = frozenset(
    "add __add__ __radd__ float double half bfloat16 to type mul __mul__ __rmul__ div true_divide "
    "__truediv__ sub __sub__ __rsub__ neg __neg__ tanh sigmoid logsigmoid exp log abs square pow "
    "__pow__ clamp clamp_min clamp_max softmax log_softmax detach clone".split()
)
"""Functions that give each logit another value, by those of its own row."""

CASTS = frozenset("float double half bfloat16 to type".split())
"""Functions that return the same tensor where it has the type already."""

ROWS = frozenset(["softmax", "log_softmax"])

LOSSES = frozenset(["cross_entropy", "nll_loss"])

ALONG = frozenset("logsumexp argmax sum mean amax amin gather".split())
"""Functions that reduce the columns of a row."""

REDUCES = frozenset(["input", "dim", "index", "keepdim", "dtype"])
"""Keywords of these."""

PERMUTES = frozenset("transpose swapaxes swapdims permute movedim moveaxis mT t T".split())

MOVES = PERMUTES | frozenset(
    "view reshape flatten unflatten __getitem__ narrow select index_select unsqueeze "
    "squeeze".split()
)

ARGUMENTS = (Real, str, Tensor, torch.dtype, torch.device, torch.memory_format, type(None))
"""Arguments of a function that is recorded."""

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


def pointwise(
    func: Any, name: str, source: LogitsSource, args: Any, kwargs: Any
) -> LogitsSource | None:
    """Return the source of logits with other values; None where other rows have a part in them."""
    if name == "detach":
        return source.detached()
    rest = args[1:]
    if name in ROWS:
        return _row_function(func, source, args, kwargs)
    if (scale := _scale(name, source, rest, kwargs)) is not None:
        return source.times(scale)
    if not _same_for_all_rows(source, tensors_of(rest, kwargs)):
        return None
    if name in CASTS and not _only_types(source, rest, kwargs):
        return None
    rest, kwargs = tree_map(_flat, (rest, kwargs))
    if not all(isinstance(one, ARGUMENTS) for one in tree_leaves((rest, kwargs))):
        return None

    def recorded(z: Tensor) -> Tensor:
        some, more = tree_map(partial(_columns_of, z), (rest, kwargs))
        return func(z, *some, **more)  # type: ignore[no-any-return]

    found = source.then(recorded)
    if found.dtype is None or not found.dtype.is_floating_point:
        return None
    same = name in CASTS and found.dtype == source.dtype_now and not kwargs.get("copy")
    return source if same else found


def _columns_of(z: Tensor, one: Any) -> Any:
    if not isinstance(one, Tensor) or one.numel() in (1, z.shape[-1]):
        return one
    return few_of(one, z.shape[-1])


def _scale(name: str, source: LogitsSource, rest: Any, kwargs: Any) -> float | None:
    """Return the number by which a function multiplies linear maps; None for other functions."""
    linear = not source.recorded and source.dtype is None and not kwargs
    if name not in SCALES or not linear or len(rest) != 1 or type(rest[0]) not in (int, float):
        return None
    number = float(rest[0])
    if not LEAST <= abs(number) <= 1 / LEAST:
        return None
    return number ** SCALES[name]


def _same_for_all_rows(source: LogitsSource, others: list[Tensor]) -> bool:
    """Say whether tensors hold one number, or one for each column, and need no gradient."""
    for one in others:
        columns = one.dim() > 0 and one.shape[-1] == source.columns == one.numel()
        fits = one.numel() == 1 or (columns and source.place < 0)
        if not fits or one.requires_grad or type(one) not in PLAIN:
            return False
        if one.dim() > len(source.shape):
            return False
    return True


def _flat(one: Any) -> Any:
    """Return a copy of a tensor of each column, or of one number, in one dimension at most.

    It is a copy, for the tensor may be written to before backward computes with it again.
    """
    if not isinstance(one, Tensor):
        return one
    return one.detach().clone().reshape(-1 if one.dim() else ())


def _only_types(source: LogitsSource, rest: Any, kwargs: Any) -> bool:
    device = source.maps[0].h.device
    return all(
        isinstance(one, torch.dtype | bool | torch.memory_format | None)
        or (isinstance(one, torch.device) and one == device)
        for one in tree_leaves((rest, kwargs))
    )


def added(a: LogitsSource, b: LogitsSource) -> LogitsSource | None:
    """Return the source of a sum of logits; None where one of them is not a linear map."""
    linear = not (a.recorded or b.recorded) and a.dtype is b.dtype is None and a.place == b.place
    if not linear or a.shape != b.shape or a.dtype_now != b.dtype_now:
        return None
    return replace(a, maps=(*a.maps, *b.maps), fixed=(*a.fixed, *b.fixed))


def _column_place(source: LogitsSource) -> int:
    return source.place if source.place >= 0 else len(source.lead)


def _is_columns(source: LogitsSource, dim: Any) -> bool:
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    ndim = len(source.shape)
    return type(dim) is int and -ndim <= dim < ndim and dim % ndim == _column_place(source)


def _row_function(func: Any, source: LogitsSource, args: Any, kwargs: Any) -> LogitsSource | None:
    """Return the source of softmax and the like along the columns; None along other dimensions."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not _is_columns(source, dim):
        return None
    dtype = kwargs.get("dtype", next((one for one in args if type(one) is torch.dtype), None))
    return source.then(lambda z: func(z, dim=-1, dtype=dtype))


def moved(
    func: Any, name: str, source: LogitsSource, args: Any, kwargs: Any
) -> LogitsSource | None:
    """Return the source of the same logits in another shape; None where columns move into rows."""
    if name not in MOVES:
        return None
    if any(isinstance(one, torch.dtype) for one in (*args, *kwargs.values())):
        return None  # a view of the same bits
    if name in PERMUTES:
        return _permuted(func, source, args[1:], kwargs)
    if source.place >= 0:
        return None
    if name in ("view", "reshape", "flatten", "unflatten"):
        shape = _shape(func, source.shape, args[1:], kwargs)
        if (
            not shape
            or shape[-1] != source.columns
            or math.prod(shape[:-1]) != math.prod(source.lead)
        ):
            return None
        return source.of_rows(lambda h: h.reshape(*shape[:-1], h.shape[-1]))
    columns = source.columns
    if name == "__getitem__" and not _keeps_columns(args[1], len(source.shape)):
        return None
    if name != "__getitem__" and not _of_rows(name, args, kwargs, len(source.shape)):
        return None
    moved = source.of_rows(lambda h: func(h, *args[1:], **kwargs))
    return moved if moved.columns == columns else None


def _shape(func: Any, shape: Sequence[int], args: Any, kwargs: Any) -> torch.Size:
    """Return the shape of a result, of which no mode hears."""
    with _disable_current_modes():
        found: Tensor = func(torch.empty(tuple(shape), device="meta"), *args, **kwargs)
    return found.shape


def _of_rows(name: str, args: Any, kwargs: Any, ndim: int) -> bool:
    """Say whether a function is of a dimension of rows; the columns are the last one of `ndim`."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if type(dim) is not int or not -ndim - 1 <= dim <= ndim:
        return False
    return dim % (ndim + 1) < ndim if name == "unsqueeze" else dim % ndim < ndim - 1


def _keeps_columns(index: Any, ndim: int) -> bool:
    """Say whether an index takes all columns, which are the last one of `ndim` dimensions."""
    every = index if isinstance(index, tuple) else (index,)
    if not all(
        one is None or one is Ellipsis or type(one) in (int, slice, Tensor) for one in every
    ):
        return False
    takes = [
        one.dim() if isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) else 1
        for one in every
        if one is not None and one is not Ellipsis
    ]
    dots = [place for place, one in enumerate(every) if one is Ellipsis]
    reaches = sum(takes) == ndim or (dots and dots[-1] < len(every) - 1)
    return not reaches or (isinstance(every[-1], slice) and every[-1] == slice(None))


def _permuted(func: Any, source: LogitsSource, args: Any, kwargs: Any) -> LogitsSource | None:
    ndim = len(source.shape)
    if ndim > len(PRIMES):
        return None
    shape = _shape(func, PRIMES[:ndim], args, kwargs)
    order = [PRIMES.index(size) for size in shape]
    at = _column_place(source)
    place = order.index(at)
    rows = [one - (one > at) for one in order if one != at]
    moved = source.of_rows(lambda h: h.permute(*rows, h.dim() - 1))
    return replace(moved, place=-1 if place == ndim - 1 else place)


def loss(func: Any, name: str, source: LogitsSource, args: Any, kwargs: Any) -> Tensor | None:
    """Return a loss of logits in chunks; None for a form that is not here."""
    a = functionals.bind(func, args, kwargs)
    target, weight, lead = a["target"], a["weight"], source.lead
    plain = type(target) in PLAIN and (weight is None or type(weight) in PLAIN)
    plain = plain and (weight is None or weight.shape == (source.columns,))
    old = a["size_average"] is not None or a["reduce"] is not None
    second = _column_place(source) == min(1, len(lead))
    if not plain or old or not lead or not second or (weight is not None and weight.requires_grad):
        return None
    if a["reduction"] not in ("none", "mean", "sum"):
        return None
    if target.is_floating_point():
        if target.requires_grad or tuple(target.shape) != source.shape:
            return None
        others = target.movedim(1, -1).reshape(-1, source.columns)
    elif target.shape != lead or target.dtype != torch.int64:
        return None
    else:
        others = target.reshape(-1)
    weight = None if weight is None else weight.detach().clone()
    smooth = {"label_smoothing": a["label_smoothing"]} if name == "cross_entropy" else {}
    more = {"ignore_index": a["ignore_index"], "reduction": "none", **smooth}

    def rows(z: Tensor, t: Tensor) -> Tensor:
        return func(z, t, weight=weight, **more)  # type: ignore[no-any-return]

    def rows_of_few(z: Tensor, t: Tensor) -> Tensor:
        some = None if weight is None else few_of(weight)
        return func(z, t, weight=some, **more)  # type: ignore[no-any-return]

    total, count, few = a["reduction"] != "none", None, None
    if a["reduction"] == "mean":
        with _disable_current_modes():
            like = torch.empty(source.shape, device="meta")
        counted = functionals.TABLE[func].count({**a, "input": like})
        count = torch.as_tensor(counted, device=source.maps[0].h.device).detach()
    if source.few:
        few = rows_of_few, (_few_classes(others, a["ignore_index"]),)
    found = source.reduced(
        _with_gradient(rows, a, weight), others, few=few, total=total, count=count
    )
    source.report.chunked[name] += 1
    return found if total else found.reshape(lead)


def _with_gradient(rows: Callable[..., Tensor], a: Any, weight: Tensor | None) -> Any:
    """Return a loss with its gradient where the logits are, if it is cross-entropy of classes."""
    if a.get("label_smoothing") != 0.0 or a["target"].is_floating_point():
        return rows
    return CrossEntropy(rows, a["ignore_index"], weight)


def _few_classes(targets: Tensor, ignored: int) -> Tensor:
    """Return targets of few classes; ignored ones remain."""
    if targets.is_floating_point():
        return few_of(targets.t()).t()
    return torch.where(targets == ignored, targets, targets % FEW)


def along(func: Any, name: str, source: LogitsSource, args: Any, kwargs: Any) -> Tensor | None:
    """Return a function that reduces the columns of each row; None for other dimensions."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not _is_columns(source, dim) or not set(kwargs) <= REDUCES:
        return None
    if name == "gather":
        index = kwargs.get("index", args[2] if len(args) > 2 else None)
        if (
            type(index) not in PLAIN
            or source.place >= 0
            or index.shape[:-1] != source.lead
            or not index.numel()
        ):
            return None
        rows = index.reshape(-1, index.shape[-1])

        def gathered(z: Tensor, t: Tensor) -> Tensor:
            return z.gather(-1, t)

        few = (gathered, (rows % FEW,)) if source.few else None
        found = source.reduced(gathered, rows, few=few).reshape(index.shape)
    else:
        keeps = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
        dtype = {"dtype": kwargs["dtype"]} if "dtype" in kwargs else {}
        found = source.reduced(partial(func, dim=-1, **dtype)).reshape(source.lead)
        found = (
            found.unsqueeze(dim[0] if isinstance(dim, tuple | list) else dim) if keeps else found
        )
    source.report.chunked[name] += 1
    return found
