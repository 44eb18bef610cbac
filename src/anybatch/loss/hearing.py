"""Hear which known losses a model calls inside its forward, and how its loss is made of them.

``model(input_ids, labels=labels).loss`` says nothing of what it was divided by. The functional that
the model called does: its targets are there, and its sum. `Hearing` answers each call of a known
functional with ``numerator / denominator`` of the rows it is given, which is what the functional
itself would return, keeps both, and follows the result through arithmetic to the loss:

    forward ... F.cross_entropy(a, t) ... F.mse_loss(b, s) ...   loss = 0.5 * first + second
                numerator_1 / D_1           numerator_2 / D_2       {1: 0.5, 2: 1.0}

What else is done to a term makes the loss one that is not known; nothing is concluded from numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anybatch import tree
from anybatch.loss import known
from anybatch.loss.replay import Recipe, Recipes, name_of, touches
from anybatch.loss.sums import Sum, arithmetic
from anybatch.loss.terms import Term

SAME = frozenset("to contiguous reshape view squeeze mean sum".split())
"""Functions that leave a single number what it is."""
IN_PLACE = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div", "truediv": "div"}
ALIKE = frozenset(["ignore_index"])
"""Options that may depend on the length of the samples."""


@dataclass(frozen=True)
class HeardTerm(Term):
    """A known functional that a model called: `numerator`, and what it was divided by.

    Attributes:
        count: the denominator of these rows; 1 for a sum.
        recipes: for the arguments with rows, how they were made of the batch, where that is known.
        shapes: for the arguments with rows, what shape they had.
        bytes: of the first of them: the logits.
    """

    count: known.Count
    recipes: dict[str, Recipe | None]
    shapes: dict[str, torch.Size]
    bytes: int

    @property
    def form(self) -> tuple[Any, ...]:
        """What must be the same in every micro-batch."""
        options = {k: v for k, v in self.options().items() if k not in ALIKE}
        return self.name, tuple(sorted(options.items(), key=lambda pair: pair[0]))


@dataclass(frozen=True)
class TermOfAll(HeardTerm):
    """A value that all parts of the batch share: its mean over samples is the value."""

    @property
    def name(self) -> str:
        """What was called."""
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
class SumBySamples(HeardTerm):
    """A sum that the model divides by the number of samples it is called with."""

    @property
    def divides(self) -> bool:
        """Always: by the samples."""
        return True


PLAIN, TOUCHES, LOSS = 1, 2, 3


@cache
def _kind(func: Any) -> int:
    """Say whether a function matters: a forward calls hundreds, and waits for each answer."""
    return LOSS if func in known.TABLE else TOUCHES if touches(func) else PLAIN


class Hearing(TorchFunctionMode):
    """Run a model inside ``with hearing:`` and ask for `combination` of its loss.

    Args:
        inputs: what the model is called with, any tree of tensors [n, ...].

    Attributes:
        terms: the known functionals that were called, in order.
        arguments: of each those that have rows, such as logits and labels.
        odd: names of functions that did something to a term that is not followed.
        rows: samples that the model is called with.
    """

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        self.rows = rows_of(inputs)
        self._aside = False
        self.terms: list[HeardTerm] = []
        self.arguments: list[list[Tensor]] = []
        self.odd: list[str] = []
        self._recipes = Recipes(inputs)
        self._sums: dict[int, Sum] = {}
        self._alive: list[Any] = []

    def combination(self, loss: Any) -> list[tuple[float, HeardTerm]] | None:
        """Return ``[(c_k, term_k)]`` of the model's loss, or None where it is not one."""
        found = self._sums.get(id(loss))
        if any(self._lost_its_graph(value) for value in self._alive):
            self.odd.append("checkpoint, with use_reentrant=True")
            return None
        return None if not found else [(c, self.terms[index]) for index, c in sorted(found.items())]

    def _lost_its_graph(self, value: Tensor) -> bool:
        """Say whether a value has got a graph that its terms have not: they were made without."""
        terms = [self.terms[index] for index in self._sums.get(id(value), {})]
        graphs = [term.numerator.requires_grad for term in terms]
        return bool(graphs) and value.requires_grad and not any(graphs)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer a known functional, follow its result and the labels, and let all else be."""
        kwargs = kwargs or {}
        if self._aside:
            return func(*args, **kwargs)
        kind = _kind(func)
        if kind == PLAIN and not self._sums:
            return func(*args, **kwargs)
        if kind == LOSS:
            value = self._term(func, known.bind(func, args, kwargs))
            if value is not None:
                return value
        result = func(*args, **kwargs)
        if self._sums and any(id(arg) in self._sums for arg in args):
            self._follow(name_of(func).strip("_"), args, kwargs, result)
        elif kind == TOUCHES:
            self._recipes.follow(func, args, kwargs, result)
        return result

    def weights(self) -> list[Tensor]:
        """Return the constants of the terms, which must be of no sample."""
        found = (term.arguments[name] for term in self.terms for name in term.constants)
        return [one for one in found if isinstance(one, Tensor)]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Hear nothing in the body."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    def of_all(self, value: Tensor, fn: Callable[..., Tensor]) -> Tensor:
        """Return a value that is one of the whole batch, and take it in as a term."""
        if self._aside:
            return value
        with self.aside():
            value = value.clone()  # it is one's own, whatever else returns the same
            sums = value * self.rows
        self._add(
            value,
            TermOfAll(
                index=len(self.terms),
                function=source_of(fn),
                arguments={},
                constants=(),
                numerator=sums,
                count=self.rows,
                recipes={},
                shapes={},
                bytes=0,
            ),
        )
        return value

    def _add(self, value: Tensor, term: HeardTerm) -> None:
        self._sums[id(value)] = {len(self.terms): 1.0}
        self._alive.append(value)
        self.terms.append(term)

    def _term(self, func: Callable[..., Any], arguments: dict[str, Any]) -> Tensor | None:
        """Return the value of a known functional, from its numerator; None where it is not one."""
        entry, divides = known.TABLE[func], known.divides(func, arguments)
        with_rows = {n: arguments[n] for n in entry.rows if isinstance(arguments[n], Tensor)}
        if divides is None or not self._fits(entry, arguments):
            return None
        sums = known.numerator(func, arguments)
        count = entry.count(arguments) if divides else 1
        value = sums / count if divides else sums.clone()
        left_out = {*with_rows, *entry.parameters}  # what a graph would be kept for
        first = next(iter(with_rows.values()))
        self.arguments.append(list(with_rows.values()))
        self._add(
            value,
            HeardTerm(
                index=len(self.terms),
                function=func,
                arguments={n: None if n in left_out else v for n, v in arguments.items()},
                constants=tuple(n for n in entry.constants if arguments.get(n) is not None),
                numerator=sums,
                count=count,
                recipes={n: self._recipes.of(t) for n, t in with_rows.items()},
                shapes={n: t.shape for n, t in with_rows.items()},
                bytes=first.numel() * first.element_size(),
            ),
        )
        return value

    def _fits(self, entry: known.Known, arguments: dict[str, Any]) -> bool:
        """Say whether the rows come first, and no weight belongs to a sample."""
        if not entry.fits(arguments) or any(axis not in (0, None) for axis in entry.rows.values()):
            return False
        layer = [arguments.get(name) for name in entry.parameters]
        if not all(is_parameter(p) for p in layer if p is not None):
            return False  # perhaps the other samples: InfoNCE can be written so
        first = arguments[next(iter(entry.rows))]
        return isinstance(first, Tensor) and all(
            self._is_constant(arguments.get(name), first) for name in entry.constants
        )

    def _is_constant(self, weight: Any, samples: Tensor) -> bool:
        if not isinstance(weight, Tensor):
            return True
        varies = weight.requires_grad or self._recipes.of(weight) is not None
        return not varies and weight.dim() < max(samples.dim(), 1)

    def _follow(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Note arithmetic on terms, where it gives a weighted sum of them."""
        if not isinstance(result, Tensor):
            return  # a question
        operands = [self._sums.get(id(arg), arg) for arg in args]
        self._sums.pop(id(result), None)
        first = operands[0]
        combined = None if kwargs else arithmetic(IN_PLACE.get(name, name), operands)
        if combined is None and name in SAME and isinstance(first, dict) and result.numel() == 1:
            combined = first
        if combined is None:
            self.odd.append(name)
            return
        self._sums[id(result)] = combined
        self._alive.append(result)


def is_parameter(value: Any) -> bool:
    """Say whether a tensor is a parameter or a view of one: computed from no sample."""
    if not isinstance(value, Tensor):
        return False
    base = value if value._base is None else value._base
    return isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)


def source_of(fn: Any) -> Any:
    """Return what is the same of a function that is made anew in each forward."""
    while isinstance(fn, partial):
        fn = fn.func
    return getattr(fn, "__code__", fn)


def rows_of(inputs: Any) -> int:
    """Return how many samples inputs hold; 0 where they hold no tensor with rows."""
    sizes = (tensor.shape[0] for _, tensor in tree.tensors(inputs) if tensor.dim())
    return int(next(sizes, 0))
