"""Trace of a loss: from the results of torch's losses, through arithmetic, to a weighted sum.

A user writes ``lambda out, y: F.cross_entropy(out, y) + 0.5 * F.mse_loss(...)``; torch sees only
tensors. A ``TorchFunctionMode`` sees the functionals. `TermTrace` records each call of a listed
functional as a term, and follows the results to a returned value, which must be

    loss = sum_k c_k * numerator_k / denominator_k

After any other operation on the terms the loss is not recognised: nothing is concluded from numbers
that happen to agree. Two modes are made of it: `LossTrace` (`anybatch.loss.function_trace`) runs a
loss function on outputs without data, and `TracingMode` (`anybatch.loss.model_trace`) runs a
model that computes its loss inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from anybatch.core import pytree
from anybatch.loss import functionals
from anybatch.loss.functionals import (
    TABLE,
    Count,
    bind,
    divides,
    own_values,
    own_weighted_values,
)
from anybatch.memory.fakes import is_fake

ANY = -1
"""The axis of a constant: it fits samples along any dimension."""

FIXED = -2
"""The axis of a tensor from outside of the loss, such as a weight of its classes: of no sample."""

BOUNDS = {"clamp": "least", "clamp_min": "least", "add": "plus", "__add__": "plus"}
"""Functions that keep a count from being 0: ``mask.sum().clamp(min=1)``, ``mask.sum() + 1e-8``."""

CONVERTS = frozenset("float double to type type_as".split())
"""Functions that may change the type of a number."""

WIDE = (torch.float32, torch.float64)
"""Types that hold every count, or nearly."""

Bound = tuple[str, float | torch.dtype]
"""An operation on a sum of weights."""


class UnfollowableError(Exception):
    """Error for a loss that reads a value, writes to a tensor, or cannot be traced."""


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
        by: the sum by which the loss divides its own sum. Default None: it does not.
    """

    index: int
    function: Callable[..., Any]
    arguments: dict[str, Any]
    constants: tuple[str, ...]
    numerator: Tensor
    samples: int = field(default=0, kw_only=True)
    axes: dict[str, int] = field(default_factory=dict, kw_only=True)
    trace: Any = field(default=None, kw_only=True, repr=False, compare=False)
    by: Weighed | None = field(default=None, kw_only=True, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The functional's name; for values of the loss's own the name of their reduction."""
        own = {own_values: "", own_weighted_values: "weighted "}.get(self.function)
        name = str(self.function.__name__)
        if own is not None:
            name = f"{own}{self.arguments['reduction']} of its own"
        return name if self.by is None else f"{name}, by weights"

    @property
    def divides(self) -> bool:
        """Whether the call, or the loss, divides its sum."""
        return self.by is not None or bool(divides(self.function, self.arguments))

    def denominator(self) -> Count:
        """Count the denominator of the sum; 1 for a plain sum."""
        if self.by is not None:
            return bounded(self.by.values.sum(), self.by.bounds)
        return TABLE[self.function].count(self.arguments) if self.divides else 1

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
        return tuple(self.arguments.get(n) for n in TABLE[self.function].parameters)


def _rows_alike(part: Any, n: int, full: Any, size: int, axis: int) -> bool:
    """Return whether `part` has the full batch's shape, but for its number of samples."""
    if not isinstance(part, Tensor) or part.dim() != full.dim():
        return False
    pairs = enumerate(zip(part.shape, full.shape, strict=True))
    return all(i * size == j * n if dim == axis else i == j for dim, (i, j) in pairs)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.is_meta or b.is_meta:
        return False
    with unset_fake_temporarily():  # a rehearsal compares nothing
        return torch.equal(a, b)


def _looks_the_same(a: Any, b: Any) -> bool:
    if is_fake(a) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(a.dtype == b.dtype)
    return _same(a, b)


@dataclass(frozen=True)
class ConstantTerm(Term):
    """A number that a loss adds: 1 in ``1 - score.mean()``. Its weight is the number."""

    @property
    def name(self) -> str:
        """It is the same in all parts of the batch."""
        return "a constant"

    @property
    def divides(self) -> bool:
        """Always: by the samples."""
        return True

    @property
    def layer(self) -> tuple[Tensor | None, ...]:
        """It has none."""
        return ()

    def denominator(self) -> Count:
        """Return the samples."""
        return self.samples

    def of(self, samples: int, like: Sequence[Term]) -> ConstantTerm:
        """Return the constant of so many samples, as a numerator in the form of other terms."""
        one = next((term.numerator for term in like), torch.zeros(()))
        dtype = torch.promote_types(one.dtype, torch.float32)
        numerator = torch.tensor(float(samples), dtype=dtype, device=one.device)
        return replace(self, numerator=numerator, samples=samples)


@dataclass(frozen=True)
class Weighed:
    """A sum without a gradient, by which a loss may be divided.

    Attributes:
        values: the summed tensor.
        total: the sum.
        bounds: later operations on it: ("least", 1), ("plus", 1e-8), ("type", torch.float64).
    """

    values: Tensor
    total: Record
    bounds: tuple[Bound, ...] = ()

    @property
    def adds(self) -> bool:
        """Whether the denominators of parts add up to that of the full batch."""
        return all(number in WIDE for _, number in self.bounds)


@dataclass
class Record:
    """One tensor on the way to a loss.

    Attributes:
        tensor: its id is a name for as long as it lives.
        version: its count of writes when it was recorded.
        node: its autograd node then.
        place: its number among the recorded tensors.
        axis: the dimension of the samples; `ANY` of a constant, None where it is not traced.
        sums: the weighted sum of terms that it is; None where it is none.
        stack: those that it holds as entries; None where it holds none.
        number: the number that it was filled with; None where it was not.
        weights: the sum of weights that it is; None where it is none.
        counts: it counts the samples: 0, 1, 2, ...
    """

    tensor: Tensor
    version: int
    node: Any
    place: int = ANY
    axis: int | None = None
    sums: Sum | None = None
    stack: list[Sum] | None = None
    number: float | None = None
    weights: Weighed | None = None
    counts: bool = False

    @classmethod
    def of(cls, tensor: Tensor, place: int = ANY) -> Record:
        """Return a record of a tensor as it is now."""
        return cls(tensor, version_of(tensor), tensor.grad_fn, place)

    @property
    def intact(self) -> bool:
        """Whether the tensor was not written to since, and its graph is still its own.

        An ``autograd.Function`` puts its own node in the place of that which its forward has made.
        """
        return self.version == version_of(self.tensor) and self.node is self.tensor.grad_fn


def version_of(tensor: Tensor) -> int:
    """Return the count of writes to a tensor; -1 where torch does not count them."""
    return -1 if tensor.is_inference() else tensor._version


def bounded(count: Count, bounds: Sequence[Bound]) -> Count:
    """Return the denominator of the full batch: its count within the bounds of `Weighed`."""
    for bound, number in bounds:
        count = torch.as_tensor(count)
        if isinstance(number, torch.dtype):
            count = count.to(number)
        else:
            count = count.clamp(min=number) if bound == "least" else count + number
    return count


T = TypeVar("T", bound=Term)


class TermTrace(TorchFunctionMode, Generic[T]):
    """Function mode that follows terms of a loss to its value.

    Attributes:
        terms: the recognised functionals that were called, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.terms: list[T] = []
        self._records: dict[int, Record] = {}

    def _add(self, value: Tensor, term: T) -> None:
        self._record(value).sums = {len(self.terms): 1.0}
        self.terms.append(term)

    def _record(self, tensor: Tensor) -> Record:
        """Return the record of a tensor, a new one where it has changed."""
        found = self._records.get(id(tensor))
        if found is None or not found.intact:
            place = len(self._records) if found is None else found.place
            found = self._records[id(tensor)] = Record.of(tensor, place)
        return found

    def _intact(self, value: Any) -> Record | None:
        found = self._records.get(id(value))
        return found if found is not None and found.intact else None

    def _operand(self, value: Any) -> Any:
        """Return the weighted sum, or the number, that a value is; the value where it is none."""
        found = self._intact(value)
        if found is None:
            return value
        if found.sums is not None:
            return found.sums
        return value if found.number is None else found.number

    def combination(self, result: Any) -> list[tuple[float, T]] | None:
        """Return ``[(c_k, term_k)]`` of the returned value, or None where it is not one."""
        found = self._operand(result)
        if not isinstance(found, dict) or not found:
            return None
        return [(weight, self.terms[index]) for index, weight in sorted(found.items())]


# Arithmetic on the terms of a loss: the results that are weighted sums, and their weights.
#
# 0.5 * a + b / 4      ->  {a: 0.5, b: 0.25} a * b, a ** 2, a + 1 ->  none

Sum = dict[int, float]
"""The weight of each term, by its number."""


IN_PLACE = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div", "truediv": "div"}
SWAPPED = {"add": "add", "radd": "add", "mul": "mul", "rmul": "mul", "sub": "rsub", "rsub": "sub"}
"""Functions of a number and a term, as functions of the term and the number."""


SIGNS = {"add": (1.0, 1.0), "radd": (1.0, 1.0), "sub": (1.0, -1.0), "rsub": (-1.0, 1.0)}
"""Functions of a term and a number that add: the sign of each."""


def in_order(name: str, operands: list[Any]) -> tuple[str, list[Any]]:
    """Return a function and its operands, the term before the number, without in-place forms."""
    name = IN_PLACE.get(name, name)
    plain = len(operands) == 2 and isinstance(operands[0], Real | Tensor)
    if name in SWAPPED and plain and isinstance(operands[1], dict):
        return SWAPPED[name], operands[::-1]
    return name, operands


def scaled_sum(every: Sequence[Sum], factor: float) -> Sum:
    """Return the sum of weighted sums, times a factor."""
    found = Sum()
    for one in every:
        for index, weight in one.items():
            found[index] = found.get(index, 0.0) + factor * weight
    return found


def arithmetic(name: str, operands: list[Any]) -> Sum | None:
    """Return the weighted sum that ``name(*operands)`` is, or None.

    Args:
        name: the operation, without underscores: add, sub, mul, div, neg, ...
        operands: a `Sum` for each operand that is one, anything else as it is.
    """
    match name, operands:
        case (("add" | "radd" | "sub"), [dict() as left, dict() as right]):
            sign = -1.0 if name == "sub" else 1.0
            return {k: left.get(k, 0.0) + sign * right.get(k, 0.0) for k in {**left, **right}}
        case (("add" | "radd" | "sub"), [dict() as left, Real() as zero]) if zero == 0:
            return left
        case "rsub", [dict() as left, Real() as zero] if zero == 0:
            return {k: -weight for k, weight in left.items()}
        case (("mul" | "rmul"), [dict() as left, Real() as number]):
            return {k: weight * float(number) for k, weight in left.items()}
        case (("div" | "true_divide"), [dict() as left, Real() as number]) if number != 0:
            return {k: weight / float(number) for k, weight in left.items()}
        case "neg", [dict() as left]:
            return {k: -weight for k, weight in left.items()}
        case (("float" | "double" | "clone"), [dict() as left]):
            return left
    return None


def lower_bound(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the number that keeps a count from being 0; None where a call does something else."""
    numbers = [one for one in (*args, *kwargs.values()) if one is not None]
    below = kwargs.get("max") is None and (len(args) < 2 or args[1] is None)
    if name not in BOUNDS or len(numbers) != 1 or not below or type(numbers[0]) not in (int, float):
        return None
    return numbers[0]  # an integer remains one: it does not change the type of a count


DIGITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}
"""Binary digits of a number of each type."""


