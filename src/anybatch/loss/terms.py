"""One call of a listed functional in a loss: its numerator, denominator and arguments.

`LossTrace` finds the terms of the full batch on outputs without data; `Numerators` then answers the
same calls for a micro-batch with numbers, and follows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from anybatch.core.functions import keywords
from anybatch.loss import functionals
from anybatch.memory.fakes import is_fake


@dataclass(frozen=True)
class Term:
    """One call of a listed functional.

    Attributes:
        index: its place among the calls of recognised functionals.
        function: the functional.
        arguments: the arguments of the call, by name.
        constants: names of the arguments that are tensors and hold no samples (class weights).
        numerator: the sum over the rows.
        samples: whose rows they are. Default 0: not counted.
        axes: name -> the dimension along which an argument holds samples. Default none.
        trace: the traced loss of the full batch, for comparison with its parts. Default None.
    """

    index: int
    function: Callable[..., Any]
    arguments: dict[str, Any]
    constants: tuple[str, ...]
    numerator: Tensor
    samples: int = field(default=0, kw_only=True)
    axes: dict[str, int] = field(default_factory=dict, kw_only=True)
    trace: Any = field(default=None, kw_only=True, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The functional's name."""
        return str(self.function.__name__)

    @property
    def divides(self) -> bool:
        """Whether the call divides its sum."""
        return bool(functionals.divides(self.function, self.arguments))

    def denominator(self) -> functionals.Count:
        """Count the denominator of the sum; 1 for a plain sum."""
        return functionals.TABLE[self.function].count(self.arguments) if self.divides else 1

    def options(self) -> dict[str, Any]:
        """Return the arguments that are no tensors: one number may stand for that of all rows."""
        return {n: value for n, value in self.arguments.items() if not isinstance(value, Tensor)}

    def same_as(self, other: Term) -> bool:
        """Say whether both are calls of one functional with the same options and constants."""
        same_layer = all(map(_looks_the_same, self.layer, other.layer))
        return self._is_like(other, _same) and same_layer and self.options() == other.options()

    def part_of(self, other: Term) -> bool:
        """Return whether it is the same call on other samples; the options are compared elsewhere.

        A dry run accepts a constant without data for the traced one. The rows must be as long as
        those of `other`, the full batch's: a tensor cut to the longest row of a micro-batch is no
        part of that of all (the test of lengths in tests/unit/loss/test_state.py).
        """
        return self._is_like(other, _looks_the_same) and all(
            _rows_alike(self.arguments[name], self.samples, full, other.samples, other.axes[name])
            for name, full in other.arguments.items()
            if name in other.axes
        )

    def _is_like(self, other: Term, same: Callable[[Any, Any], bool]) -> bool:
        return self.function is other.function and all(
            same(self.arguments[name], other.arguments[name]) for name in other.constants
        )

    @property
    def layer(self) -> tuple[Tensor | None, ...]:
        """Parameters that the functional takes, of no sample."""
        return tuple(self.arguments.get(n) for n in functionals.TABLE[self.function].parameters)


class Numerators(TorchFunctionMode):
    """Function mode that records the numerators of a loss with a traced form.

    Args:
        terms: the terms of the full batch; `found` holds the same calls on other samples.
        samples: how many those are.
    """

    def __init__(self, terms: list[Term], samples: int) -> None:
        super().__init__()
        self._samples = samples
        self.found: list[Term] = []
        self._terms = {term.index: term for term in terms}
        self._calls = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return the numerator for a listed functional that is a term; run all others."""
        kwargs = keywords(func, kwargs)
        if func in functionals.TABLE:
            term = self._terms.get(self._calls)
            self._calls += 1
            if term is not None and func is term.function:
                arguments = functionals.bind(func, args, kwargs)
                sums = functionals.numerator(func, arguments)
                own = (term.index, func, arguments, term.constants, sums)
                self.found.append(Term(*own, samples=self._samples))
                return sums
        return func(*args, **kwargs)


def _rows_alike(part: Any, n: int, full: Any, size: int, axis: int) -> bool:
    """Return whether `part` has the full batch's shape, but for its number of samples."""
    if not isinstance(part, Tensor) or part.dim() != full.dim():
        return False
    pairs = enumerate(zip(part.shape, full.shape, strict=True))
    return all(i * size == j * n if dim == axis else i == j for dim, (i, j) in pairs)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    with unset_fake_temporarily():  # a rehearsal compares nothing
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)


def _looks_the_same(a: Any, b: Any) -> bool:
    if is_fake(a) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(a.dtype == b.dtype)
    return _same(a, b)
