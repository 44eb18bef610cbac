"""Where the samples lie in a tensor, after the reshaping that stands between model and loss.

``F.cross_entropy(logits.view(-1, V), tokens.view(-1))`` is a sum over samples;
``F.cross_entropy(z @ z.T, labels)`` is not, though it calls the same functional. The difference is
whether one dimension still holds the samples separately. This module follows that dimension (here:
the *axis*) through the functions that only move or map single samples. For any other function it
returns None, and the loss that uses the result is treated as coupled.

An axis of 0 may have several rows a sample, in the samples' order: ``[n * T, V]``.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

from torch import Tensor

ELEMENTWISE = frozenset(
    "float double half bfloat16 long int bool to type type_as contiguous clone detach sigmoid "
    "logsigmoid tanh exp log log1p relu softplus abs neg square sqrt clamp clamp_min clamp_max "
    "gelu leaky_relu add sub mul div true_divide pow __radd__ __rsub__ __rmul__ "
    "__rtruediv__ eq ne gt lt ge le __eq__ __ne__ logical_not".split()
)
"""Functions of one tensor and numbers that keep every element in its place."""

ALONG = frozenset(["softmax", "log_softmax", "normalize"])
"""Functions that mix the elements along one dimension."""

RESHAPES = frozenset(["view", "reshape", "flatten", "unflatten"])
LIKE = frozenset(["zeros_like", "ones_like", "full_like"])
FILLED = frozenset(["zeros", "ones", "full"])
"""Constants of any shape, the same everywhere."""
CONSTANTS = FILLED | {"tensor", "scalar_tensor"}
QUERIES = frozenset(
    "size dim ndimension numel nelement __len__ is_floating_point is_complex get_device".split()
)
"""Queries of the shape and type of a tensor: their results hold for every sample."""
PROPERTIES = frozenset("shape ndim dtype requires_grad layout".split())


READS = frozenset("__int__ __index__ __invert__".split())
"""Names that begin like those of writes, and write nothing."""
STATEFUL = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like bernoulli multinomial normal "
    "poisson batch_norm instance_norm".split()
)
"""Functions that draw at random, or may move statistics."""


def axis_after(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor, axis: int, size: int
) -> int | None:
    """Return the axis of `result`, or None where samples may be coupled.

    Args:
        name: the function's name, without its module.
        args: its positional arguments; the first is the tensor whose axis is given.
        kwargs: its keyword arguments.
        result: its return value.
        axis: the dimension of ``args[0]`` along which the samples lie.
        size: the number of samples.
    """
    tensor = args[0]
    if name in ELEMENTWISE:
        return axis if _only_numbers(name, args[1:], kwargs) else None
    if name in ALONG:
        return axis if _dim(name, args, kwargs) not in (None, axis, axis - tensor.dim()) else None
    if name in RESHAPES:
        divisible = axis == 0 and result.dim() > 0 and result.shape[0] % size == 0
        return 0 if divisible else None
    if name == "__getitem__":
        return _after_index(args[1], tensor.dim(), axis)
    if name in ("transpose", "swapaxes", "swapdims", "t", "T", "mT", "permute", "movedim"):
        return _after_permutation(name, args, kwargs, axis)
    if name == "unsqueeze":
        dim = _normal(_argument(args, kwargs, 1, "dim"), result.dim())
        return axis + 1 if dim <= axis else axis
    if name == "squeeze":
        dim = _argument(args, kwargs, 1, "dim")
        return _after_squeeze(tensor, dim, axis)
    return None


def _only_numbers(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name in ("to", "type", "type_as"):
        return True
    values = (*args, *kwargs.values())
    return all(value is None or isinstance(value, Real | str) for value in values)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _dim(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    if name == "normalize":
        found = _argument(args, kwargs, 2, "dim")
        return 1 if found is None else int(found)
    found = _argument(args, kwargs, 1, "dim")
    return None if found is None else int(found)


def _normal(dim: int, dims: int) -> int:
    return dim + dims if dim < 0 else dim


def _after_index(index: Any, dims: int, axis: int) -> int | None:
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(part is None or part is Ellipsis or type(part) in (int, slice) for part in parts):
        return None
    spent = sum(1 for part in parts if part is not None and part is not Ellipsis)
    if Ellipsis not in parts:
        parts.append(Ellipsis)
    at = parts.index(Ellipsis)
    parts[at : at + 1] = [slice(None)] * (dims - spent)
    source = target = 0
    for part in parts:
        if part is None:
            target += 1
            continue
        if source == axis:
            return target if part == slice(None) else None
        source += 1
        target += type(part) is slice
    return None


def _after_permutation(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], axis: int
) -> int | None:
    dims = args[0].dim()
    order = list(range(dims))
    if name in ("t", "T"):
        order.reverse()
    elif name == "permute":
        permutation = args[1] if len(args) == 2 and not isinstance(args[1], int) else args[1:]
        order = [_normal(int(dim), dims) for dim in (permutation or kwargs["dims"])]
    elif name == "movedim":
        if not all(isinstance(arg, int) for arg in args[1:]) or len(args) != 3:
            return None
        moved = order.pop(_normal(args[1], dims))
        order.insert(_normal(args[2], dims), moved)
    else:
        pair = (-2, -1) if name == "mT" else (args[1:] or tuple(kwargs.values()))
        if len(pair) != 2:
            return None
        a, b = (_normal(int(dim), dims) for dim in pair)
        order[a], order[b] = order[b], order[a]
    return order.index(axis)


def _after_squeeze(tensor: Tensor, dim: Any, axis: int) -> int | None:
    if dim is None:
        gone = [i for i in range(tensor.dim()) if tensor.shape[i] == 1]
    elif isinstance(dim, int):
        gone = [i for i in [_normal(dim, tensor.dim())] if tensor.shape[i] == 1]
    else:
        return None
    return None if axis in gone else axis - sum(1 for i in gone if i < axis)