def is_exact(number: float, dtype: torch.dtype) -> bool:
    """Say whether a type holds a number without rounding it."""
    if dtype not in DIGITS or abs(number) > 2.0**15 or (number and abs(number) < 2.0**-14):
        return False
    return (math.frexp(number)[0] * 2.0 ** DIGITS[dtype]).is_integer()


def converts(name: str, result: Tensor) -> bool:
    """Say whether a function has changed nothing but the type of a sum, to one that holds it."""
    return name in CONVERTS and result.dtype in WIDE


def filled_with(name: str, first: Any, result: Tensor) -> float | None:
    """Return the number of a tensor of one, which its type does not round; None for others."""
    number = first if name in ("tensor", "scalar_tensor") else 0.0 if "zeros" in name else 1.0
    single = result.numel() == 1 and isinstance(number, Real) and not result.requires_grad
    return float(number) if single and is_exact(float(number), result.dtype) else None


def listed(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """Return the functional of `TABLE` that a call is one of, and its arguments; else None.

    A mean or a sum of all values of a tensor is one, too.
    """
    if func in TABLE:
        return func, bind(func, args, kwargs)
    reduction = functionals.full_reduction(torchs_name(func), args, kwargs)
    if reduction is None:
        return None
    return own_values, {"input": args[0], "reduction": reduction}


COMPILED = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType)


