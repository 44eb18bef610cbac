"""Logits that are computed when they must be: in chunks for a loss, at once for anything else.

They hold their own computation. Functions of each row by itself are recorded, reshapes move the
rows, and a loss of torch's computes all of it in chunks. Any other function gets a tensor of all
logits, computed for it, and the report says so.

    F.linear(h, w)    Logits: h, w                    nothing is computed
    .float() / 30     Logits: h, w, [float, / 30]     recorded
    [..., :-1, :]     Logits: h[..., :-1, :], w, ...  the rows move
    cross_entropy     a number                        in chunks
    topk              values                          all logits at once, in the report
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import Parameter
from torch.utils._pytree import tree_leaves, tree_map

from anybatch.core.modules import name_of
from anybatch.errors import LossError
from anybatch.loss import functionals
from anybatch.loss.chunked_rows import LogitsSource

PLAIN = (Tensor, Parameter, FakeTensor)


class _Promised(torch.autograd.Function):
    """A node for logits, for gradients of other origin than a function of `Logits`.

    A checkpoint, for one, lets backward begin at its outputs.
    """

    @staticmethod
    def forward(ctx: Any, source: LogitsSource, *tensors: Tensor) -> Logits:
        """Return the logits."""
        ctx.source = source
        del tensors
        return Logits(source)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradients of the tensors of the maps, by all logits at once."""
        source: LogitsSource = ctx.source
        with torch.enable_grad():
            leaves = iter([one.detach().requires_grad_() for one in source.tensors])
            maps = [
                replace(m, h=next(leaves), w=next(leaves), b=None if m.b is None else next(leaves))
                for m in source.maps
            ]
            alike = replace(source, maps=tuple(maps), versions=())
            value = alike.materialise()
        return None, *torch.autograd.grad([value], alike.tensors, gradients)


class _Values(torch.autograd.Function):
    """All values of logits that came out of another function, such as a checkpoint."""

    @staticmethod
    def forward(ctx: Any, logits: Logits) -> Tensor:  # noqa: ARG004
        """Return the logits, computed."""
        return logits._source.materialise()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004
        """Return the gradient of the logits."""
        return gradients[0]


def _values(logits: Logits) -> Tensor:
    found: Tensor = _Values.apply(logits)  # type: ignore[no-untyped-call]
    return found


def logits_of(source: LogitsSource) -> Logits:
    """Return logits without data."""
    found: Logits = _Promised.apply(source, *source.tensors)  # type: ignore[no-untyped-call]
    return found


