"""A batch is a tree: tensors in tuples, lists, mappings, named tuples and dataclasses.

torch's own pytree is private and has no names that a user would recognise. Here every tensor has a
path that reads like the expression that reaches it, such as ``inputs['image'][0]``, and an error
can name it. `batch_size` and `marked` decide once, for the full batch, which parts are cut:

    tensor, numpy array         along its first dimension, the same for all; a 0-dim one is not cut
    list without tensors        one entry a sample, and as many as there are samples
    `by_sample`                 rows of any number for each sample, which an index assigns
    tuple of strings            the same where there are as many: a DataLoader collates text so
    tuple of numbers            not cut; refused where there are as many as samples
    what holds tensors          is structure: list, tuple, mapping, named tuple, dataclass
    number, text, None          not cut

Neither a tensor of N rows that belongs to no sample nor one whose samples lie in another dimension
can be distinguished from one whose rows are samples. A tree that is cut again has its lists marked,
so that a micro-batch of two does not read a pair as two entries.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from anybatch.errors import BatchError


class SampleList(list[Any]):
    """List with one entry a sample, which is cut as the rows are."""


class SampleTuple(tuple[Any, ...]):
    """Tuple with one entry a sample, which is cut as the rows are."""


class BySample(SampleList):
    """List with the rows of each sample, where an index says which sample a row belongs to.

    Detection collates its labels so: all boxes of a batch in one tensor, beside the place of the
    image of each. Samples have any number of rows. `by_sample` makes it, and a loss calls
    `collated`.
    """

    def collated(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the index of these samples, and the rows, sample by sample, on the CPU.

        Returns:
            index: of shape [M] and type int64, from 0, the place of a row's sample among these.
            rows: each field [M, ...], in the order of the index.
        """
        counts = [len(next(iter(entry.values()))) for entry in self]
        index = torch.tensor(np.repeat(np.arange(len(self)), counts))
        names = self[0] if self else ()
        return index, {
            name: torch.tensor(np.concatenate([entry[name] for entry in self])) for name in names
        }

    def bits(self) -> bytes:
        """Return every bit of the rows."""
        fields = (field for entry in self for field in entry.values())
        return b"".join(len(field).to_bytes(8, "big") + field.tobytes() for field in fields)


def by_sample(index: Tensor, samples: int, **fields: Tensor) -> BySample:
    """Return rows that an index assigns to samples as a list with one entry a sample.

    Args:
        index: of shape [M] or [M, 1], the place of the sample of each row, from 0.
        samples: N, samples of the batch; some may have no rows.
        fields: tensors [M, ...]; their rows keep their order within a sample.

    Raises:
        BatchError: a field has another number of rows, none is passed, or a place is no sample.

    Example:
        >>> boxes = by_sample(torch.tensor([0, 0, 2]), 3, box=torch.rand(3, 4))
        >>> [len(entry["box"]) for entry in boxes]
        [2, 0, 1]
    """
    places = index.detach().cpu().reshape(-1).numpy()
    for name, field in fields.items():
        if len(field) != len(places):
            raise BatchError(
                f"rows must have one entry of the index each, and {name} has {len(field)} for "
                f"{len(places)}"
            )
    of_samples = np.isin(places, np.arange(samples))
    if not fields or not of_samples.all():
        wrong = f"holds {places[~of_samples][0]:g}" if fields else "has no field beside it"
        raise BatchError(
            f"the index must assign rows to samples 0 to {samples - 1}, and it {wrong}"
        )
    order = np.argsort(places, kind="stable")
    ends = np.searchsorted(places[order], np.arange(1, samples))
    arrays = {name: field.detach().cpu().numpy()[order] for name, field in fields.items()}
    each = [np.split(rows, ends)[:samples] for rows in arrays.values()]
    return BySample(dict(zip(arrays, rows, strict=True)) for rows in zip(*each, strict=True))


ENTRIES = (SampleList, SampleTuple, BySample)
MAPPINGS, LISTS, ARRAYS = (dict, Mapping), (tuple, list), (Tensor, np.ndarray)
"""Types tested at every micro-batch; ``tuple | list`` would be made anew each time."""


def tensors(tree: Any, path: str = "") -> list[tuple[str, Tensor]]:
    """Return ``(path, tensor)`` for every tensor of `tree`, in order."""
    if isinstance(tree, Tensor):
        return [(path, tree)]
    found: list[tuple[str, Tensor]] = []
    for key, child in children(tree):
        if isinstance(child, Tensor):  # here: a call for each would take longer than all else
            found.append((path + key, child))
        elif type(child) not in LEAVES:
            found += tensors(child, path + key)
    return found


