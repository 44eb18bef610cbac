"""A batch is a tree: tensors in tuples, lists, mappings, named tuples and dataclasses.

torch's own pytree is private and keeps no names that a person would recognise. Here every tensor
has a path that reads like the expression that reaches it, such as ``inputs['image'][0]``, and an
error can name it. What is not a tensor is carried along unchanged, and so is a 0-dim tensor:
neither has rows.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from anybatch.errors import BatchError


def tensors(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield ``(path, tensor)`` for every tensor of `tree`, in order."""
    if isinstance(tree, Tensor):
        yield path, tree
        return
    for key, child in _children(tree):
        yield from tensors(child, path + key)


def map_tensors(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return a tree of the same types with ``fn(tensor)`` where each tensor was."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, Mapping):
        return _like_mapping(tree, {key: map_tensors(fn, child) for key, child in tree.items()})
    if _is_named_tuple(tree):
        return type(tree)(*(map_tensors(fn, child) for child in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(fn, child) for child in tree)
    if _is_dataclass(tree):
        return dataclasses.replace(
            tree,
            **{
                field.name: map_tensors(fn, getattr(tree, field.name))
                for field in dataclasses.fields(tree)
                if field.init
            },
        )
    return tree


def batch_size(**trees: Any) -> int:
    """Return the number of rows that all tensors of all `trees` share.

    Raises:
        BatchError: a tensor has another first dimension (each is named), a layout that has no
            rows to slice, a graph behind it, or there is no tensor with rows at all.
    """
    rows: dict[str, int] = {}
    for name, tree in trees.items():
        for path, tensor in tensors(tree, name):
            _check_sliceable(path, tensor)
            if tensor.dim() > 0:
                rows[path] = tensor.shape[0]
    if not rows:
        raise BatchError(
            "a batch must hold at least one tensor with a first dimension to split, and "
            f"{', '.join(trees)} hold none: pass the samples as tensors"
        )
    sizes = set(rows.values())
    if len(sizes) > 1:
        listed = ", ".join(f"{path}: {size}" for path, size in rows.items())
        raise BatchError(
            f"all tensors of a batch must have the same first dimension, and these differ: "
            f"{listed}. Make what belongs to no sample a 0-dim tensor, a number, or part of the "
            "model or the loss"
        )
    size = sizes.pop()
    if size == 0:
        raise BatchError("a batch must hold at least one sample, and this one holds 0")
    return size


def rows(tree: Any, start: int, stop: int) -> Any:
    """Return rows ``start..stop`` of every tensor of `tree`, as views."""
    return map_tensors(lambda t: t[start:stop] if t.dim() > 0 else t, tree)


def join(parts: Sequence[Any]) -> Any:
    """Join the rows of equal trees into one: the inverse of `rows`.

    Raises:
        BatchError: the parts have different structures.
    """
    columns = [[tensor for _, tensor in tensors(part)] for part in parts]
    if len({len(column) for column in columns}) > 1:
        counts = ", ".join(str(len(column)) for column in columns)
        raise BatchError(
            f"every micro-batch must give the same number of output tensors, and they gave {counts}"
        )
    joined = iter(
        [torch.cat(same) if same[0].dim() > 0 else same[0] for same in zip(*columns, strict=True)]
    )
    return map_tensors(lambda _: next(joined), parts[0])


LEAVES = frozenset([int, float, str, bool, bytes, type(None), torch.dtype, torch.device, slice])
"""Types without children, asked for first: the general questions below are slow."""


def _children(tree: Any) -> Iterator[tuple[str, Any]]:
    if type(tree) in LEAVES:
        return
    if isinstance(tree, PackedSequence):
        raise BatchError(
            "the rows of a batch must be samples, and those of a PackedSequence are time steps: "
            "pass the padded tensor and the lengths, and pack them inside the model"
        )
    if isinstance(tree, Mapping):
        yield from ((f"[{key!r}]", child) for key, child in tree.items())
    elif _is_named_tuple(tree):
        yield from ((f".{name}", getattr(tree, name)) for name in tree._fields)
    elif isinstance(tree, tuple | list):
        yield from ((f"[{i}]", child) for i, child in enumerate(tree))
    elif _is_dataclass(tree):
        yield from ((f".{f.name}", getattr(tree, f.name)) for f in dataclasses.fields(tree))


def _check_sliceable(path: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_nested:
        raise BatchError(
            f"a batch must hold dense tensors, and {path} has layout {tensor.layout}"
            f"{' (nested)' if tensor.is_nested else ''}: pad it, or make it dense"
        )
    if tensor.grad_fn is not None:
        raise BatchError(
            f"{path} has a graph behind it, which can be walked only once and would be needed by "
            "every micro-batch: detach() it, or move the part that made it into the model"
        )


def _like_mapping(tree: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(tree) is dict or not hasattr(tree, "__setitem__"):
        return items
    clone: Any = copy.copy(tree)
    for key, value in items.items():
        clone[key] = value
    return clone


def _is_named_tuple(tree: Any) -> bool:
    return isinstance(tree, tuple) and hasattr(tree, "_fields")


def _is_dataclass(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)
