"""Trace of a loss function on outputs without data: its terms, and the samples on their way.

`LossTrace` runs a loss function, and follows the dimension of the samples from the outputs and the
targets through functions in which no sample meets another (`loss/functionals.py`) to the terms:
torch's losses, and means and sums of values that the loss computes itself. Any other function on
the way makes the loss coupled. Two traces of different numbers of samples must show the same calls
(`same_calls`), so that no number but the weights of the terms depends on the size.

    ((out - y) ** 2).mean()             out, y ── sub ── pow ── mean: a term, over N * d
    (nll * mask).sum() / mask.sum()     a term, over the sum of the targets' mask
    1 - score.mean()                    a term and a constant
    (out @ out.T).mean()                samples meet: coupled
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from anybatch.core import pytree
from anybatch.core.modules import keywords
from anybatch.loss import functionals
from anybatch.loss.functionals import ELEMENTWISE, JOINS, TABLE, divides, own_values
from anybatch.loss.terms import (
    ANY,
    BOUNDS,
    CONVERTS,
    FIXED,
    SIGNS,
    CallLog,
    ConstantTerm,
    Record,
    Sum,
    Term,
    TermTrace,
    UnfollowableError,
    Weighed,
    arithmetic,
    filled_with,
    in_order,
    listed,
    lower_bound,
    numbers_of,
    scaled_sum,
    tensors_of,
    torchs_name,
    version_of,
)

Call = tuple[str, tuple[Any, ...], tuple[int, ...], torch.Size, int | None]
"""A function, the numbers it is given, which tensors, and the shape and axis of the result."""

MEAN = {"reduction": "mean"}

MADE = functionals.CONSTANTS | {"arange", "linspace", "eye"}
"""Functions that make a tensor of numbers."""

KEYWORDS = frozenset(
    "input other dim keepdim dtype device memory_format copy non_blocking min max alpha value p "
    "eps ord correction descending stable largest sorted k chunks split_size num_classes "
    "negative_slope beta threshold approximate rounding_mode weight bias index tensors x1 x2 "
    "start_dim end_dim shape dims dim0 dim1 source destination mask condition fill_value tensor1 "
    "tensor2 exponent size nan posinf neginf decimals requires_grad inplace out _stacklevel "
    "min_val max_val".split()
)
"""Keywords that the rules read, or that say nothing about samples: ``axis=`` is none of them."""

PLAIN = (Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # type: ignore[attr-defined]

NEW = ("new_zeros", "new_ones")

OF_FIXED = (
    ELEMENTWISE
    | JOINS
    | functionals.ALONG
    | functionals.RESHAPES
    | frozenset("t T mT transpose permute unsqueeze squeeze __getitem__ detach data".split())
)
"""Functions that compute the same of the same tensors in every call."""


class LossTrace(TermTrace[Term]):
    """Function mode that traces a loss function run inside it, for `combination`.

    Args:
        outputs: tree of meta tensors, and for each of them the dimension of the samples, or None.
        targets: tree of tensors of any device whose first dimension is the samples.
        size: the number of samples.
        device: where the model's outputs really are: the loss may ask.

    Attributes:
        calls: every call with samples, and its result.
        log: every call, and the numbers that it was given.
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
        self.log = CallLog(outputs[0], targets)
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
        found = None if self._failed else super().combination(result)
        counted = found is None or all(_is_counted(term) for _, term in found)
        return found if counted else None  # a sum of integers has no gradient

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and record its effect on samples and terms."""
        kwargs = keywords(func, kwargs)
        self.log.call(func, args, kwargs)
        try:
            if not all(map(is_plain, types)):
                raise UnfollowableError  # its class decides what a function does
            result = self._call(func, args, kwargs)
            self.log.returned(result)
            return result
        except BaseException:
            self._failed = True  # whoever catches it
            raise

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        called = listed(func, args, kwargs)
        if called is not None:
            term = self._term(*called)
            if term is not None:
                return term
        name = torchs_name(func)
        touched = [t for t in tensors_of(args, kwargs) if self._is_traced(t)]
        if touched and name == "device":
            return self._device
        if touched and not all(map(self._intact, touched)):
            raise UnfollowableError
        if self._writes(name, args, kwargs) or name in functionals.STATEFUL:
            raise UnfollowableError  # to state of its own, if not to these: it would stay
        operands = [self._operand(arg) for arg in args]
        of_terms = any(self._records[id(t)].sums is not None for t in touched)
        args_here, kwargs_here = _on_one_device(args, kwargs)
        result = func(*args_here, **kwargs_here)
        if of_terms and isinstance(result, Tensor):
            self._combine(name, operands, args, kwargs, result)
        else:
            self._follow(name, args, kwargs, result, touched)
        return result

    def _is_traced(self, tensor: Tensor) -> bool:
        """Say whether a tensor is computed from the batch, or is a constant of any size."""
        found = self._records.get(id(tensor))
        return found is not None and found.axis != FIXED

    def _combine(
        self,
        name: str,
        operands: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Tensor,
    ) -> None:
        record, first = self._record(result), self._intact(args[0])
        weights = None if first is None else first.weights
        if weights is not None:
            number = lower_bound(name, args[1:], kwargs)
            if number is not None:
                record.weights = replace(weights, bounds=(*weights.bounds, (BOUNDS[name], number)))
            elif name in CONVERTS:
                record.weights = replace(weights, bounds=(*weights.bounds, ("type", result.dtype)))
        if name == "stack" and len(args) == 1 and not kwargs:
            stacked = [self._operand(one) for one in args[0]]
            record.stack = stacked if all(isinstance(one, dict) for one in stacked) else None
        name, operands = in_order(name.strip("_"), operands)
        record.sums = None if kwargs else arithmetic(name, operands)
        if record.sums is None and not kwargs and operands and isinstance(operands[0], dict):
            record.sums = self._with_number(name, *operands)
            record.sums = record.sums or self._by_weights(name, operands[0], args[1:])
        self._note(name, (record.weights and record.weights.bounds,), result, [])

    def _with_number(self, name: str, sums: Sum, *other: Any) -> Sum | None:
        if name not in SIGNS or len(other) != 1 or not isinstance(other[0], Real):
            return None
        sign, of_number = SIGNS[name]
        found = scaled_sum([sums], sign)
        found[len(self.terms)] = of_number * float(other[0])
        empty = _nothing()
        self.terms.append(ConstantTerm(-1, float, {}, (), empty, samples=self._size))
        return found

    def _by_weights(self, name: str, sums: Sum, other: tuple[Any, ...]) -> Sum | None:
        divisor = self._intact(other[0]) if len(other) == 1 else None
        weights = None if divisor is None else divisor.weights
        if name not in ("div", "true_divide") or weights is None:
            return None
        if any(self.terms[index].divides for index in sums):
            return None
        found = Sum()
        for index, weight in sums.items():
            found[len(self.terms)] = weight
            self.terms.append(replace(self.terms[index], by=weights))
        return found

    def _term(self, func: Callable[..., Any], arguments: dict[str, Any]) -> Tensor | None:
        index, self._listed_calls = self._listed_calls, self._listed_calls + 1
        entry = TABLE[func]
        stacked = self._intact(arguments.get("input"))
        if func is own_values and stacked is not None and stacked.stack is not None:
            return self._of_stacked(stacked.stack, arguments["reduction"])
        every = arguments.get("reduction") == "none" and divides(func, {**arguments, **MEAN})
        if not (every or divides(func, arguments) is not None):
            return None
        if not self._is_separate(entry, arguments):
            return None
        if every:
            return self._each(func, entry, arguments)
        constants = tuple(n for n in entry.constants if not self._is_sample(arguments.get(n)))
        empty = _nothing()
        samples = {name: arguments[name] for name in entry.rows if self._is_sample(arguments[name])}
        axes = {name: self._records[id(one)].axis or 0 for name, one in samples.items()}
        own = (index, func, arguments, constants, empty)
        self._add(empty, Term(*own, samples=self._size, axes=axes))
        self._note_rows(entry, arguments)
        values = arguments.get("input")
        sums = func is own_values and arguments["reduction"] == "sum"
        if sums and isinstance(values, Tensor) and not values.requires_grad:
            self._record(empty).weights = Weighed(values, Record.of(empty))
        return empty

    def _of_stacked(self, stack: list[Sum], reduction: str) -> Tensor:
        empty = _nothing()
        share = 1.0 / len(stack) if reduction == "mean" else 1.0
        self._record(empty).sums = scaled_sum(stack, share)
        self._note(reduction, (len(stack),), empty, [])
        return empty

    def _note_rows(self, entry: functionals.Functional, arguments: dict[str, Any]) -> None:
        for name in entry.rows:
            if isinstance(arguments[name], Tensor):
                numbers = (torch.is_grad_enabled(),)
                self._note(name, numbers, arguments[name], [arguments[name]])

    def _each(
        self, func: Callable[..., Any], entry: functionals.Functional, arguments: dict[str, Any]
    ) -> Tensor | None:
        """Return the losses of a call without a reduction, with the axis of their samples."""
        every = [value for value in arguments.values() if isinstance(value, Tensor)]
        rows = [arguments[n] for n in entry.rows if isinstance(arguments[n], Tensor)]
        for one in every:
            self._fix(one)
        result: Tensor = func(**_on_one_device((), arguments)[1])
        by_place = None in entry.rows.values()  # element by element, and broadcast
        axis = self._joined(rows, result) if by_place else 0
        self._record(result).axis = None if None in map(self._axis, every) else axis
        options = tuple(v for v in arguments.values() if not isinstance(v, Tensor))
        self._note(func.__name__, options, result, every)
        return result

    def _is_separate(self, entry: functionals.Functional, arguments: dict[str, Any]) -> bool:
        if entry.has_other_tensors(arguments):
            return False
        axes = set()
        for name, wanted in entry.rows.items():
            axis = self._axis(arguments[name])
            if axis in (None, FIXED) or (wanted is not None and axis not in (wanted, ANY)):
                return False
            if axis != ANY:
                axes.add(axis if wanted is None else 0)
        if len(axes) != 1 or not entry.fits(arguments):
            return False
        if any(self._is_traced(arguments[name]) for name in entry.parameters if name in arguments):
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
        return found is not None and found.axis not in (None, ANY, FIXED)

    def _fits_all(self, value: Any, samples: Tensor, axis: int) -> bool:
        """Say whether a weight is the same for all samples, or one of them along their axis."""
        if not isinstance(value, Tensor):
            return True
        if value.requires_grad or value.is_meta:  # one without data cannot be compared
            return False
        if self._is_traced(value):
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
        if name in MADE and isinstance(result, Tensor) and not touched:
            self._made(name, args, kwargs, result)
            return
        if name in functionals.QUERIES or name in functionals.PROPERTIES:
            return
        if not touched:
            self._follow_fixed(name, args, kwargs, result)
            return
        results = [result] if isinstance(result, Tensor) else _several(name, result)
        every = tensors_of(args, kwargs)
        for one in every:
            self._fix(one)
        sized = name in functionals.RESHAPES | functionals.EXPANDS or name in NEW
        numbers = () if sized else numbers_of(args, kwargs)
        for one in results:
            if (name in functionals.LIKE or name in NEW) and len(every) == 1:
                axis: int | None = ANY
                if name in NEW and not one.dim():
                    self._record(one).number = filled_with(name, None, one)
            else:
                axis = self._after(name, args, kwargs, one, every)
            self._record(one).axis = axis
            if name == "contiguous":  # itself where it lies so, and that may depend on the size
                self._record(one).place = self._record(touched[0]).place
            self._note(name, numbers, one, every)

    def _made(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> None:
        record = self._record(result)
        if name == "arange" and args == (self._size,):
            record.counts = True  # its axis is none: it begins again in each part
            self._note(name, ("the samples",), result, [])
            return
        of_any_size = name in functionals.FILLED or result.dim() == 0
        if of_any_size or _are_numbers((args, kwargs)):
            record.axis = ANY if of_any_size else FIXED
            if name != "full" and args and not result.dim():
                record.number = filled_with(name, args[0], result)
            self._note(name, _fill(name, args, kwargs), result, [])

    def _follow_fixed(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Record a tensor that is computed of tensors from outside of the loss only."""
        every = tensors_of(args, kwargs)
        if not every or name not in OF_FIXED or not isinstance(result, Tensor):
            return
        for one in every:
            self._fix(one)
        if all(self._axis(one) in (FIXED, ANY) for one in every):
            self._record(result).axis = FIXED
            self._note(name, numbers_of(args, kwargs), result, every)

    def _fix(self, tensor: Tensor) -> None:
        """Record a tensor from outside of the loss, by its identity: none is made in a call of it.

        One without data, or with a graph, was computed in a way that is not traced.
        """
        if id(tensor) in self._records:
            return
        made = tensor.is_meta or tensor.grad_fn is not None
        self._record(tensor).axis = None if made else FIXED
        self._note("outside", (id(tensor), version_of(tensor)), tensor, [])

    def _after(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Tensor,
        every: list[Tensor],
    ) -> int | None:
        if not KEYWORDS.issuperset(kwargs):
            return None
        pair = name in ("max", "min") and len(every) == len(args) == 2 and not kwargs
        if pair or (name in JOINS and _are_numbers(numbers_of(args, kwargs))):
            return self._joined(every, result)
        if name in functionals.EXPANDS:
            return self._expanded(args[0], result)
        if len(every) == 1:
            return self._moved(name, args, kwargs, result)
        if name == "__getitem__":
            return self._found(*args)
        axes = [self._axis(one) for one in every]
        if name in ("to", "type", "type_as"):
            return axes[0]
        if FIXED in axes[1:] and axes[0] is not None and axes[0] >= 0:
            rest = all(axis == FIXED for axis in axes[1:])
            return functionals.axis_after_matrix(name, args, kwargs, axes[0]) if rest else None
        traced = [(one, at) for one, at in zip(every, axes, strict=True) if at is not None]
        if len(traced) < len(every) or any(at < 0 for _, at in traced):
            return None
        return functionals.axis_after_join(name, args, kwargs, traced)

    def _expanded(self, tensor: Tensor, result: Tensor) -> int | None:
        """Return the axis of a tensor that is repeated along other dimensions."""
        axis = self._axis(tensor)
        if axis is None or axis < 0:
            return axis
        after = result.dim() - tensor.dim() + axis
        return after if result.shape[after] == tensor.shape[axis] else None

    def _found(self, tensor: Tensor, index: Any) -> int | None:
        """Return the axis of ``weights[classes]``, or of ``rows[arange(samples), classes]``."""
        axis, last = self._axis(tensor), index[-1] if isinstance(index, tuple) and index else index
        if not isinstance(last, Tensor) or last.is_floating_point() or last.dtype == torch.bool:
            return None
        at = self._axis(last)
        if at is None or at < 0:
            return None
        if isinstance(index, Tensor):
            return at if axis == FIXED else None
        if len(index) != 2 or not isinstance(index[0], Tensor) or last.dim() != 1:
            return None
        first, single = self._intact(index[0]), len(tensor) == len(last) == self._size
        return 0 if axis == at == 0 and single and first is not None and first.counts else None

    def _joined(self, operands: list[Tensor], result: Tensor) -> int | None:
        """Return the axis of a result that is computed element by element; None for no single one.

        Dimensions are matched from the last one, as tensors are broadcast.
        """
        places, axes = set(), [self._axis(one) for one in operands]
        for one, axis in zip(operands, axes, strict=True):
            if axis is None:
                return None
            if axis >= 0:
                places.add((one.dim() - axis, one.shape[axis]))
        if len(places) != 1:
            return ANY if not places and FIXED not in axes else None
        ((from_last, _),) = places
        for one, axis in zip(operands, axes, strict=True):
            if axis == FIXED and one.dim() >= from_last and one.shape[-from_last] != 1:
                return None  # it has something for every sample
        return result.dim() - from_last

    def _moved(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> int | None:
        if name in ("detach", "data") and args:
            return self._axis(args[0])
        first = self._records.get(id(args[0])) if args else None
        axis = None if first is None else first.axis
        if axis == ANY:
            return ANY if name in ELEMENTWISE | functionals.RESHAPES else None
        if axis is None:
            return None
        return functionals.axis_after(name, args, kwargs, result, axis, self._size)

    def _note(
        self, name: str, numbers: tuple[Any, ...], result: Tensor, sources: list[Tensor]
    ) -> None:
        places = tuple(self._record(source).place for source in sources)
        numbers = *numbers, torch.is_grad_enabled(), torch._C._is_any_autocast_enabled()
        self.calls.append((name, numbers, places, result.shape, self._record(result).axis))


def same_calls(a: LossTrace, b: LossTrace) -> bool:
    """Say whether two traces have the same calls, but for the number of samples."""

    def same_shape(x: torch.Size, y: torch.Size, axis: int | None) -> bool:
        grown = [i * b._size == j * a._size for i, j in zip(x, y, strict=False)]
        equal = [i == j for i, j in zip(x, y, strict=False)]
        free = axis is None or axis == ANY  # no samples: filled to the size, or not
        agrees = [e or (free and g) for e, g in zip(equal, grown, strict=True)]
        if axis is not None and axis >= 0:
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
    return () if name in functionals.FILLED else (*args, *sorted(kwargs.items()))


def is_plain(class_: type) -> bool:
    """Say whether functions of torch treat tensors of a class as any others."""
    own = getattr(class_, "__torch_function__", None)
    return getattr(own, "__func__", own) in PLAIN


def _are_numbers(values: Any) -> bool:
    plain = Real | str | torch.dtype | torch.device | torch.layout | None
    return all(isinstance(leaf, plain) for _, leaf in pytree.leaves(values))


def _several(name: str, result: Any) -> list[Tensor]:
    many = name in functionals.SPLITS or name in functionals.REDUCTIONS
    every = list(result) if many and isinstance(result, tuple | list) else []
    tensors = [one for one in every if isinstance(one, Tensor)]
    if not every or len(tensors) < len(every):
        raise UnfollowableError
    return tensors


def _on_one_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a call, those with data without it, where another one has none."""
    every = [tensor.is_meta for tensor in tensors_of(args, kwargs)]
    if all(every) or not any(every):
        return args, kwargs
    bare: tuple[Any, dict[str, Any]] = pytree.map_tensors(_bare, (tuple(args), dict(kwargs)))
    return bare


def _bare(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    bare = torch.empty_like(tensor, device="meta")
    return bare.requires_grad_(tensor.requires_grad)


def _is_counted(term: Term) -> bool:
    values = term.arguments.get("input") if term.function is own_values else None
    return values is None or bool(values.is_floating_point() or values.is_complex())


def _nothing() -> Tensor:
    """Return an empty stand-in for a numerator, with a graph as the real one has."""
    return torch.zeros((), device="meta", requires_grad=torch.is_grad_enabled()).clone()