HOME = str(Path(torch.__file__).parent)
"""The folder of torch."""


def torchs_name(function: Any) -> str:
    """Return the name of a function of torch's own; "" of any other, which may have the same name.

    An operator of ``torch.ops`` is none: a library may have registered it.
    """
    if isinstance(function, FunctionType):  # by its file: "wraps" copies name and module
        return name_of(function) if function.__code__.co_filename.startswith(HOME) else ""
    return name_of(function) if isinstance(function, COMPILED) else ""


def name_of(function: Any) -> str:
    """Return the name of a function of torch; a property has its own."""
    name = getattr(function, "__name__", "")
    return name if name != "__get__" else str(getattr(function.__self__, "__name__", ""))


# Comparison of two calls of a loss: the same functions, in order, of the same tensors.


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return every tensor among the arguments; most calls have no nested ones."""
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list | dict):
            found.extend(tensor for _, tensor in pytree.tensors(value))
    return found


def numbers_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a call that hold no tensor."""
    return tuple(one for one in (*args, *sorted(kwargs.items())) if not tensors_of((one,), {}))


class CallLog:
    """All calls of torch in one call of a loss, for comparison with another one.

    Attributes:
        calls: for each the function, the numbers that it was given, the tensors by their places
            among outputs, targets and results, and the modes that change what it does.
    """

    def __init__(self, outputs: Any, targets: Any) -> None:
        self.calls: list[Any] = []
        self._places: dict[int, int] = {}
        self._count = 0
        for _, tensor in pytree.tensors((outputs, targets)):
            self.returned(tensor)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call."""
        # One from outside of the loss is known by its identity.
        places = [self._places.get(id(one), -id(one)) for one in tensors_of(args, kwargs)]
        modes = torch.is_grad_enabled(), torch._C._is_any_autocast_enabled()
        self.calls.append((name_of(func), repr(numbers_of(args, kwargs)), places, modes))

    def returned(self, result: Any) -> None:
        """Record the tensors that a call has returned.

        An id is that of the last one that had it: others are gone.
        """
        for one in tensors_of((result,), {}):
            self._places[id(one)] = self._count = self._count + 1
