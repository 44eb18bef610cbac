"""Trace of a loss: from the results of torch's losses, through arithmetic, to a weighted sum.

A user writes ``lambda out, y: F.cross_entropy(out, y) + 0.5 * F.mse_loss(...)``; torch sees only
tensors. A ``TorchFunctionMode`` sees the functionals. `TermTrace` records each call of a listed
functional as a term, and follows the results to a returned value, which must be

    loss = sum_k c_k * numerator_k / denominator_k

After any other operation on the terms the loss is not recognised: nothing is concluded from numbers
that happen to agree. Two modes are made of it. `LossTrace` runs a loss function on outputs without
data, and traces the samples to the arguments of the functionals, too; two traces of different
numbers of samples must show the same calls (`same_calls`), so that no number but c_k depends on the
size. `TracingMode` (`anybatch.loss.tracing`) runs a model that computes its loss inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from anybatch.core import pytree
from anybatch.core.modules import keywords
from anybatch.loss import functionals
from anybatch.loss.functionals import TABLE, Count, bind, divides, numerator
from anybatch.memory.fakes import is_fake

ANY = -1
"""The axis of a constant: it fits samples along any dimension."""

Call = tuple[str, tuple[Any, ...], tuple[int, ...], torch.Size, int | None]
"""A function, the numbers it is given, which tensors, and the shape and axis of the result."""


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
        return bool(divides(self.function, self.arguments))

    def denominator(self) -> Count:
        """Count the denominator of the sum; 1 for a plain sum."""
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
    with unset_fake_temporarily():  # a rehearsal compares nothing
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)


def _looks_the_same(a: Any, b: Any) -> bool:
    if is_fake(a) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(a.dtype == b.dtype)
    return _same(a, b)


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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the numerator for a listed functional that is a term; run all others."""
        kwargs = keywords(func, kwargs)
        if func in TABLE:
            term = self._terms.get(self._calls)
            self._calls += 1
            if term is not None and func is term.function:
                arguments = bind(func, args, kwargs)
                sums = numerator(func, arguments)
                own = (term.index, func, arguments, term.constants, sums)
                self.found.append(Term(*own, samples=self._samples))
                # The loss may write to its result: `loss += penalty` added to the numerator, too
                # (test_a_loss_that_writes_to_its_terms_is_exact).
                return sums.clone()
        return func(*args, **kwargs)


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

    @classmethod
    def of(cls, tensor: Tensor, place: int = ANY) -> Record:
        """Return a record of a tensor as it is now."""
        return cls(tensor, _version(tensor), tensor.grad_fn, place)

    @property
    def intact(self) -> bool:
        """Whether the tensor was not written to since, and its graph is still its own.

        An ``autograd.Function`` puts its own node in the place of that which its forward has made.
        """
        return self.version == _version(self.tensor) and self.node is self.tensor.grad_fn


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


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
        """Record a value as a term."""
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
        """Return the record of a tensor; None where it has none, or has changed since."""
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


def in_order(name: str, operands: list[Any]) -> tuple[str, list[Any]]:
    """Return a function and its operands, the term before the number, without in-place forms."""
    name = IN_PLACE.get(name, name)
    plain = len(operands) == 2 and isinstance(operands[0], Real | Tensor)
    if name in SWAPPED and plain and isinstance(operands[1], dict):
        return SWAPPED[name], operands[::-1]
    return name, operands


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


