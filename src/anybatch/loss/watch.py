"""Watch a loss function being called, and find the sum over samples in it, if it is one.

A person writes ``lambda out, y: F.cross_entropy(out, y) + 0.5 * F.mse_loss(...)``; torch sees only
tensors. A ``TorchFunctionMode`` sees the functionals. `Watch` answers for each call of a known
functional with its numerator alone, follows the samples from the model's outputs to its arguments
(`rows`), and follows the results to the returned value, which must be a weighted sum of them:

    loss = sum_k c_k * numerator_k / denominator_k

Whatever else happens to the outputs, the targets or the terms makes the loss unknown: nothing is
concluded from numbers that happen to agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from anybatch import tree
from anybatch.loss import known, rows

ANY = -1
"""The axis of a constant: it fits samples along any dimension."""


@dataclass(frozen=True)
class Term:
    """One call of a known functional.

    Attributes:
        index: its place among the calls of known functionals.
        name: the functional's.
        numerator: the sum over the rows.
        denominator: counts what the sum is divided by.
        constants: the arguments that hold no samples (class weights).
    """

    index: int
    name: str
    numerator: Tensor
    denominator: Callable[[], known.Count]
    constants: tuple[Any, ...]

    @classmethod
    def of(
        cls, index: int, func: Callable[..., Any], arguments: dict[str, Any], numerator: Tensor
    ) -> Term:
        """Return the term that a call is."""
        entry = known.TABLE[func]
        counts = known.divides(arguments)
        return cls(
            index,
            func.__name__,
            numerator,
            lambda: entry.count(arguments) if counts else 1,
            tuple(arguments.get(name) for name in entry.constants),
        )

    def same_as(self, other: Term) -> bool:
        """Say whether both are calls of one functional with the same constants."""
        return self.name == other.name and all(
            a is b or (isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b))
            for a, b in zip(self.constants, other.constants, strict=True)
        )


class Watch(TorchFunctionMode):
    """Run a loss function inside ``with watch:`` and ask for `combination` of its result.

    Args:
        outputs: tree of tensors whose first dimension is the samples.
        targets: tree alike.
        size: the number of samples.
        count_only: answer with empty numerators; `outputs` may then be meta tensors.
    """

    def __init__(self, outputs: Any, targets: Any, size: int, *, count_only: bool = False) -> None:
        super().__init__()
        self.terms: list[Term] = []
        self._calls = 0
        self._size = size
        self._count_only = count_only
        self._unknown = False
        self._alive: list[Any] = []  # an id is only a name while its tensor lives
        self._axes: dict[int, int] = {}
        self._sums: dict[int, dict[int, float]] = {}
        self._touched: dict[int, Any] = {}  # id -> the grad_fn it had when it was followed
        for _, tensor in tree.tensors((outputs, targets)):
            self._touch(tensor)
            if tensor.dim() == 0:
                self._axes[id(tensor)] = ANY
            elif tensor.shape[0] == size:
                self._axes[id(tensor)] = 0

    def combination(self, result: Any) -> list[tuple[float, Term]] | None:
        """Return ``[(c_k, term_k)]`` of the returned value, or None where it is not one."""
        found = self._sums.get(id(result))
        if self._unknown or not found or not self._intact(result):
            return None
        return [(weight, self.terms[index]) for index, weight in sorted(found.items())]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note what `func` does to samples and terms, and let it."""
        kwargs = kwargs or {}
        if func in known.TABLE:
            term = self._term(func, args, kwargs)
            if term is not None:
                return term
        touched = [t for t in _tensors(args, kwargs) if id(t) in self._touched]
        if not all(map(self._intact, touched)):
            self._unknown = True
        result = func(*args, **kwargs)
        self._follow(_name(func), args, kwargs, result, touched)
        return result

    def _term(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        index, self._calls = self._calls, self._calls + 1
        arguments = known.bind(func, args, kwargs)
        if known.divides(arguments) is None or not self._lies_apart(known.TABLE[func], arguments):
            return None
        result = _nothing() if self._count_only else known.numerator(func, arguments)
        self._sums[id(result)] = {len(self.terms): 1.0}
        self.terms.append(Term.of(index, func, arguments, result))
        self._touch(result)
        return result

    def _lies_apart(self, entry: known.Known, arguments: dict[str, Any]) -> bool:
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
        first = arguments[next(iter(entry.rows))]
        return all(self._is_constant(arguments.get(name), first, *axes) for name in entry.constants)

    def _axis(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return ANY if isinstance(value, Real) else None
        return self._axes.get(id(value)) if self._intact(value) else None

    def _is_constant(self, value: Any, samples: Tensor, axis: int) -> bool:
        if not isinstance(value, Tensor):
            return True
        if value.requires_grad:
            return False
        if id(value) in self._touched:
            same = self._axes.get(id(value)) in (axis, ANY)
            return same and value.dim() == samples.dim()
        return value.dim() < samples.dim() - axis or value.shape[axis - samples.dim()] == 1

    def _follow(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        touched: list[Tensor],
    ) -> None:
        if name in rows.CONSTANTS and isinstance(result, Tensor):
            if not touched:
                self._axes[id(result)] = ANY
                self._touch(result)
            return
        if not touched or name in rows.QUERIES or name in rows.PROPERTIES:
            return
        writes = name.endswith("_") and not name.endswith("__") and id(result) not in self._sums
        if not isinstance(result, Tensor) or writes:
            self._unknown = True  # it read a value, or wrote one: what follows may depend on it
            return
        self._touch(result)
        if any(id(t) in self._sums for t in touched):
            self._follow_sum(name.strip("_"), args, kwargs, result)
        elif name in rows.LIKE and not any(isinstance(a, Tensor) for a in args[1:]):
            self._axes[id(result)] = ANY
        else:
            axis = self._moved(name, args, kwargs, result) if len(touched) == 1 else None
            self._axes.pop(id(result), None)
            if axis is not None:
                self._axes[id(result)] = axis

    def _moved(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> int | None:
        if name in ("detach", "data") and args:
            return self._axis(args[0])
        first = args[0] if args else None
        axis = self._axes.get(id(first))
        if axis == ANY:
            return ANY if name in rows.ELEMENTWISE | rows.RESHAPES else None
        if axis is None:
            return None
        return rows.axis_after(name, args, kwargs, result, axis, self._size)

    def _follow_sum(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> None:
        """Note the result of arithmetic on terms as a weighted sum of them, if it is one."""
        known_before = [self._sums.get(id(arg), arg) for arg in args]
        self._sums.pop(id(result), None)
        if not kwargs:
            combined = _arithmetic(name, known_before)
            if combined is not None:
                self._sums[id(result)] = combined

    def _touch(self, tensor: Tensor) -> None:
        self._touched[id(tensor)] = tensor.grad_fn
        self._alive.append(tensor)

    def _intact(self, tensor: Tensor) -> bool:
        """Say whether its gradient is that of the functions seen, not of an own autograd.Function.

        Those run their forward here, and replace the graph of the result afterwards.
        """
        return self._touched.get(id(tensor)) is tensor.grad_fn


class Numerators(TorchFunctionMode):
    """Take the numerators of a loss whose form is known, and follow nothing.

    Args:
        terms: the terms that `Watch` found; `found` holds the same calls on other samples.
    """

    def __init__(self, terms: list[Term]) -> None:
        super().__init__()
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
        """Answer a known functional that is a term with its numerator."""
        if func in known.TABLE:
            term = self._terms.get(self._calls)
            self._calls += 1
            if term is not None and func.__name__ == term.name:
                arguments = known.bind(func, args, kwargs or {})
                numerator = known.numerator(func, arguments)
                self.found.append(Term.of(term.index, func, arguments, numerator))
                return numerator
        return func(*args, **(kwargs or {}))


def _arithmetic(name: str, operands: list[Any]) -> dict[int, float] | None:
    """Return the weighted sum that ``name(*operands)`` is; a sum is a dict, the rest numbers."""
    match name, operands:
        case (("add" | "radd" | "sub"), [dict() as left, dict() as right]):
            sign = -1.0 if name == "sub" else 1.0
            return {k: left.get(k, 0.0) + sign * right.get(k, 0.0) for k in {**left, **right}}
        case (("add" | "radd" | "sub"), [dict() as left, 0 | 0.0]):
            return left
        case "rsub", [dict() as left, 0 | 0.0]:
            return {k: -weight for k, weight in left.items()}
        case (("mul" | "rmul"), [dict() as left, Real() as number]):
            return {k: weight * float(number) for k, weight in left.items()}
        case (("div" | "true_divide"), [dict() as left, Real() as number]):
            return {k: weight / float(number) for k, weight in left.items()}
        case "neg", [dict() as left]:
            return {k: -weight for k, weight in left.items()}
        case (("float" | "double" | "clone"), [dict() as left]):
            return left
    return None


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return every tensor among the arguments; most calls have no nested ones."""
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list | dict):
            found.extend(tensor for _, tensor in tree.tensors(value))
    return found


def _nothing() -> Tensor:
    """Return an empty stand-in for a numerator, with a graph as the real one has."""
    return torch.zeros((), device="meta", requires_grad=torch.is_grad_enabled()).clone()


def _name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", "")
    if name == "__get__":  # a property: Tensor.shape and its like
        return str(getattr(getattr(func, "__self__", None), "__name__", ""))
    return name