class Logits(Tensor):
    """Result of a wide linear map, which is computed when it must be.

    Args:
        source: their computation.
    """

    _source: LogitsSource
    _value: Tensor | None
    _viewed: bool

    @staticmethod
    def __new__(cls: type[Logits], source: LogitsSource) -> Logits:
        """Return logits without data and without a graph; `logits_of` returns those with one."""
        found: Logits = Tensor._make_wrapper_subclass(
            cls, source.shape, dtype=source.dtype_now, device=source.maps[0].h.device
        )
        found._source, found._value, found._viewed = source, None, False
        return found

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Return the shape and the type: the values are not there."""
        return f"Logits({list(self.shape)}, {self.dtype}, computed in chunks)"

    def materialise(self, reader: str) -> Tensor:
        """Return the logits, computed once for the function `reader`."""
        if self._value is None:
            self._source.report.materialised[reader] += 1
            with torch.set_grad_enabled(self.requires_grad):  # whoever asks may be without
                self._value = self._source.materialise() if self._own else _values(self)
        return self._value

    @property
    def _own(self) -> bool:
        """Whether these are no outputs of another function of autograd."""
        return self.grad_fn is None or name_of(self.grad_fn) == "_PromisedBackward"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a function, compute it in chunks, or compute the logits for it."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        name = _property(func) if name == "__get__" else name
        if name in QUERIES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, Logits) and first._value is None and first._own:
            found = first._answer(func, name, args, kwargs)
            if found is not None:
                return found
        elif name in ADDS and len(args) == 2 and isinstance(args[1], Logits):
            found = args[1]._answer(func, name, args[::-1], kwargs)
            if found is not None:
                return found
        return func(*_materialised(args, name), **_materialised(kwargs, name))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute the logits for a kernel that is called on them."""
        name = str(func)
        return func(*_materialised(args, name), **_materialised(kwargs or {}, name))

    def _answer(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Return the result of a function without all logits at once; None where it needs them."""
        written = name.endswith("_") and not name.endswith("__")
        if written or name in WRITES or "out" in kwargs:
            self._refuse_write(name)
            return None
        source = self._source
        if self.requires_grad and not torch.is_grad_enabled():
            source = source.detached()
        if name in LOSSES:
            return _loss(func, name, source, functionals.bind(func, args, kwargs))
        if name in ALONG:
            return _along(func, name, source, args, kwargs)
        if name in POINTWISE or name in ADDS:
            found = _pointwise(func, name, source, args, kwargs)
        elif name in ("__iter__", "unbind"):
            return _rows_one_by_one(self, name, args, kwargs)
        else:
            found = _moved(func, name, source, args, kwargs)
        if found is None:
            return None
        if found is self._source:
            return self
        logits = logits_of(found)
        if name == "detach" or name in MOVES:
            self._viewed = logits._viewed = True
        return logits

    def _refuse_write(self, name: str) -> None:
        """Refuse to write to logits of which there is a view, which would not change.

        Raises:
            LossError: there is one.
        """
        if self._viewed:
            raise LossError(
                "logits that are computed in chunks must not be written to once there is a view "
                f"of them, and {name} does: use the function that returns a new tensor, or leave "
                "out chunked_losses"
            )


QUERIES = frozenset(
    "shape ndim dtype device layout requires_grad is_sparse is_cuda is_quantized is_nested is_meta "
    "is_leaf names itemsize size dim ndimension numel nelement __len__ is_floating_point "
    "is_complex get_device element_size __hash__ __repr__ grad_fn grad _version stride "
    "is_contiguous output_nr".split()
)
"""Questions that need no values."""

WRITES = frozenset(["__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__set__"])

ADDS = frozenset("add __add__ __radd__".split())

SCALES = {"mul": 1, "__mul__": 1, "__rmul__": 1, "div": -1, "true_divide": -1, "__truediv__": -1}

POINTWISE = frozenset(
    "float double half bfloat16 to type mul __mul__ __rmul__ div true_divide __truediv__ sub "
    "__sub__ __rsub__ neg __neg__ tanh sigmoid logsigmoid exp log relu abs square pow __pow__ "
    "clamp clamp_min clamp_max softmax log_softmax detach contiguous clone".split()
)
"""Functions that give each logit another value, by those of its own row."""

SAME = frozenset(["contiguous"])

CASTS = frozenset("float double half bfloat16 to type".split())
"""Functions that return the same tensor where it has the type already."""

ROWS = frozenset(["softmax", "log_softmax"])

LOSSES = frozenset(["cross_entropy", "nll_loss"])

ALONG = frozenset("logsumexp argmax sum mean amax amin gather".split())
"""Functions that reduce the columns of a row."""

MOVES = frozenset(
    "view reshape flatten unflatten __getitem__ narrow select index_select unsqueeze squeeze "
    "transpose swapaxes swapdims permute movedim moveaxis mT t T".split()
)

ARGUMENTS = (Real, str, Tensor, torch.dtype, torch.device, torch.memory_format, type(None))
"""Arguments of a function that is recorded."""

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


def _property(func: Any) -> str:
    return getattr(getattr(func, "__self__", None), "__name__", "")


def _materialised(tree: Any, name: str) -> Any:
    """Return arguments with tensors in the place of logits."""
    return tree_map(lambda one: one.materialise(name) if isinstance(one, Logits) else one, tree)


def _others(args: Any, kwargs: Any) -> list[Tensor]:
    return [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]


def _pointwise(
    func: Any, name: str, source: LogitsSource, args: Any, kwargs: Any
) -> LogitsSource | None:
    """Return the source of logits with other values; None where other rows have a part in them."""
    if name in SAME and not kwargs:
        return source
    if name == "detach":
        return source.detached()
    rest = args[1:]
    if name in ADDS and len(rest) == 1 and isinstance(rest[0], Logits):
        plain = rest[0]._value is None and rest[0]._own and not kwargs
        return _sum(source, rest[0]._source) if plain else None
    if name in ROWS:
        return _row_function(func, source, args, kwargs)
    if (scale := _scale(name, source, rest, kwargs)) is not None:
        return source.times(scale)
    if not _same_for_all_rows(source, _others(rest, kwargs)):
        return None
    if name in CASTS and not _only_types(source, rest, kwargs):
        return None
    rest, kwargs = tree_map(_flat, (rest, kwargs))
    if not all(isinstance(one, ARGUMENTS) for one in tree_leaves((rest, kwargs))):
        return None
    found = source.then(lambda z: func(z, *rest, **kwargs))
    same = name in CASTS and found.dtype == source.dtype_now and not kwargs.get("copy")
    return source if same else found


def _scale(name: str, source: LogitsSource, rest: Any, kwargs: Any) -> float | None:
    """Return the number by which a function multiplies linear maps; None for other functions."""
    linear = not source.steps and source.dtype is None and not kwargs
    if name not in SCALES or not linear or len(rest) != 1 or type(rest[0]) not in (int, float):
        return None
    number = float(rest[0])
    return None if number == 0.0 and SCALES[name] < 0 else number ** SCALES[name]


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
    """Return a copy of a tensor of each column in one dimension, and of one number without any.

    It is a copy, for the tensor may be written to before backward computes with it again.
    """
    if not isinstance(one, Tensor):
        return one
    return one.detach().clone().reshape(() if one.numel() == 1 else -1)


def _only_types(source: LogitsSource, rest: Any, kwargs: Any) -> bool:
    """Say whether a cast stays on the device."""
    device = source.maps[0].h.device
    return all(
        isinstance(one, torch.dtype | bool | torch.memory_format | None)
        or (isinstance(one, torch.device) and one == device)
        for one in tree_leaves((rest, kwargs))
    )


def _sum(a: LogitsSource, b: LogitsSource) -> LogitsSource | None:
    """Return the source of a sum of logits; None where one of them is not a linear map."""
    linear = not (a.steps or b.steps) and a.dtype is b.dtype is None and a.place == b.place
    if not linear or a.shape != b.shape:
        return None
    return replace(a, maps=(*a.maps, *b.maps), versions=(*a.versions, *b.versions))


def _column_place(source: LogitsSource) -> int:
    return source.place if source.place >= 0 else len(source.lead)


def _is_columns(source: LogitsSource, dim: Any) -> bool:
    """Say whether a dimension is that of the columns."""
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    return type(dim) is int and dim % len(source.shape) == _column_place(source)


def _row_function(func: Any, source: LogitsSource, args: Any, kwargs: Any) -> LogitsSource | None:
    """Return the source of softmax and the like along the columns; None along other dimensions."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not _is_columns(source, dim):
        return None
    dtype = kwargs.get("dtype", next((one for one in args if type(one) is torch.dtype), None))
    return source.then(lambda z: func(z, dim=-1, dtype=dtype))


def _moved(
    func: Any, name: str, source: LogitsSource, args: Any, kwargs: Any
) -> LogitsSource | None:
    """Return the source of the same logits in another shape; None where columns move into rows."""
    if name not in MOVES or any(isinstance(one, Logits) for one in _others(args[1:], kwargs)):
        return None
    if name in (
        "transpose",
        "swapaxes",
        "swapdims",
        "permute",
        "movedim",
        "moveaxis",
        "mT",
        "t",
        "T",
    ):
        return _permuted(func, source, args[1:], kwargs)
    if source.place >= 0:
        return None
    if name in ("view", "reshape", "flatten", "unflatten"):
        shape = func(torch.empty(source.shape, device="meta"), *args[1:], **kwargs).shape
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


def _of_rows(name: str, args: Any, kwargs: Any, ndim: int) -> bool:
    """Say whether a function is of a dimension of rows; the columns are the last one of `ndim`."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if type(dim) is not int:
        return False
    return dim % (ndim + 1) < ndim if name == "unsqueeze" else dim % ndim < ndim - 1


def _keeps_columns(index: Any, ndim: int) -> bool:
    """Say whether an index takes all columns, which are the last one of `ndim` dimensions."""
    every = index if isinstance(index, tuple) else (index,)
    if any(isinstance(one, list | bool) for one in every):
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
    """Return the source of logits with their dimensions in another order."""
    ndim = len(source.shape)
    if ndim > len(PRIMES):
        return None
    shape = func(torch.empty(PRIMES[:ndim], device="meta"), *args, **kwargs).shape
    order = [PRIMES.index(size) for size in shape]
    at = _column_place(source)
    place = order.index(at)
    rows = [one - (one > at) for one in order if one != at]
    moved = source.of_rows(lambda h: h.permute(*rows, h.dim() - 1))
    return replace(moved, place=-1 if place == ndim - 1 else place)


def _rows_one_by_one(
    logits: Logits, name: str, args: Any, kwargs: Any
) -> tuple[Any, ...] | Iterator[Any] | None:
    """Return the logits of each entry of the first dimension; None for another dimension."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if dim != 0 or len(logits._source.lead) < 2 or logits._source.place >= 0:
        return None
    found = tuple(logits[place] for place in range(len(logits)))
    return found if name == "unbind" else iter(found)


def _loss(func: Any, name: str, source: LogitsSource, a: dict[str, Any]) -> Tensor | None:
    """Return a loss of logits in chunks; None for a form that is not here."""
    target, weight, lead = a["target"], a["weight"], source.lead
    plain = all(type(one) in PLAIN for one in (target, weight) if one is not None)
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
    elif target.shape != lead:
        return None
    else:
        others = target.reshape(-1)
    weight = None if weight is None else weight.detach().clone()
    more = {"weight": weight, "ignore_index": a["ignore_index"], "reduction": "none"}
    if name == "cross_entropy":
        more["label_smoothing"] = a["label_smoothing"]
    each = source.reduced(lambda z, t: func(z, t, **more), others)
    source.report.chunked[name] += 1
    if a["reduction"] == "none":
        return each.reshape(lead)
    if a["reduction"] == "sum":
        return each.sum()
    count = functionals.TABLE[func].count({**a, "input": torch.empty(source.shape, device="meta")})
    return each.sum() / count


def _along(func: Any, name: str, source: LogitsSource, args: Any, kwargs: Any) -> Tensor | None:
    """Return a function that reduces the columns of each row; None for other dimensions."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not _is_columns(source, dim):
        return None
    if name == "gather":
        index = kwargs.get("index", args[2] if len(args) > 2 else None)
        if type(index) not in PLAIN or source.place >= 0 or index.shape[:-1] != source.lead:
            return None
        rows = index.reshape(-1, index.shape[-1])
        found = source.reduced(lambda z, t: z.gather(-1, t), rows).reshape(index.shape)
    else:
        keeps = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
        dtype = {"dtype": kwargs["dtype"]} if "dtype" in kwargs else {}
        found = source.reduced(partial(func, dim=-1, **dtype)).reshape(source.lead)
        found = (
            found.unsqueeze(dim[0] if isinstance(dim, tuple | list) else dim) if keeps else found
        )
    source.report.chunked[name] += 1
    return found
