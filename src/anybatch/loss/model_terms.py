"""Terms of a loss inside a model: numerator, denominator, their sum, and their labels.

F.cross_entropy(a, t)       TracedTerm     sum of the rows, and its denominator
1 in 1 - cosine.mean()      Constant       the same in all parts of the batch
anybatch.coupled(fn)(z)     TermOfAll      a value that all parts share
nll.sum() / len(x)          SumBySamples   a sum that is divided by the samples
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from anybatch.core import pytree
from anybatch.core.accelerator import of, wide
from anybatch.core.batch import MicroBatch
from anybatch.core.modules import storage_of
from anybatch.errors import LossError
from anybatch.loss import functionals
from anybatch.loss.logits import Logits
from anybatch.loss.terms import Bound, Term, name_of
from anybatch.memory.fakes import is_fake

ALIKE = frozenset(["ignore_index"])
"""Options that may depend on the length of the samples."""


@dataclass(frozen=True)
class TracedTerm(Term):
    """Listed functional that a model called, with its `numerator` and its denominator.

    Attributes:
        count: the denominator of these rows; 1 for a sum.
        recipes: for the arguments with rows, their computation from the batch, where it was traced.
        shapes: shapes of the arguments with rows, the rows first.
        dtypes: of these arguments: integers are classes, others probabilities.
        factors: numbers that the model made, and the numerator was multiplied by; of no sample.
        bytes: of the first of them: the logits.
        bounds: operations on the denominator of the full batch: ("least", 1), ("plus", 1e-8).
    """

    count: functionals.Count
    recipes: dict[str, Recipe | None]
    shapes: dict[str, torch.Size]
    dtypes: dict[str, torch.dtype]
    bytes: int
    factors: tuple[Tensor, ...] = field(default=(), kw_only=True)
    bounds: tuple[Bound, ...] = field(default=(), kw_only=True)

    @property
    def form(self) -> tuple[Any, ...]:
        """Name, options, factors and bounds, which must be the same in every micro-batch."""
        options = {k: v for k, v in self.options().items() if k not in ALIKE}
        ordered = tuple(sorted(options.items(), key=lambda pair: pair[0]))
        return self.name, ordered, len(self.factors), self.bounds


@dataclass(frozen=True)
class TermOfAll(TracedTerm):
    """A value that all parts of the batch share: its mean over samples is the value."""

    @property
    def name(self) -> str:
        """The name of the coupled function."""
        names = (getattr(self.function, name, None) for name in ("co_name", "__name__"))
        return f"coupled {next(filter(None, names), type(self.function).__name__)}"

    @property
    def divides(self) -> bool:
        """Always: by the samples."""
        return True

    def options(self) -> dict[str, Any]:
        """It has none."""
        return {}


@dataclass(frozen=True)
class Constant(TermOfAll):
    """A number that the model adds to its loss: 1 in ``1 - cosine.mean()``, or one it has made."""

    @property
    def name(self) -> str:
        """It is the same in all parts of the batch."""
        return "a constant"


@dataclass(frozen=True)
class SumBySamples(TracedTerm):
    """A sum that the model divides by the number of samples it is called with."""

    @property
    def divides(self) -> bool:
        """Always: by the samples."""
        return True


# Sum of the denominators of a step's micro-batches, compared with that of the full batch.
#
# A denominator is counted before the first backward, as if every micro-batch had the shapes of the
# first one. A model that cuts its rows to the longest of a micro-batch has other ones:
#
#     labels of the full batch, cut as the first micro-batch was     20
#     what the micro-batches were divided by                          9 + 14

Count = float | int | Tensor

ROUNDING = 1e-4
"""Relative difference of counts that are no integers, such as sums of class weights."""


class Tally:
    """The denominators of one step.

    Args:
        size: samples of the batch.
        denominators: of each term of the loss over the full batch; None where it cannot be counted.
        waits: whether a device may be waited for.

    Attributes:
        done: all samples have come, and were compared.
    """

    def __init__(self, size: int, denominators: Sequence[Count | None], *, waits: bool) -> None:
        self._size, self._denominators, self._waits = size, denominators, waits
        self._parts: dict[int, tuple[int, Sequence[Count]]] = {}
        self.done = False

    def add(self, micro: MicroBatch, counts: Sequence[Count], names: Sequence[str]) -> None:
        """Add the denominators of a micro-batch; pieces of one that is run again replace it."""
        end = micro.begin + micro.size
        others = [
            (at, n) for at, (n, _) in self._parts.items() if at < end and at + n > micro.begin
        ]
        for at, _ in others:
            del self._parts[at]
        self._parts[micro.begin] = micro.size, counts
        if sum(n for n, _ in self._parts.values()) != self._size:
            return
        every = [counts for _, counts in self._parts.values()]
        sums = [sum(each[1:], each[0]) for each in zip(*every, strict=True)]
        for denominator, found, name in zip(self._denominators, sums, names, strict=True):
            if denominator is None or not (self._here(denominator) and self._here(found)):
                continue
            if not same(float(found), float(denominator), *map(rounding, (found, denominator))):
                raise LossError(
                    "a loss inside the model must be divided by a sum over all samples, and "
                    f"{name} is divided by {float(found):g} in the micro-batches and by "
                    f"{float(denominator):g} in the full batch: the model cuts its rows to the "
                    "longest of a micro-batch, or chooses among them. Use one length "
                    "(total_length=) and mask rows that do not count, or give micro_batch >= the "
                    "batch size"
                )
        self.done = True

    def _here(self, count: Count) -> bool:
        if not isinstance(count, Tensor):
            return True
        return not is_fake(count) and (self._waits or of(count.device).host)


def same(a: float, b: float, *rounding: float) -> bool:
    """Return whether two counts agree: integers exactly, others up to rounding.

    Args:
        a: a count.
        b: another.
        rounding: by which they may differ all the same, relative to themselves. Default: none.
    """
    if math.isnan(a) or math.isnan(b):
        return True
    integers = a.is_integer() and b.is_integer()
    return math.isclose(a, b, rel_tol=max((0.0 if integers else ROUNDING), *rounding, 0.0))


def rounding(count: Count) -> float:
    """Return the relative error of a sum in half precision; 0 for all other counts."""
    half = isinstance(count, Tensor) and count.dtype in (torch.bfloat16, torch.float16)
    return 4 * torch.finfo(count.dtype).eps if half and isinstance(count, Tensor) else 0.0


def agree(some: Sequence[float], others: Sequence[float]) -> bool:
    """Say whether numbers that were made twice are the same but for rounding; NaN is any."""
    pairs = list(zip(some, others, strict=False))
    close = (math.isclose(a, b, rel_tol=1e-6) or math.isnan(a) or math.isnan(b) for a, b in pairs)
    return len(some) == len(others) and all(close)


# How a tensor was made from the tensors of a batch, so that it can be made of other rows too.
#
# A model that computes its own loss shifts, pads and flattens its labels for it. The denominator
# depends only on these labels, so the same few functions, called on the labels of the mini-batch,
# yield its denominator:
#
#     labels ──pad──[..., 1:]──view(-1)──> target             traced for a micro-batch
#     all labels ──pad──[..., 1:]──view(-1)──> all targets     made of the mini-batch
#
# Only functions that map every entry or move it are recorded; a tensor that is written to in place,
# and those that share its memory, have no such history any more.

PURE = (
    functionals.ELEMENTWISE
    | functionals.JOINS
    | functionals.RESHAPES
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

    def made(self, inputs: list[Tensor]) -> Any:
        """Return the tensor, of other rows."""
        if self.function is None:
            return inputs[self.args[0]]
        if self._of_first:
            return self.function(self.args[0].made(inputs), *self.args[1:], **self.kwargs)
        args = _mapped(self.args, inputs)
        kwargs = {name: _mapped(value, inputs) for name, value in self.kwargs.items()}
        return self.function(*args, **kwargs)

    @cached_property
    def _of_first(self) -> bool:
        """Whether it is made of one recipe, its first argument, as shifted labels are."""
        others = (*self.args[1:], *self.kwargs.values())
        return isinstance(self.args[0], Recipe) and not any(map(_is_made, others))


class Recipes:
    """Recipes for the tensors of one forward."""

    def __init__(self, inputs: Any) -> None:
        self._made: dict[int, Recipe] = {}
        self._alive: dict[int, Tensor] = {}  # an id is only a name while its tensor lives
        for index, (_, tensor) in enumerate(pytree.tensors(inputs)):
            self._note(tensor, Recipe(None, (index,), {}))

    def of(self, tensor: Any) -> Recipe | None:
        """Return the recipe for a tensor; None where it has none."""
        return self._made.get(id(tensor))

    def follow(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Record the recipe for a call's result, or drop those of a tensor that it wrote to."""
        if name_of(function) not in PURE:
            self._forget(args[0] if args else None)
        elif isinstance(result, Tensor) and args and id(args[0]) in self._made:
            sources = [*pytree.tensors((args, kwargs))]
            if all(id(tensor) in self._made for _, tensor in sources):
                there = pytree.map_tensors(lambda t: self._made[id(t)], (args, kwargs))
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


