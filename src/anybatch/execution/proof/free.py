"""Tensors in which no sample has a part, and which of them may number the rows.

An `arange(len(x))` that is divided or compared distinguishes the first rows from later ones. Draws
and constants do not, after any computation element by element; nor do tensors without a dimension
as long as there are rows, or several times as long.

    arange(n) // 8    ones(n).cumsum(0) > 8    ones(n, 5).sum(0) > 8      by places, by a count
    rand(n) < 0.1     ones(n, 5).cumsum(1) / 2   full((n,), 3) == 0       neither
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from anybatch.execution.proof.places import FILLS

MAKERS = frozenset(
    "empty zeros ones full rand randn randint normal bernoulli poisson empty_like zeros_like "
    "ones_like full_like rand_like randn_like randint_like new_empty new_zeros new_ones new_full "
    "normal_ uniform_ bernoulli_ random_ exponential_ zero_ fill_".split()
)
"""Functions that make numbers which are drawn, or all alike."""

ELEMENTWISE = frozenset(
    "add sub mul div true_divide floor_divide remainder fmod pow rsub clamp clamp_min clamp_max "
    "where maximum minimum lerp masked_fill eq ne lt le gt ge neg abs exp log log1p log2 sqrt "
    "rsqrt sin cos tan tanh sigmoid relu square round floor ceil sign reciprocal logical_not "
    "logical_and logical_or logical_xor isnan isinf isfinite bitwise_not invert and or xor not "
    "radd rsub rmul rtruediv truediv floordiv rfloordiv mod rpow iadd isub imul itruediv get "
    "getitem select narrow unsqueeze squeeze view view_as reshape flatten unflatten transpose "
    "permute movedim swapaxes contiguous clone detach to float double half bfloat16 long int "
    "bool type type_as requires_grad expand expand_as broadcast_to broadcast_tensors repeat t "
    "mT bitwise_and bitwise_or".split()
)
"""Functions that number nothing themselves, and of which each entry comes of one of an operand."""

SPREADS = frozenset("expand expand_as broadcast_to broadcast_tensors repeat".split())
"""Functions that give one entry to each row."""

ALONG = frozenset(
    "sum mean prod amax amin cumsum cumprod softmax log_softmax norm logsumexp std var any all "
    "argmax argmin flip count_nonzero diff".split()
)
"""Functions that reduce or mix along dimensions."""


class FreeTensors:
    """Record of the tensors in which no sample has a part.

    Args:
        names: names of parameters and buffers, by id.
        rows: how many there are.
    """

    def __init__(self, names: Mapping[int, str], rows: int) -> None:
        self._names, self._rows = names, rows
        self._free: dict[int, weakref.ref[Tensor]] = {}
        self._plain: dict[int, weakref.ref[Tensor]] = {}
        self._filled: dict[int, weakref.ref[Tensor]] = {}

    def takes(self, name: str, arguments: Any) -> bool:
        """Return whether no sample has a part in the result of a function."""
        if name.startswith("new_") or name.endswith("_like"):
            return True
        return all(
            id(one) in self._names or _holds(self._free, one)
            for one in tree_leaves(arguments)
            if isinstance(one, Tensor)
        )

    def numbers(self, arguments: Any) -> bool:
        """Say whether some tensor among arguments may number the rows."""
        return any(
            self._may_number(one) for one in tree_leaves(arguments) if isinstance(one, Tensor)
        )

    def gave(self, name: str, arguments: Any, result: Any, *, free: bool) -> None:
        """Record the results of a function, or the tensor that it writes to.

        Args:
            name: of the function.
            arguments: its arguments.
            result: of it.
            free: no sample has a part in the arguments.
        """
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        if name == "__setitem__":
            made = [arguments[0][0]]
        name = name.split(".", maxsplit=1)[0]
        for one in made:
            filled = free and self._is_filled(name, arguments)
            plain = filled or (free and self._is_plain(name, arguments, one))
            writes = name == "__setitem__" or (name.endswith("_") and name[:2] != "__")
            base = one._base if writes else None
            for other in (one, base) if base is not None else (one,):
                _note(self._free, other, holds=free)
                _note(self._plain, other, holds=plain)
                _note(self._filled, other, holds=filled)

    def forget(self, tensor: Tensor) -> None:
        """Take in that samples have a part in a tensor."""
        _note(self._free, tensor, holds=False)
        _note(self._plain, tensor, holds=False)
        _note(self._filled, tensor, holds=False)

    def _is_filled(self, name: str, arguments: Any) -> bool:
        """Return whether the result of a function holds the same number in every element."""
        if name in FILLS:
            return True
        operands = [one for one in tree_leaves(arguments) if isinstance(one, Tensor)]
        if name == "__getitem__":  # places that lead there tell nothing
            operands = operands[:1]
        bare = name.strip("_")
        alike = bare in ELEMENTWISE or bare in SPREADS
        return alike and bool(operands) and all(_holds(self._filled, one) for one in operands)

    def _is_plain(self, name: str, arguments: Any, made: Tensor) -> bool:
        """Return whether the result of a function does not distinguish rows."""
        if name in MAKERS or not self._has_rows(made):
            return True
        bare = name.strip("_")
        operands = [one for one in tree_leaves(arguments) if isinstance(one, Tensor)]
        if name == "__getitem__" and operands and self._leads_to_rows(*arguments[0]):
            operands = operands[:1]
        if not operands or any(self._may_number(one) for one in operands):
            return False
        if name == "__setitem__":
            return True
        grows = not any(self._has_rows(one) for one in operands)
        if bare in ALONG:
            return not grows and self._keeps_rows(operands[0], arguments)
        return bare in (SPREADS if grows else ELEMENTWISE)

    def _leads_to_rows(self, source: Tensor, index: Any) -> bool:
        """Return whether places that may number rows index rows only: equal rows remain equal."""
        places = index if isinstance(index, tuple) else (index,)
        if any(one is None or one is Ellipsis for one in places):
            return False
        dims = [d for d, one in enumerate(places) if isinstance(one, Tensor)]
        numbering = [d for d in dims if self._may_number(places[d])]
        integers = all(places[d].dtype != torch.bool for d in dims)
        return (
            bool(numbering)
            and integers
            and all(d < source.dim() and source.shape[d] % self._rows == 0 for d in numbering)
        )

    def _may_number(self, tensor: Tensor) -> bool:
        return self._has_rows(tensor) and not _holds(self._plain, tensor)

    def _has_rows(self, tensor: Tensor) -> bool:
        return any(size and size % self._rows == 0 for size in tensor.shape)

    def _keeps_rows(self, x: Tensor, arguments: Any) -> bool:
        """Return whether a function combines values along no dimension of rows."""
        args, kwargs = arguments
        dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
        dims = [dims] if isinstance(dims, int) else dims
        if not isinstance(dims, list | tuple) or not dims:
            return False
        return all(isinstance(d, int) and x.shape[d] % self._rows for d in dims)


def _holds(tensors: Mapping[int, weakref.ref[Tensor]], tensor: Tensor) -> bool:
    return id(tensor) in tensors and tensors[id(tensor)]() is tensor


def _note(tensors: dict[int, weakref.ref[Tensor]], tensor: Tensor, *, holds: bool) -> None:
    if holds:
        tensors[id(tensor)] = weakref.ref(tensor)
    else:
        tensors.pop(id(tensor), None)
