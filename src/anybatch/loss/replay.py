"""How a tensor was made from the tensors of a batch, so that it can be made of other rows too.

A model that computes its own loss shifts, pads and flattens its labels for it. The denominator
depends only on these labels, so the same few functions, called on the labels of the mini-batch,
yield its denominator:

    labels ──pad──[..., 1:]──view(-1)──> target             traced for a micro-batch
    all labels ──pad──[..., 1:]──view(-1)──> all targets     made of the mini-batch

Only functions that map every entry or move it are recorded; a tensor that is written to in place,
and those that share its memory, have no such history any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anybatch.core import tree
from anybatch.core.modules import storage_of
from anybatch.loss import rows

PURE = (
    rows.ELEMENTWISE
    | rows.RESHAPES
    | frozenset(
        "pad __getitem__ squeeze unsqueeze transpose permute narrow masked_fill where clip t T "
        "argmax".split()
    )
)
"""Functions that may be called again: they draw nothing and write nothing."""


@dataclass(frozen=True)
class Recipe:
    """A tensor as a function of the tensors of a batch.

    Attributes:
        function: the function that made it; None for a tensor of the batch itself.
        args: its positional arguments, recipes among them; or the place in the batch.
        kwargs: its keyword arguments.
    """

    function: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def made(self, inputs: list[Tensor]) -> Tensor:
        """Return the tensor, of other rows.

        Args:
            inputs: the tensors of a batch, in order.
        """
        if self.function is None:
            return inputs[int(self.args[0])]
        args = _mapped(self.args, inputs)
        kwargs = {name: _mapped(value, inputs) for name, value in self.kwargs.items()}
        result: Tensor = self.function(*args, **kwargs)
        return result


class Recipes:
    """Recipes for the tensors of one forward.

    Args:
        inputs: the batch: any tree of tensors.
    """

    def __init__(self, inputs: Any) -> None:
        self._made: dict[int, Recipe] = {}
        self._alive: dict[int, Tensor] = {}  # an id is only a name while its tensor lives
        for index, (_, tensor) in enumerate(tree.tensors(inputs)):
            self._note(tensor, Recipe(None, (index,), {}))

    def of(self, tensor: Any) -> Recipe | None:
        """Return the recipe for a tensor; None where it has none."""
        return self._made.get(id(tensor))

    def follow(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Record the recipe for a call's result, or drop those of a tensor that it wrote to.

        Args:
            function: the called function, accepted by `touches`.
            args: its arguments.
            kwargs: its keyword arguments.
            result: its return value.
        """
        if name_of(function) not in PURE:
            self._forget(args[0] if args else None)
        elif isinstance(result, Tensor) and args and id(args[0]) in self._made:
            sources = [*tree.tensors((args, kwargs))]
            if all(id(tensor) in self._made for _, tensor in sources):
                there = tree.map_tensors(lambda t: self._made[id(t)], (args, kwargs))
                self._note(result, Recipe(function, *there))

    def _note(self, tensor: Tensor, recipe: Recipe) -> None:
        self._made[id(tensor)] = recipe
        self._alive[id(tensor)] = tensor

    def _forget(self, written: Any) -> None:
        if not isinstance(written, Tensor):
            return
        if torch._C._functorch.is_functorch_wrapped_tensor(written):
            return  # it has no memory, and what it stands for was made inside of torch.func
        place = storage_of(written)
        for key in [key for key, t in self._alive.items() if storage_of(t) == place]:
            del self._made[key]
            del self._alive[key]


def name_of(function: Any) -> str:
    """Return the name of a function of torch; a property has its own."""
    name = getattr(function, "__name__", "")
    return name if name != "__get__" else str(getattr(function.__self__, "__name__", ""))


def touches(function: Any) -> bool:
    """Say whether a function may make a tensor that can be made again, or write to one."""
    name = name_of(function)
    in_place = name.endswith("_") and not name.endswith("__")
    return name in PURE or in_place or name.startswith(("__set", "__del", "__i"))


def _mapped(value: Any, inputs: list[Tensor]) -> Any:
    """Return arguments with every recipe in them made."""
    if isinstance(value, Recipe):
        return value.made(inputs)
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return type(value)(_mapped(one, inputs) for one in value)
    return value