def touches(function: Any) -> bool:
    """Say whether a function may make a tensor that can be made again, or write to one."""
    name = name_of(function)
    in_place = name.endswith("_") and not name.endswith("__")
    return name in PURE or in_place or name.startswith(("__set", "__del", "__i"))


def _mapped(value: Any, inputs: list[Tensor]) -> Any:
    if isinstance(value, Recipe):
        return value.made(inputs)
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return type(value)(_mapped(one, inputs) for one in value)
    return value


def _is_made(value: Any) -> bool:
    """Say whether an argument is a recipe, or a tuple or list with one."""
    if isinstance(value, tuple | list):
        return any(map(_is_made, value))
    return isinstance(value, Recipe)


def by_sample(tensor: Tensor, rows: int) -> Tensor:
    """Return logits or labels with the samples first, where they are in proportion.

    Integers are converted to the dtype that the inspection compares: labels that belong to another
    sample are as wrong as such logits (test_labels_of_another_sample_are_refused).
    """
    tensor = tensor.column() if isinstance(tensor, Logits) else tensor
    tensor = tensor if tensor.is_floating_point() or tensor.is_complex() else wide(tensor)
    by_sample = rows > 0 and tensor.dim() > 0 and tensor.shape[0] % rows == 0
    return tensor.reshape(rows, -1) if by_sample else tensor