class LossTrace(TermTrace[Term]):
    """Function mode that traces a loss function run inside it, for `combination`.

    Args:
        outputs: tree of meta tensors, and for each of them the dimension of the samples, or None.
        targets: tree of tensors of any device whose first dimension is the samples.
        size: the number of samples.
        device: where the model's outputs really are: the loss may ask.
    """

    def __init__(
        self,
        outputs: tuple[Any, tuple[int | None, ...]],
        targets: Any,
        size: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._listed_calls = 0
        self._size = size
        self._device = device
        self._failed = False
        for (_, tensor), axis in zip(pytree.tensors(outputs[0]), outputs[1], strict=True):
            self._record(tensor).axis = axis
        for _, tensor in pytree.tensors(targets):
            self._record(tensor).axis = 0 if tensor.dim() else ANY

    def combination(self, result: Any) -> list[tuple[float, Term]] | None:
        """Return ``[(c_k, term_k)]`` of the returned value, or None where it is not one."""
        return None if self._failed else super().combination(result)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and record its effect on samples and terms."""
        kwargs = keywords(func, kwargs)
        try:
            return self._call(func, args, kwargs)
        except UnfollowableError:
            self._failed = True  # whoever catches it
            raise

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in TABLE:
            term = self._term(func, args, kwargs)
            if term is not None:
                return term
        name = name_of(func)
        touched = [t for t in _tensors(args, kwargs) if id(t) in self._records]
        if touched and name == "device":
            return self._device
        if touched and not all(map(self._intact, touched)):
            raise UnfollowableError
        if self._writes(name, args, kwargs) or name in functionals.STATEFUL:
            raise UnfollowableError  # to state of its own, if not to these: it would stay
        operands = [self._operand(arg) for arg in args]
        of_terms = any(self._records[id(t)].sums is not None for t in touched)
        result = func(*args, **kwargs)
        if of_terms and isinstance(result, Tensor):
            combined = None if kwargs else arithmetic(*in_order(name.strip("_"), operands))
            self._record(result).sums = combined
        else:
            self._follow(name, args, kwargs, result, touched)
        return result

    def _term(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        index, self._listed_calls = self._listed_calls, self._listed_calls + 1
        arguments, entry = bind(func, args, kwargs), TABLE[func]
        if divides(func, arguments) is None or not self._is_separate(entry, arguments):
            return None
        constants = tuple(n for n in entry.constants if not self._is_sample(arguments.get(n)))
        empty = _nothing()
        samples = {name: arguments[name] for name in entry.rows if self._is_sample(arguments[name])}
        axes = {name: self._records[id(one)].axis or 0 for name, one in samples.items()}
        own = (index, func, arguments, constants, empty)
        self._add(empty, Term(*own, samples=self._size, axes=axes))
        for name in entry.rows:
            if isinstance(arguments[name], Tensor):
                numbers = (torch.is_grad_enabled(),)
                self._note(name, numbers, arguments[name], [arguments[name]])
        return empty

    def _is_separate(self, entry: functionals.Functional, arguments: dict[str, Any]) -> bool:
        """Say whether every row of the call belongs to one sample."""
        axes = set()
        for name, wanted in entry.rows.items():
            axis = self._axis(arguments[name])
            if axis is None or (wanted is not None and axis not in (wanted, ANY)):
                return False
            if axis != ANY:
                axes.add(axis if wanted is None else 0)
        if len(axes) != 1 or not entry.fits(arguments):
            return False
        if any(id(arguments.get(name)) in self._records for name in entry.parameters):
            return False  # a layer made of samples
        first = arguments[next(iter(entry.rows))]
        return all(self._fits_all(arguments.get(name), first, *axes) for name in entry.constants)

    def _axis(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return ANY if isinstance(value, Real) else None
        found = self._intact(value)
        return None if found is None else found.axis

    def _is_sample(self, value: Any) -> bool:
        found = self._records.get(id(value))
        return found is not None and found.axis not in (None, ANY)

    def _fits_all(self, value: Any, samples: Tensor, axis: int) -> bool:
        """Say whether a weight is the same for all samples, or one of them along their axis."""
        if not isinstance(value, Tensor):
            return True
        if value.requires_grad:
            return False
        if id(value) in self._records:
            same = self._axis(value) in (axis, ANY)
            return same and value.dim() == samples.dim()
        return value.dim() < samples.dim() - axis or value.shape[axis - samples.dim()] == 1

    def _writes(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        in_place = name.endswith("_") and not name.endswith("__")
        in_place |= name.startswith("__i") and name not in functionals.READS
        own = bool(args) and isinstance(self._operand(args[0]), dict)  # a term added to in place
        return (
            (in_place and not own)
            or name.startswith(("__set", "__del"))
            or kwargs.get("out") is not None
            or bool(kwargs.get("inplace"))
        )

    def _follow(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        touched: list[Tensor],
    ) -> None:
        if name in functionals.CONSTANTS and isinstance(result, Tensor) and not touched:
            if name in functionals.FILLED or result.dim() == 0:
                self._record(result).axis = ANY
                self._note(name, _fill(name, args, kwargs), result, [])
            return
        if not touched or name in functionals.QUERIES or name in functionals.PROPERTIES:
            return
        if not isinstance(result, Tensor):
            raise UnfollowableError  # it read a value: what follows may depend on it
        if name in functionals.LIKE and not any(isinstance(a, Tensor) for a in args[1:]):
            axis: int | None = ANY
        else:
            axis = self._moved(name, args, kwargs, result) if len(touched) == 1 else None
        self._record(result).axis = axis
        options = () if name in functionals.RESHAPES else (*args[1:], *sorted(kwargs.items()))
        numbers = tuple(g for g in options if not isinstance(g, Tensor))
        if name == "contiguous":  # itself where it lies so, and that may depend on the size
            self._record(result).place = self._record(touched[0]).place
        self._note(name, numbers, result, touched)

    def _moved(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> int | None:
        if name in ("detach", "data") and args:
            return self._axis(args[0])
        first = self._records.get(id(args[0])) if args else None
        axis = None if first is None else first.axis
        if axis == ANY:
            return ANY if name in functionals.ELEMENTWISE | functionals.RESHAPES else None
        if axis is None:
            return None
        return functionals.axis_after(name, args, kwargs, result, axis, self._size)

    def _note(
        self, name: str, numbers: tuple[Any, ...], result: Tensor, sources: list[Tensor]
    ) -> None:
        places = tuple(self._record(source).place for source in sources)
        self.calls.append((name, numbers, places, result.shape, self._record(result).axis))


def same_calls(a: LossTrace, b: LossTrace) -> bool:
    """Say whether two watches saw the same, but for the number of samples."""

    def same_shape(x: torch.Size, y: torch.Size, axis: int | None) -> bool:
        grown = [i * b._size == j * a._size for i, j in zip(x, y, strict=False)]
        equal = [i == j for i, j in zip(x, y, strict=False)]
        free = axis is None or axis == ANY  # no samples: filled to the size, or not
        agrees = [e or (free and g) for e, g in zip(equal, grown, strict=True)]
        if axis is not None and axis != ANY:
            agrees[axis] = grown[axis]
        return len(x) == len(y) and all(agrees)

    return (
        len(a.calls) == len(b.calls)
        and all(
            one[0] == other[0]
            and repr(one[1:3]) == repr(other[1:3])
            and one[4] == other[4]
            and same_shape(one[3], other[3], one[4])
            for one, other in zip(a.calls, b.calls, strict=True)
        )
        and len(a.terms) == len(b.terms)
        and all(map(Term.same_as, a.terms, b.terms))
    )


def _fill(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the fill value of a constant tensor; its shape may depend on the size."""
    if name == "full":
        return (kwargs.get("fill_value", args[-1] if len(args) > 1 else None),)
    return () if name in functionals.FILLED else args


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return every tensor among the arguments; most calls have no nested ones."""
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list | dict):
            found.extend(tensor for _, tensor in pytree.tensors(value))
    return found


def _nothing() -> Tensor:
    """Return an empty stand-in for a numerator, with a graph as the real one has."""
    return torch.zeros((), device="meta", requires_grad=torch.is_grad_enabled()).clone()


def name_of(function: Any) -> str:
    """Return the name of a function of torch; a property has its own."""
    name = getattr(function, "__name__", "")
    return name if name != "__get__" else str(getattr(function.__self__, "__name__", ""))
