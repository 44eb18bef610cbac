"""Watch a loss function being called, and find the sum over samples in it, if it is one.

A user writes ``lambda out, y: F.cross_entropy(out, y) + 0.5 * F.mse_loss(...)``; torch sees only
tensors. A ``TorchFunctionMode`` sees the functionals. `LossTrace` answers each call of a listed
functional with an empty numerator, traces the samples from the model's outputs to its arguments
(`rows`), and follows the results to the returned value, which must be a weighted sum of them:

    loss = sum_k c_k * numerator_k / denominator_k

After any other operation on the outputs, the targets or the terms the loss is not recognised:
nothing is concluded from numbers that happen to agree. Two traces of different numbers of samples
must show the same calls (`same_calls`), so that no number but c_k depends on the size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from anybatch.core import pytree
from anybatch.core.modules import keywords
from anybatch.loss import functionals
from anybatch.loss.functionals import Sum, Term, arithmetic

ANY = -1
"""The axis of a constant: it fits samples along any dimension."""

Call = tuple[str, tuple[Any, ...], tuple[int, ...], torch.Size, int | None]
"""A function, the numbers it is given, which tensors, and the shape and axis of the result."""


class UnfollowableError(Exception):
    """Error for a loss that reads a value, writes to a tensor, or cannot be traced."""


class LossTrace(TorchFunctionMode):
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
        self.terms: list[Term] = []
        self.calls: list[Call] = []
        self._listed_calls = 0
        self._size = size
        self._device = device
        self._alive: list[Any] = []  # an id is only a name while its tensor lives
        self._axes: dict[int, int] = {}
        self._sums: dict[int, Sum] = {}
        self._touched: dict[int, Any] = {}  # id -> the grad_fn it had when it was followed
        self._places: dict[int, int] = {}  # id -> how many there were before it
        self._failed = False
        for (_, tensor), axis in zip(pytree.tensors(outputs[0]), outputs[1], strict=True):
            self._touch(tensor)
            if axis is not None:
                self._axes[id(tensor)] = axis
        for _, tensor in pytree.tensors(targets):
            self._touch(tensor)
            self._axes[id(tensor)] = 0 if tensor.dim() else ANY

    def combination(self, result: Any) -> list[tuple[float, Term]] | None:
        """Return ``[(c_k, term_k)]`` of the returned value, or None where it is not one."""
        found = self._sums.get(id(result))
        if not found or self._failed or not self._intact(result):
            return None
        return [(weight, self.terms[index]) for index, weight in sorted(found.items())]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`, and record its effect on samples and terms."""
        try:
            return self._call(func, args, keywords(func, kwargs))
        except UnfollowableError:
            self._failed = True  # whoever catches it
            raise

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in functionals.TABLE:
            term = self._term(func, args, kwargs)
            if term is not None:
                return term
        name = _name(func)
        touched = [t for t in _tensors(args, kwargs) if id(t) in self._touched]
        if touched and name == "device":
            return self._device
        if touched and not all(map(self._intact, touched)):
            raise UnfollowableError
        if self._writes(name, args, kwargs) or name in functionals.STATEFUL:
            raise UnfollowableError  # to state of its own, if not to these: it would stay
        result = func(*args, **kwargs)
        self._follow(name, args, kwargs, result, touched)
        return result

    def _term(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        index, self._listed_calls = self._listed_calls, self._listed_calls + 1
        arguments = functionals.bind(func, args, kwargs)
        if functionals.divides(func, arguments) is None or not self._is_separate(
            functionals.TABLE[func], arguments
        ):
            return None
        entry = functionals.TABLE[func]
        constants = tuple(n for n in entry.constants if not self._is_sample(arguments.get(n)))
        empty = _nothing()
        self._sums[id(empty)] = {len(self.terms): 1.0}
        axes = {name: self._axes.get(id(arguments[name]), ANY) for name in entry.rows}
        axes = {name: axis for name, axis in axes.items() if axis != ANY}
        own = (index, func, arguments, constants, empty)
        self.terms.append(Term(*own, samples=self._size, axes=axes))
        for name in entry.rows:
            if isinstance(arguments[name], Tensor):
                numbers = (torch.is_grad_enabled(),)
                self._note(name, numbers, arguments[name], [arguments[name]])
        self._touch(empty)
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
        if any(id(arguments.get(name)) in self._touched for name in entry.parameters):
            return False  # a layer made of samples
        first = arguments[next(iter(entry.rows))]
        return all(self._fits_all(arguments.get(name), first, *axes) for name in entry.constants)

    def _axis(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return ANY if isinstance(value, Real) else None
        return self._axes.get(id(value)) if self._intact(value) else None

    def _is_sample(self, value: Any) -> bool:
        return isinstance(value, Tensor) and self._axes.get(id(value), ANY) != ANY

    def _fits_all(self, value: Any, samples: Tensor, axis: int) -> bool:
        """Say whether a weight is the same for all samples, or one of them along their axis."""
        if not isinstance(value, Tensor):
            return True
        if value.requires_grad:
            return False
        if id(value) in self._touched:
            same = self._axis(value) in (axis, ANY)
            return same and value.dim() == samples.dim()
        return value.dim() < samples.dim() - axis or value.shape[axis - samples.dim()] == 1

    def _writes(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        in_place = name.endswith("_") and not name.endswith("__")
        own = bool(args) and id(args[0]) in self._sums  # a term added to in place
        return (
            (in_place and not own)
            or (name.startswith(("__set", "__del", "__i")) and name not in functionals.READS)
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
                self._axes[id(result)] = ANY
                self._note(name, _fill(name, args, kwargs), result, [])
            return
        if not touched or name in functionals.QUERIES or name in functionals.PROPERTIES:
            return
        if not isinstance(result, Tensor):
            raise UnfollowableError  # it read a value: what follows may depend on it
        if any(id(t) in self._sums for t in touched):
            self._follow_sum(name.strip("_"), args, kwargs, result)
            return
        if name in functionals.LIKE and not any(isinstance(a, Tensor) for a in args[1:]):
            axis: int | None = ANY
        else:
            axis = self._moved(name, args, kwargs, result) if len(touched) == 1 else None
        self._axes.pop(id(result), None)
        if axis is not None:
            self._axes[id(result)] = axis
        options = () if name in functionals.RESHAPES else (*args[1:], *sorted(kwargs.items()))
        numbers = tuple(g for g in options if not isinstance(g, Tensor))
        if name == "contiguous":  # itself where it lies so, and that may depend on the size
            self._places[id(result)] = self._places[id(touched[0])]
        self._note(name, numbers, result, touched)

    def _moved(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> int | None:
        if name in ("detach", "data") and args:
            return self._axis(args[0])
        first = args[0] if args else None
        axis = self._axes.get(id(first))
        if axis == ANY:
            return ANY if name in functionals.ELEMENTWISE | functionals.RESHAPES else None
        if axis is None:
            return None
        return functionals.axis_after(name, args, kwargs, result, axis, self._size)

    def _follow_sum(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> None:
        """Note the result of arithmetic on terms as a weighted sum of them, if it is one."""
        before = [self._sums.get(id(arg), arg) for arg in args]
        self._sums.pop(id(result), None)
        self._touch(result)
        combined = arithmetic(name, before) if not kwargs else None
        if combined is not None:
            self._sums[id(result)] = combined

    def _note(
        self, name: str, numbers: tuple[Any, ...], result: Tensor, sources: list[Tensor]
    ) -> None:
        places = tuple(self._places.get(id(source), ANY) for source in sources)
        self.calls.append((name, numbers, places, result.shape, self._axes.get(id(result))))
        self._touch(result)

    def _touch(self, tensor: Tensor) -> None:
        self._touched[id(tensor)] = tensor.grad_fn
        self._places.setdefault(id(tensor), len(self._alive))
        self._alive.append(tensor)

    def _intact(self, tensor: Tensor) -> bool:
        """Return whether the traced functions give its gradient, not a custom autograd.Function.

        Those run their forward here, and replace the graph of the result afterwards.
        """
        return self._touched.get(id(tensor)) is tensor.grad_fn


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


def _name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", "")
    if name == "__get__":  # a property: Tensor.shape and its like
        return str(getattr(getattr(func, "__self__", None), "__name__", ""))
    return name
