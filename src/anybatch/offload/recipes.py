"""Recipe to recompute a saved tensor from other saved tensors, read from autograd's graph.

The conv after a BatchNorm and a ReLU saves the ReLU's result, which is as large as the saved tensor
of BatchNorm, and cheap to compute from it. ``torch.utils.checkpoint`` could drop it, if the model
were written for that. Here the graph behind a saved tensor shows its computation:

    saved tensor ── ReluBackward0 ── NativeBatchNormBackward0 ── its saved input, weight
                                                               └─ bias, a leaf

A recipe is read in the step in which it is used, so its constants and operands are those of this
step. Operands are tensors that nodes of the graph have saved through the same hooks, which notice
writes to them; leaves; and results of rules on these. With any other operand, there is no recipe.

Source: Chen et al. 2016, "Training deep nets with sublinear memory cost", section 3.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from anybatch.core.graph import name_of
from anybatch.memory.stores import empty
from anybatch.offload.rules import ONLY_IN_TRAINING, RULES, Rule
from anybatch.offload.saved import Handle, Saved, Stays, written
from anybatch.offload.weights import LEAF, MOVES

DEPTH = 8
"""Operations that a recipe may have one after another."""

SLACK = 4 << 10
"""Bytes that any operation may allocate in addition to its result."""

Bring = Callable[[Saved], Any]
"""Returns a storage, in memory."""


class Operand:
    """A tensor that a node has saved."""

    __slots__ = ("_handle", "held")

    def __init__(self, handle: Handle | Stays) -> None:
        self._handle = weakref.ref(handle)
        self.held: Handle | Stays | None = None

    def good(self) -> bool:
        """Say whether it is still saved, and as it was."""
        handle = self.handle()
        return handle is not None and handle.current()

    def handle(self) -> Handle | Stays | None:
        """Return the handle that replaces the tensor in the node; None when the node is gone."""
        return self._handle() if self.held is None else self.held

    def tensor(self, bring: Bring) -> Tensor:
        """Return it, if nothing has written to it since."""
        handle = self.handle()
        assert handle is not None
        if isinstance(handle, Stays):
            return handle.unpack()
        handle.check()
        return handle.tensor(bring(handle.saved))


class Leaf:
    """A parameter: it is there anyway."""

    __slots__ = ("_leaf", "_version")

    def __init__(self, leaf: Tensor) -> None:
        self._leaf, self._version = leaf, leaf._version

    def good(self) -> bool:
        """Say whether it is as it was."""
        return self._leaf._version == self._version

    def tensor(self, _bring: Bring) -> Tensor:
        """Return it, if nothing has written to it since."""
        if not self.good():
            raise written(self._leaf.dtype, self._leaf.shape, self._leaf._version, self._version)
        return self._leaf.detach()


class Number:
    """Scalar tensor by which a tensor was multiplied, saved without a hook."""

    __slots__ = ("_number",)

    def __init__(self, tensor: Tensor) -> None:
        self._number = tensor

    def good(self) -> bool:
        """Say that it is as it was."""
        return True

    def tensor(self, _bring: Bring) -> Any:
        """Return it."""
        return self._number


@dataclass(frozen=True)
class Operation:
    """An operation to be done again.

    Attributes:
        rule: how.
        operands: its operands.
        constants: its constants.
        shape: of the result.
        dtype: of the result.
    """

    rule: Rule
    operands: tuple[Value, ...]
    constants: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def most(self) -> int:
        """Return bytes that it makes, at most."""
        size = prod(self.shape) * self.dtype.itemsize
        return SLACK + int((self.rule.workspace + (not self.writes)) * size)

    @property
    def writes(self) -> bool:
        """Return whether it writes over its first operand, which was made only for it."""
        first = self.operands[0]
        if self.rule.over is None or not isinstance(first, Operation) or first.rule.view:
            return False
        return first.shape == self.shape and first.dtype == self.dtype

    def tensor(self, bring: Bring) -> Tensor:
        """Do it."""
        values = [None if one is None else one.tensor(bring) for one in self.operands]
        if self.rule.operands is None:
            return self.rule.run(values, *self.constants)
        run = self.rule.over if self.writes else self.rule.run
        assert run is not None
        return run(*values, *self.constants)


Value = Operand | Leaf | Number | Operation | None


class RecomputeRecipe:
    """How to have a storage again.

    Args:
        operation: the last one of the recipe.
        tensor: fills the storage.
    """

    __slots__ = ("_operation", "_shape", "_size", "_stride")

    def __init__(self, operation: Operation, tensor: Tensor) -> None:
        self._operation = operation
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._size = tensor.untyped_storage().nbytes()

    def hold(self) -> None:
        """Have it all live as long as this does."""
        for operand in self._operands():
            operand.held = operand.handle()

    def good(self) -> bool:
        """Say whether all that it starts from is there, and as it was."""
        starts = (one for one in _all(self._operation) if isinstance(one, Operand | Leaf | Number))
        return all(one.good() for one in starts)

    def sources(self) -> list[Saved]:
        """Return the storages that it starts from, without those that are never offloaded."""
        handles = (operand.handle() for operand in self._operands())
        found = {h.saved.number: h.saved for h in handles if isinstance(h, Handle)}
        return list(found.values())

    def most(self) -> int:
        """Return an upper bound of the bytes that it needs in addition to its sources."""
        made = sum(one.most for one in _all(self._operation) if isinstance(one, Operation))
        return made + self._size * self._operation.rule.view

    def storage(self, bring: Bring) -> Any:
        """Follow it, and return a storage of its own."""
        with torch.no_grad(), torch._C._DisableAutocast():
            found = self._operation.tensor(bring)
            fits = found.stride() == self._stride and found.untyped_storage().nbytes() == self._size
            if fits and not self._operation.rule.view:
                return found.untyped_storage()
            storage = empty(self._size, found.device)
            place = torch.empty(0, dtype=found.dtype, device=found.device)
            place.set_(storage, 0, self._shape, self._stride).copy_(found)
            return storage

    def _operands(self) -> Iterator[Operand]:
        return (one for one in _all(self._operation) if isinstance(one, Operand))


def _all(value: Value) -> Iterator[Value]:
    yield value
    if isinstance(value, Operation):
        for operand in value.operands:
            yield from _all(operand)


def read(tensor: Tensor, mine: Callable[[Saved], bool]) -> RecomputeRecipe | None:
    """Return the recipe of a tensor that is being saved; None where no cheap one is found.

    Args:
        tensor: as autograd saves it.
        mine: says whether a storage is one of this step.
    """
    dense = 1 + sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
    full = tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()
    if tensor.grad_fn is None or not full or dense != tensor.numel():
        return None
    operation = _Reader(mine).made_by(tensor.grad_fn, tensor.output_nr, DEPTH)
    return None if operation is None else RecomputeRecipe(operation, tensor)


class _Reader:
    """Reads a graph."""

    def __init__(self, mine: Callable[[Saved], bool]) -> None:
        self._mine = mine

    def made_by(self, node: Any, nr: int, depth: int) -> Operation | None:
        """Return the operation that a node stands for; None where it is not cheap."""
        name = name_of(node)
        rule = RULES.get(name)
        if rule is None or depth == 0 or (nr and name != "SplitBackward0"):
            return None
        if name in ONLY_IN_TRAINING and not node._saved_training:
            return None
        operands = self._operands(node, rule, depth)
        if operands is None:
            return None
        made = node._input_metadata[nr]
        shape, dtype = tuple(made.shape), made.dtype
        names = [f"_saved_{one}" for one in rule.constants]
        if not all(hasattr(node, name) for name in names):  # this torch saves others
            return None
        constants = [_signed(getattr(node, name)) for name in names]
        constants += [shape, dtype] if rule.shaped else []
        constants += [nr] if name == "SplitBackward0" else []
        return Operation(rule, operands, tuple(constants), shape, dtype)

    def _operands(self, node: Any, rule: Rule, depth: int) -> tuple[Value, ...] | None:
        edges = node.next_functions
        names = ("",) * len(edges) if rule.operands is None else rule.operands
        found: list[Value] = []
        for k, name in enumerate(names):
            edge, nr = edges[k] if k < len(edges) else (None, 0)
            saved = _substitute(node, name.rstrip("?")) if name else None
            value: Value
            value = self._operand(saved) if saved is not None else self._value(edge, nr, depth)
            absent = name.endswith("?") and saved is None and edge is None
            if value is None and not absent:
                return None
            found.append(value)
        return tuple(found)

    def _value(self, node: Any, nr: int, depth: int) -> Value:
        """Return the value that passes along an edge of the graph."""
        if node is None:
            return None
        if name_of(node) == LEAF:
            return Leaf(node.variable) if type(node.variable) in MOVES else None
        saved = None if nr else _substitute(node, "result")
        return self.made_by(node, nr, depth - 1) if saved is None else self._operand(saved)

    def _operand(self, saved: Any) -> Operand | Number | None:
        """Return a tensor that a node has saved by the hooks of this step, or a number."""
        if isinstance(saved, Number):
            return saved
        if isinstance(saved, Stays):
            return Operand(saved) if saved.current() and type(saved.tensor) in MOVES else None
        if isinstance(saved, Handle) and saved.current() and self._mine(saved.saved):
            return Operand(saved)
        return None


def _substitute(node: Any, name: str) -> Any:
    """Return the hook's substitute for a tensor that a node has saved; None if it saved none."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    saved = None if raw is None else getattr(raw, "data", None)
    if isinstance(saved, Tensor) and getattr(raw, "unpack_hook", 0) is None and not saved.dim():
        return Number(saved)
    return saved


def _signed(constant: Any) -> Any:
    """Return a constant with its sign: some nodes store negative dimensions as unsigned."""
    if isinstance(constant, int) and constant >= 1 << 63:
        return constant - (1 << 64)
    if isinstance(constant, tuple):
        return tuple(map(_signed, constant))
    return constant