def flat(tree: Any) -> list[Tensor]:
    """Return every tensor of `tree`, in the order of `tensors`, at less cost: without paths."""
    if isinstance(tree, Tensor):
        return [tree]
    type_ = type(tree)
    if type_ in LEAVES:
        return []
    inside = tree
    if isinstance(tree, dict):
        inside = tree.values()
    elif type_ is not tuple and type_ is not list:
        inside = [child for _, child in children(tree)]
    found: list[Tensor] = []
    for child in inside:
        if isinstance(child, Tensor):
            found.append(child)
        elif type(child) not in LEAVES:
            found += flat(child)
    return found


def leaves(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return ``(path, leaf)`` for all in `tree`; a list of entries or strings is one leaf."""
    if isinstance(tree, Tensor) or _is_leaf(tree):
        return [(path, tree)]
    found: list[tuple[str, Any]] = []
    for key, child in children(tree):
        if isinstance(child, Tensor) or type(child) in LEAVES:
            found.append((path + key, child))
        else:
            found += leaves(child, path + key)
    return found


def map_tensors(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return a tree of the same types with ``fn(tensor)`` where each tensor was."""
    if isinstance(tree, Tensor):
        return fn(tree)
    type_ = type(tree)
    if type_ in LEAVES:
        return tree
    if type_ is tuple or type_ is list:
        return type_([map_tensors(fn, child) for child in tree])
    if isinstance(tree, dict):
        return _like_mapping(tree, {key: map_tensors(fn, child) for key, child in tree.items()})
    return map_leaves(lambda leaf: fn(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree of the same types with ``fn(leaf)`` for each leaf, in the order of `leaves`."""
    if isinstance(tree, Tensor) or _is_leaf(tree):
        return fn(tree)
    if isinstance(tree, MAPPINGS):
        return _like_mapping(tree, {key: map_leaves(fn, child) for key, child in tree.items()})
    if _is_named_tuple(tree):
        return type(tree)(*(map_leaves(fn, child) for child in tree))
    if isinstance(tree, LISTS):
        return type(tree)(map_leaves(fn, child) for child in tree)
    fields = {name: map_leaves(fn, getattr(tree, name)) for name in _fields(tree)}
    return dataclasses.replace(tree, **fields)


def in_rows(a: Tensor, b: Tensor, least: int) -> bool:
    """Say whether two tensors share their rows, and `batch_size` refuses neither."""
    if not (a.ndim and b.ndim and a.layout == b.layout == torch.strided):
        return False
    free = a.grad_fn is b.grad_fn is None and not (a.is_nested or b.is_nested)
    return free and a.shape[0] == b.shape[0] >= least


def batch_size(*, least: int = 1, **trees: Any) -> int:
    """Return the number of rows that all tensors and arrays of all `trees` share, 0 if `least` is.

    Raises:
        BatchError: a tensor has another first dimension (each is named), a layout that has no
            rows to slice, a graph behind it, or there is no tensor with rows at all.
    """
    rows: dict[str, int] = {}
    for name, tree in trees.items():
        for path, leaf in leaves(tree, name):
            if isinstance(leaf, Tensor):
                _check_sliceable(path, leaf)
            if isinstance(leaf, ARRAYS) and leaf.ndim > 0:
                rows[path] = leaf.shape[0]
    if not rows:
        for name, tree in trees.items():
            for path, leaf in leaves(tree, name):
                _refuse_object(leaf, path)
        raise BatchError(
            "a batch must hold at least one tensor with a first dimension to split, and "
            f"{', '.join(trees)} hold none: pass the samples as tensors"
        )
    sizes = set(rows.values())
    if len(sizes) > 1:
        listed = ", ".join(f"{path}: {size}" for path, size in rows.items())
        raise BatchError(
            "all tensors of a batch must have the same first dimension, and these differ: "
            f"{listed}. Make values that belong to no sample a 0-dim tensor, a number, or part of "
            "the model or the loss; pad and stack tensors of one sample each: torch.stack(...)"
        )
    size = sizes.pop()
    if size < least:
        raise BatchError("a batch must hold at least one sample, and this one holds 0")
    return size


def marked(tree: Any, size: int, path: str, *, arguments: bool = False) -> Any:
    """Return a tree with its lists and tuples of one entry a sample marked; itself without any.

    Args:
        tree: of a batch whose tensors have `size` rows.
        size: N, its samples.
        path: of `tree`, for errors.
        arguments: a list or tuple is those of the model. Default False.

    Raises:
        BatchError: a list has another number of entries; entries or an object hold tensors that
            cannot be cut; or entries cannot be distinguished from structure.
    """
    type_ = type(tree)
    if type_ is BySample and len(tree) != size:
        raise BatchError(
            f"rows by sample must know all samples, and {path} has entries for {len(tree)} of "
            f"{size}: pass by_sample(index, {size}, ...)"
        )
    if type_ in LEAVES or type_ is torch.Size or isinstance(tree, ARRAYS):
        return tree
    if isinstance(tree, LISTS) and not _is_named_tuple(tree):
        if _are_samples(tree, size, path, arguments=arguments):
            return (SampleTuple if isinstance(tree, tuple) else SampleList)(tree)
    elif not (isinstance(tree, MAPPINGS) or _is_named_tuple(tree) or _is_dataclass(tree)):
        _refuse_object(tree, path)
        return tree
    found = {key: marked(x, size, path + key) for key, x in children(tree)}
    if all(found[key] is child for key, child in children(tree)):
        return tree
    return _with_children(tree, list(found.values()))


def _are_samples(tree: Any, size: int, path: str, *, arguments: bool) -> bool:
    """Say whether a list or tuple has one entry a sample; False where it is structure.

    Raises:
        BatchError: neither is certain.
    """
    if not tree:
        return size == 0 and isinstance(tree, list) and not arguments
    inside, text = [leaf for _, leaf in leaves(list(tree))], _strings(tree) > 0
    if not text and any(isinstance(x, ARRAYS) and x.ndim for x in inside):
        return False
    if arguments and not text:
        return False
    as_many, is_list = len(tree) == size, not isinstance(tree, tuple)
    many = f"{path} has {len(tree)} entries, as many as there are samples"
    if as_many and size > 1 and any(isinstance(leaf, Tensor) for leaf in inside):
        raise BatchError(
            f"tensors of one sample each must be one tensor [N, ...], and {many}: write "
            "torch.stack(...), or a mapping where they belong to no sample"
        )
    nested = all(isinstance(x, list) or _strings(x) for x in tree)
    if nested and all(len(x) == size for x in tree):
        if as_many and size > 1:
            raise BatchError(
                f"it must be certain which list has one entry a sample, and {many}, and so has "
                "each of them: write it as a mapping, with a name for each entry"
            )
        return False
    if is_list and not as_many and not any(isinstance(leaf, Tensor) for leaf in inside):
        raise BatchError(
            f"a list must have one entry a sample, and {path} has {len(tree)} for {size} samples: "
            "write tuple(...) where it belongs to no sample"
        )
    if is_list or text:
        return as_many
    if as_many and size > 1 and all(leaf is None or isinstance(leaf, Number) for leaf in inside):
        raise BatchError(
            f"it must be certain what a tuple of numbers belongs to, and {many}: write list(...) "
            "where each belongs to a sample, or torch.Size(...) or a mapping where none does"
        )
    return as_many and all(isinstance(x, dict | bytes | str) for x in tree)


ROWLESS = (*LISTS, *ARRAYS, str, bytes, bytearray, Number, np.generic, set, frozenset)
"""Types that have been tested, or that have no rows though they can be iterated."""


def _refuse_object(leaf: Any, path: str) -> None:
    """Refuse an object with rows of its own, which would be passed on undivided.

    Raises:
        BatchError: it names the type.
    """
    if isinstance(leaf, ROWLESS) or callable(leaf):
        return
    slots = (getattr(leaf, name, None) for name in getattr(type(leaf), "__slots__", ()))
    held = [*getattr(leaf, "__dict__", {}).values(), *slots]
    if hasattr(leaf, "__iter__") or hasattr(leaf, "__getitem__") or flat(held):
        raise BatchError(
            "a batch must be made of tensors in tuples, lists, mappings, named tuples and "
            f"dataclasses, and {path} is of {type(leaf).__module__}.{type(leaf).__qualname__}, "
            f"whose rows cannot be cut: pass its tensors, {{'x': {path}.x, ...}}, and make it of "
            "them inside the model"
        )


def _with_children(tree: Any, items: list[Any]) -> Any:
    """Return a tree of the same type with other children."""
    if isinstance(tree, MAPPINGS):
        return _like_mapping(tree, dict(zip(tree, items, strict=True)))
    if _is_named_tuple(tree):
        return type(tree)(*items)
    if isinstance(tree, LISTS):
        return type(tree)(items)
    return dataclasses.replace(tree, **dict(zip(_fields(tree), items, strict=True)))


def rows(tree: Any, start: int, stop: int, size: int | None = None) -> Any:
    """Return rows ``start..stop`` of everything in `tree` that has rows, tensors as views.

    Args:
        tree: tensors and arrays with rows first; lists and tuples that are `marked`, or of strings.
        start: the first row.
        stop: the row after the last.
        size: N, the rows of `tree`: a list of exactly N strings is sliced too, others are carried
            along. None (default) takes it from the tensors, where they agree.
    """
    if isinstance(tree, Tensor):
        return tree[start:stop] if tree.ndim > 0 else tree
    count = _rows_of(leaf for _, leaf in leaves(tree)) if size is None else size
    type_ = type(tree)
    if type_ is dict and count is not None:
        return {key: rows(child, start, stop, count) for key, child in tree.items()}
    if (type_ is tuple or type_ is list) and count is not None and not _strings(tree):
        return type_([rows(child, start, stop, count) for child in tree])

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, ARRAYS):
            return leaf[start:stop] if leaf.ndim > 0 else leaf
        return type(leaf)(leaf[start:stop]) if _entries(leaf) == count else leaf

    return map_leaves(cut, tree)


def join(
    parts: Sequence[Any],
    dims: Sequence[int | None] | None = None,
    *,
    sizes: Sequence[int] | None = None,
    name: str = "outputs",
) -> Any:
    """Join the rows of equal trees into one: the inverse of `rows`.

    Args:
        parts: the trees of the micro-batches.
        dims: for each tensor, in the order of `tensors`, the dimension that holds the samples;
            None for a constant. Default: the first, and none where there is none.
        sizes: samples of each part: lists of so many entries or strings are joined. None (default)
            takes them from the tensors, where they agree.
        name: name of the trees in errors.

    Returns:
        The joined tree; a constant is that of the last part.

    Raises:
        BatchError: the parts have different structures, or a constant is not the same in all.
    """
    columns = [list(leaves(part, name)) for part in parts]
    _check_structure(columns, name)
    dim_of = None if dims is None else iter(dims)
    counts = [_rows_of(leaf for _, leaf in column) for column in columns]
    joined = []
    for same in zip(*columns, strict=True):
        column = [leaf for _, leaf in same]
        dim: int | None = 0 if getattr(column[0], "ndim", 0) > 0 else None
        if dim_of is not None and isinstance(column[0], Tensor):
            dim = next(dim_of)
        joined.append(_join_leaf(same[0][0], column, dim, sizes or counts))
    answer = iter(joined)
    return map_leaves(lambda _: next(answer), parts[-1])


def _check_structure(columns: list[list[tuple[str, Any]]], name: str) -> None:
    counts = [sum(isinstance(leaf, Tensor) for _, leaf in column) for column in columns]
    if len(set(counts)) > 1:
        listed = ", ".join(map(str, counts))
        raise BatchError(
            f"every micro-batch must give the same number of output tensors, and they gave {listed}"
        )
    paths = [[path for path, _ in column] for column in columns]
    if any(other != paths[0] for other in paths):
        raise BatchError(
            f"every micro-batch must give {name} of the same structure, and they differ: return "
            "the same keys and numbers of items"
        )


def _join_leaf(path: str, column: list[Any], dim: int | None, sizes: Sequence[int | None]) -> Any:
    if dim is not None and all(isinstance(leaf, ARRAYS) for leaf in column):
        shapes = [tuple(leaf.shape) for leaf in column]
        if len({shape[:dim] + shape[dim + 1 :] for shape in shapes}) > 1:
            raise BatchError(
                f"micro-batches must agree in all dimensions but that of the samples, and {path} "
                f"has shapes {', '.join(map(str, shapes))}: pad to a fixed length, that of the "
                "full batch, not of the longest row of a micro-batch (pad_packed_sequence(..., "
                "total_length=x.shape[1]))"
            )
        return (torch.cat if isinstance(column[0], Tensor) else np.concatenate)(column, dim)
    if [_entries(leaf) for leaf in column] == list(sizes):
        return type(column[0])(text for leaf in column for text in leaf)
    for leaf in column:
        check_constant(path, column[-1], leaf)
    return column[-1]


def check_constant(path: str, one: Any, other: Any) -> None:
    """Refuse a leaf without rows that is not the same in two micro-batches.

    Raises:
        BatchError: it names the path and both values.
    """
    if not _same(one, other):
        first, second = _short(other), _short(one)
        differ = f"is {first} in one micro-batch and {second} in another"
        if first == second:
            differ = f"has other values in one micro-batch than in another ({first} in both)"
        loss = isinstance(one, Tensor) and one.is_floating_point() and path.startswith("outputs")
        raise BatchError(
            f"values without rows must be the same in every micro-batch, and {path} {differ}: it "
            "depends on the samples, so return one value a sample, in a tensor of shape [n]"
            + (OF_MODEL if loss and not one.dim() else "")
        )


OF_MODEL = (
    "; or, if it is the loss, return only it, or return it first, or by the name loss, and give "
    "no loss_fn: Engine(model)"
)


LEAVES = frozenset(
    [int, float, str, bool, bytes, type(None), torch.dtype, torch.device, slice, *ENTRIES]
)
"""Types without children, tested first: the general tests below are slow."""


def children(tree: Any) -> list[tuple[str, Any]]:
    """Return ``(key, child)`` of one level of a tree; nothing for a leaf."""
    type_ = type(tree)
    if type_ in LEAVES:
        return []
    if type_ is tuple or type_ is list:
        return [(f"[{i}]", child) for i, child in enumerate(tree)]
    if isinstance(tree, PackedSequence):
        raise BatchError(
            "the rows of a batch must be samples, and those of a PackedSequence are time steps: "
            "pass the padded tensor and the lengths, and pack them inside the model"
        )
    if isinstance(tree, MAPPINGS):  # to ask for the first alone is faster
        return [(f"[{key!r}]", child) for key, child in tree.items()]
    if _is_named_tuple(tree):
        return [(f".{name}", getattr(tree, name)) for name in tree._fields]
    if isinstance(tree, LISTS):
        return [(f"[{i}]", child) for i, child in enumerate(tree)]
    if _is_dataclass(tree):
        return [(f".{name}", getattr(tree, name)) for name in _fields(tree)]
    return []


def _is_leaf(tree: Any) -> bool:
    if type(tree) in LEAVES or isinstance(tree, ARRAYS):
        return True
    if isinstance(tree, LISTS):
        return _strings(tree) > 0
    return not (isinstance(tree, MAPPINGS) or _is_dataclass(tree))


def _entries(leaf: Any) -> int:
    """Return how many samples a list or tuple has entries for; -1 for anything else."""
    return len(leaf) if type(leaf) in ENTRIES else _strings(leaf) or -1


def _strings(leaf: Any) -> int:
    """Return how many strings a list or tuple of nothing else holds; 0 for anything else."""
    if not isinstance(leaf, LISTS) or _is_named_tuple(leaf):
        return 0
    return len(leaf) if all(isinstance(item, str) for item in leaf) else 0


def _rows_of(leaves: Iterable[Any]) -> int | None:
    shaped = (leaf for leaf in leaves if isinstance(leaf, ARRAYS))
    sizes = {int(leaf.shape[0]) for leaf in shaped if leaf.ndim > 0}
    return sizes.pop() if len(sizes) == 1 else None


def _same(a: Any, b: Any) -> bool:
    """Compare two leaves; NaN equals NaN, and incomparable values are compared by identity."""
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype or a.layout != torch.strided:
            return False
        return bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    try:
        return bool(a == b) or bool(a != a and b != b)
    except Exception:  # a type whose == gives no truth value
        return False


def _short(leaf: Any) -> str:
    value = leaf.item() if isinstance(leaf, Tensor) and leaf.ndim == 0 else leaf
    text = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_sliceable(path: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_nested:
        raise BatchError(
            f"a batch must hold dense tensors, and {path} has layout {tensor.layout}"
            f"{' (nested)' if tensor.is_nested else ''}: pad it, or make it dense"
        )
    if tensor.grad_fn is not None:
        raise BatchError(
            f"{path} has an autograd graph, which can run backward only once and would be needed "
            "by every micro-batch: detach() it, or move its computation into the model"
        )


def _like_mapping(tree: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return `items` as the type of `tree` if a copy of that surely shares nothing, else a dict.

    A user's mapping may store its items in an inner one, which a copy would share.
    """
    if type(tree) is dict or not isinstance(tree, dict | UserDict):
        return items
    clone = copy.copy(tree)
    for key, value in items.items():
        clone[key] = value
    return clone


def _is_named_tuple(tree: Any) -> bool:
    return isinstance(tree, tuple) and hasattr(tree, "_fields")


def _is_dataclass(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def _fields(tree: Any) -> list[str]:
    """Return the fields a dataclass is made from; those it makes itself are not children."""
    return [field.name for field in dataclasses.fields(tree) if field.init]
