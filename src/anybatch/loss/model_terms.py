"""Terms of a loss that a model computes inside: functional, numerator and denominator.

F.cross_entropy(a, t)          HeardTerm      sum of the rows, and what these are divided by
1 in 1 - cosine.mean()         Constant       the same in all parts of the batch
anybatch.coupled(fn)(z)        TermOfAll      a value that all parts share
nll.sum() / len(x)             SumBySamples   a sum that is divided by the samples
w.sum() in v.sum() / w.sum()   Weighed        no term: what one may be divided by
loss, w.sum(), zeros(())       Record         what a tensor on the way to the loss is
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anybatch.loss import functionals
from anybatch.loss.replay import Recipe
from anybatch.loss.sums import Sum
from anybatch.loss.terms import Term

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
    bounds: tuple[tuple[str, float], ...] = field(default=(), kw_only=True)

    @property
    def name(self) -> str:
        """The functional's name; for the model's own values the name of their reduction."""
        own = {functionals.own_values: "", functionals.own_weighted_values: "weighted "}.get(
            self.function
        )
        return super().name if own is None else f"{own}{self.arguments['reduction']} of its own"

    @property
    def form(self) -> tuple[Any, ...]:
        """Name, options, factors and bounds, which must be the same in every micro-batch."""
        options = {k: v for k, v in self.options().items() if k not in ALIKE}
        ordered = tuple(sorted(options.items(), key=lambda pair: pair[0]))
        return self.name, ordered, len(self.factors), self.bounds

    def bounded(self, count: functionals.Count) -> functionals.Count:
        """Return the denominator of the full batch: its count within the bounds."""
        for bound, number in self.bounds:
            count = torch.as_tensor(count)
            count = count.clamp(min=number) if bound == "least" else count + number
        return count


@dataclass(frozen=True)
class Weighed:
    """A sum without a gradient, by which a loss may be divided.

    Attributes:
        values: the summed tensor.
        total: the sum.
        bounds: later operations on it, as in `TracedTerm`.
    """

    values: Tensor
    total: Record
    bounds: tuple[tuple[str, float], ...] = ()


@dataclass
class Record:
    """One tensor that is followed.

    Attributes:
        tensor: its id is a name for as long as it lives.
        version: its count of writes when it was recorded.
        node: its autograd node then.
        sums: the weighted sum of terms that it is; None where it is none.
        stack: those that it holds as entries; None where it holds none.
        number: the number that it was filled with; None where it was not.
        weights: the sum of weights that it is; None where it is none.
    """

    tensor: Tensor
    version: int
    node: Any
    sums: Sum | None = None
    stack: list[Sum] | None = None
    number: float | None = None
    weights: Weighed | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> Record:
        """Return a record of a tensor as it is now."""
        return cls(tensor, _version(tensor), tensor.grad_fn)

    @property
    def intact(self) -> bool:
        """Whether the tensor was not written to since, and its graph is still its own.

        An ``autograd.Function`` puts its own node in the place of that which its forward has made.
        """
        return self.version == _version(self.tensor) and self.node is self.tensor.grad_fn


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


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
