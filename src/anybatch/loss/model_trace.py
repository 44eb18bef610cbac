"""Trace of the torch losses that a model calls in its forward, and of their weights in its loss.

``model(input_ids, labels=labels).loss`` does not show its denominator. The functional that the
model called does. `TracingMode` answers each call of a listed functional with ``numerator /
denominator`` of its rows, stores both, and traces the result to the loss:

    forward ... F.cross_entropy(a, t) ... F.mse_loss(b, s) ...   loss = 0.5 * first + second
                numerator_1 / D_1           numerator_2 / D_2       {1: 0.5, 2: 1.0}

A mean or a sum over all elements of losses that the model has computed is one, too; such a sum
divided by another one is a weighted mean: ``(l * m).sum() / m.sum()``. Any other operation on a
term makes the loss unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from numbers import Real
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode, _pop_mode, _push_mode

from anybatch.core import pytree
from anybatch.core.modules import keywords
from anybatch.loss import functionals
from anybatch.loss.model_terms import Constant, Recipes, TermOfAll, TracedTerm, touches
from anybatch.loss.terms import (
    BOUNDS,
    CONVERTS,
    SIGNS,
    Record,
    Sum,
    TermTrace,
    Weighed,
    arithmetic,
    converts,
    filled_with,
    in_order,
    is_exact,
    lower_bound,
    name_of,
    scaled_sum,
)

SAME = frozenset("to contiguous reshape view squeeze unsqueeze mean sum".split())
"""Functions that do not change a single number."""

PLAIN, TOUCHES, LOSS, REDUCES, STACKS, FILLED = 1, 2, 3, 4, 5, 6
FILLS = frozenset(
    (torch.zeros, torch.ones, torch.tensor, torch.zeros_like, torch.ones_like, Tensor.new_zeros)
)
"""Functions that make a number that is the same for all samples."""
REDUCTIONS = {torch.mean: "mean", Tensor.mean: "mean", torch.sum: "sum", Tensor.sum: "sum"}


@cache
def _category(func: Any) -> int:
    """Say whether a function matters: a forward calls hundreds, and waits for each answer."""
    if func in REDUCTIONS:
        return REDUCES
    if func in (torch.stack, torch.cat):
        return STACKS
    if func in FILLS:
        return FILLED
    return LOSS if func in functionals.TABLE else TOUCHES if touches(func) else PLAIN


class TracingMode(TermTrace[TracedTerm]):
    """Function mode that traces the loss of a model run inside it, for `combination`.

    Args:
        inputs: arguments of the model, any tree of tensors [n, ...].

    Attributes:
        arguments: of each those that have rows, such as logits and labels.
        odd: names of functions that did something to a term that is not followed.
        rows: samples that the model is called with.
    """

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        self.rows = rows_of(inputs)
        self._aside = False
        self.arguments: list[list[Tensor]] = []
        self.odd: list[str] = []
        self._recipes = Recipes(inputs)
        self._replaced: list[Record] = []
        self._values: dict[int, Tensor] = {}

    def combination(self, result: Any) -> list[tuple[float, TracedTerm]] | None:
        """Return ``[(c_k, term_k)]`` of the model's loss, or None where it is not one."""
        every = [*self._replaced, *self._records.values()]
        if any(map(self._lost_its_graph, every)):
            self.odd.append("checkpoint, with use_reentrant=True")
            return None
        if any(record.tensor._backward_hooks for record in every):
            self.odd.append("register_hook")  # it would get another gradient, or none
            return None
        return super().combination(result)

    def _lost_its_graph(self, record: Record) -> bool:
        """Say whether a value has got a graph that its terms have not: they were made without."""
        graphs = [self.terms[index].numerator.requires_grad for index in record.sums or ()]
        return bool(graphs) and record.tensor.requires_grad and not any(graphs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a listed functional, trace its result and the labels, and run all others."""
        kwargs = keywords(func, kwargs)
        if self._aside:
            return func(*args, **kwargs)
        category = _category(func)
        if category == PLAIN and not self._records:
            return func(*args, **kwargs)
        if category == LOSS:
            value = self._term(func, functionals.bind(func, args, kwargs))
            if value is not None:
                return value
        operands = [self._operand(arg) for arg in args] if self._records else []
        first = self._intact(args[0]) if args else None
        result = func(*args, **kwargs)
        if any(isinstance(one, dict) for one in operands):
            self._follow(name_of(func).strip("_"), operands, args, kwargs, result)
        elif category == TOUCHES:
            self._recipes.follow(func, args, kwargs, result)
        elif category in (STACKS, FILLED, REDUCES):
            self._made(category, func, (*args, *kwargs.values())[0], result)
        if first is not None and isinstance(result, Tensor) and result is not args[0]:
            self._convert(name_of(func), first, (args[1:], kwargs), result)
        return result

    def _made(self, category: int, func: Callable[..., Any], first: Any, result: Any) -> None:
        if category == STACKS:
            self._stacked(first, result)
        elif category == FILLED:
            number = filled_with(name_of(func), first, result)
            if number is not None:
                self._record(result).number = number
        else:
            self._reduced(REDUCTIONS[func], first, result)

    def _stacked(self, parts: Any, result: Tensor) -> None:
        sums = [self._operand(one) for one in parts]
        if result.dim() == 1 and sums and all(isinstance(one, dict) for one in sums):
            self._record(result).stack = sums

    def _convert(self, name: str, source: Record, options: tuple[Any, Any], result: Tensor) -> None:
        """Record a number, or a sum of weights, in another type or with a bound."""
        if name in CONVERTS and source.number is not None:
            self._record_number(source.number, result)
        if source.weights is None:
            return
        if converts(name, result):
            self._record(result).weights = source.weights
        elif (number := lower_bound(name, *options)) is not None:
            bounds = (*source.weights.bounds, (BOUNDS[name], number))
            self._record(result).weights = replace(source.weights, bounds=bounds)

    def _record_number(self, number: float, result: Tensor) -> None:
        """Record a number, where a tensor of this type does not round it."""
        if is_exact(number, result.dtype):
            self._record(result).number = number

    def weights(self) -> list[Tensor]:
        """Return the constants of the terms, which must be of no sample."""
        found = [term.arguments[name] for term in self.terms for name in term.constants]
        found += [one for term in self.terms for one in term.factors]
        return [one for one in found if isinstance(one, Tensor)]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Trace nothing in the body."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    def of_all(self, value: Tensor, fn: Callable[..., Tensor]) -> Tensor:
        """Record a value that the full batch shares as a term, and return it."""
        if self._aside:
            return value
        with self.aside():
            value = value.clone()  # it is one's own, whatever else returns the same
            sums = value * self.rows
        self._add(value, self._shared(TermOfAll, source_of(fn), sums))
        return value

    def _shared(self, term_type: type[TermOfAll], function: Any, sums: Tensor) -> TermOfAll:
        return term_type(
            index=len(self.terms),
            function=function,
            arguments={},
            constants=(),
            numerator=sums,
            count=self.rows,
            recipes={},
            shapes={},
            dtypes={},
            bytes=0,
        )

    def _term(self, func: Callable[..., Any], arguments: dict[str, Any]) -> Tensor | None:
        """Return the value of a listed functional from its numerator; None for another form."""
        entry, divides = functionals.TABLE[func], functionals.divides(func, arguments)
        if divides is None or any(map(_is_wrapped, arguments.values())):
            return None
        if (
            func is F.ctc_loss
            and arguments["log_probs"].dim() == 3
            and arguments["targets"].dim() == 1
        ):
            each = functionals.aligned(arguments)  # labels one after the other are no rows
            value = each.mean() if divides else each.sum()
            self._reduced("mean" if divides else "sum", each, value)
            return value
        if not self._fits(entry, arguments):
            return None
        sums = functionals.numerator(func, arguments)
        count = entry.count(arguments) if divides else 1
        value = sums / count if divides else sums.clone()
        if not divides:  # it may be divided by a count: its rows stand for its values
            self._values[len(self.terms)] = arguments[next(iter(entry.rows))]
        self._note(value, func, arguments, sums, count)
        return value

    def _reduced(self, reduction: str, values: Any, result: Any) -> None:
        if not isinstance(values, Tensor) or not isinstance(result, Tensor):
            return
        if result.dim() or not values.dim() or _is_wrapped(values) or result.is_inference():
            return
        stacked = self._intact(values)
        if stacked is not None and stacked.stack is not None:
            share = 1.0 / len(stacked.stack) if reduction == "mean" else 1.0
            self._record(result).sums = scaled_sum(stacked.stack, share)
            return
        if reduction == "sum" and not result.requires_grad:
            self._record(result).weights = Weighed(values, Record.of(result.detach()))
        if not values.is_floating_point():
            return
        count = values.numel() if reduction == "mean" else 1
        wide = result.float() if result.dtype == torch.float16 else result
        arguments = {"input": values, "reduction": reduction}
        self._values[len(self.terms)] = values
        self._note(result, functionals.own_values, arguments, wide * count, count)

    def _by_weights(self, sums: Any, weight: Any, result: Tensor) -> Sum | None:
        record = self._intact(weight)
        weights = None if record is None else record.weights
        if weights is None or not weights.total.intact or result.dim():
            return None
        if not isinstance(sums, dict):
            return None
        if any(index not in self._values or self.terms[index].divides for index in sums):
            return None
        found = Sum()
        for index, factor in sums.items():
            arguments = {
                "input": self._values[index],
                "weight": weights.values,
                "reduction": "mean",
            }
            found[len(self.terms)] = factor
            term = self.terms[index]
            self._note(
                result,
                functionals.own_weighted_values,
                arguments,
                term.numerator,
                weights.total.tensor,
            )
            bounds = weights.bounds
            self.terms[-1] = replace(self.terms[-1], factors=term.factors, bounds=bounds)
        return found

    def _with_number(self, name: str, operands: list[Any], result: Tensor) -> Sum | None:
        """Return a sum of terms after arithmetic with one number; None where that is no such sum.

        The number may be a 0-dim tensor that the model has computed, such as a learned weight:
        ``(-s).exp() * loss + s``. The inspection shows that it depends neither on a sample nor on
        the number of samples (test_what_is_no_sum_over_samples_is_refused).
        """
        factors: tuple[Tensor, ...] = ()
        match operands:
            case [dict() as sums, Real() as number]:
                value, weight = torch.ones_like(result.detach()), float(number)
            case [dict() as sums, Tensor() as value] if self._is_new_number(value):
                factors, weight = (value,), 1.0
            case _:
                return None
        if name in SIGNS:
            sign, other = SIGNS[name]
            found = {**scaled_sum([sums], sign), len(self.terms): other * weight}
            term = self._shared(Constant, None, value * self.rows)
            self.terms.append(replace(term, factors=factors))
            return found
        if not factors or name not in ("mul", "div", "true_divide"):
            return None
        return self._times_value(sums, value, inverse=name != "mul")

    def _is_new_number(self, value: Tensor) -> bool:
        """Say whether a tensor is one number without a record: none that was written to since."""
        return not value.dim() and value.is_floating_point() and id(value) not in self._records

    def _times_value(self, sums: Sum, value: Tensor, *, inverse: bool) -> Sum:
        """Return a sum of terms, each multiplied by a value or divided by it."""
        factor, found = 1 / value if inverse else value, Sum()
        for index, weight in sums.items():
            term, place = self.terms[index], len(self.terms)
            found[place] = weight
            if index in self._values:
                self._values[place] = self._values[index]
            numerator, factors = term.numerator * factor, (*term.factors, value)
            self.terms.append(replace(term, index=place, numerator=numerator, factors=factors))
        return found

    def _note(
        self,
        value: Tensor,
        func: Callable[..., Any],
        arguments: dict[str, Any],
        numerator: Tensor,
        count: functionals.Count,
    ) -> None:
        entry = functionals.TABLE[func]
        row_arguments = {n: arguments[n] for n in entry.rows if isinstance(arguments[n], Tensor)}
        own = func in (functionals.own_values, functionals.own_weighted_values)
        axes = {n: self._axis(t) if own else entry.rows[n] or 0 for n, t in row_arguments.items()}
        with_rows = {n: t.movedim(axes[n], 0) for n, t in row_arguments.items()}
        left_out = {*with_rows, *entry.parameters}  # what a graph would be kept for
        first = next(iter(with_rows.values()))
        self.arguments.append(list(with_rows.values()))
        self._add(
            value,
            TracedTerm(
                index=len(self.terms),
                function=func,
                arguments={n: None if n in left_out else v for n, v in arguments.items()},
                constants=tuple(n for n in entry.constants if arguments.get(n) is not None),
                numerator=numerator,
                count=count,
                recipes={n: self._recipes.of(t) for n, t in row_arguments.items()},
                shapes={n: t.shape for n, t in with_rows.items()},
                dtypes={n: t.dtype for n, t in with_rows.items()},
                bytes=first.numel() * first.element_size(),
            ),
        )

    def _axis(self, values: Tensor) -> int:
        """Return the dimension of a model's own values in which the samples lie: first, or [T, n].

        If it is another one, their rows belong to other samples, which the inspection finds.
        """
        if not self.rows or values.shape[0] % self.rows == 0:
            return 0
        return next((d for d, size in enumerate(values.shape) if size == self.rows), 0)

    def _fits(self, entry: functionals.Functional, arguments: dict[str, Any]) -> bool:
        """Return whether samples are the first dimension, and no weight belongs to a sample."""
        if not entry.fits(arguments) or entry.has_other_tensors(arguments):
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
        self,
        name: str,
        operands: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        if not isinstance(result, Tensor):
            return  # a question
        replaced = self._records.pop(id(result), None)
        if replaced is not None:  # written to in place
            self._replaced.append(replaced)
        name, operands = in_order(name, operands)
        first = operands[0]
        combined = None if kwargs else arithmetic(name, operands)
        if combined is None and name in ("div", "true_divide") and len(args) == 2:
            combined = self._by_weights(first, args[1], result)
        if combined is None and not kwargs and result.dim() == 0:
            combined = self._with_number(name, operands, result)
        if combined is None and name in SAME and isinstance(first, dict) and result.numel() == 1:
            combined = first
        if combined is None:
            self.odd.append(name)
        else:
            self._record(result).sums = combined


def _is_wrapped(value: Any) -> bool:
    """Say whether a tensor stands for many, in a function of torch.func's."""
    wrapped: bool = isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(
        value
    )
    return wrapped


def is_parameter(value: Any) -> bool:
    """Say whether a tensor is a parameter or a view of one: computed from no sample."""
    if not isinstance(value, Tensor):
        return False
    base = value if value._base is None else value._base
    return isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)


def source_of(fn: Any) -> Any:
    """Return the code of a function, which is the same when each forward defines it anew."""
    while isinstance(fn, partial):
        fn = fn.func
    return getattr(fn, "__code__", fn)


def rows_of(inputs: Any) -> int:
    """Return how many samples inputs hold; 0 where they hold no tensor with rows."""
    sizes = (tensor.shape[0] for _, tensor in pytree.tensors(inputs) if tensor.dim())
    return int(next(sizes, 0))


# Parts of a model that compute no loss, and run without tracing.
#
# Tracing a call costs some microseconds, and a forward makes hundreds; the loss is taken in the few
# after the last layer. So the first forward finds the parts in which none was taken, and from then
# on `TracingMode` is off while one of them runs:
#
#     Llama:  model (quiet) │ lm_head (quiet) │ pad, [1:], cross_entropy     traced
#
# A part in which one was taken is divided further: its own parts are observed next.


class Quiet:
    """Parts of a model, each recorded as computing a loss or quiet.

    Args:
        model: its children are observed first.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._quiet: dict[nn.Module, bool] = dict.fromkeys(model.children(), False)
        self._traced: dict[nn.Module, bool] = {}
        self._handles: list[Any] = []
        self._forwards = 0
        self._stacks: dict[int, list[TracingMode | int | None]] = {}

    @contextmanager
    def around(self, tracing: TracingMode) -> Iterator[None]:
        """Trace the body, except its quiet parts; forwards of several lanes may alternate."""
        if self._forwards == 0:
            for part in self._quiet:
                self._handles.append(part.register_forward_pre_hook(self._enter))
                self._handles.append(part.register_forward_hook(self._exit, always_call=True))
        self._forwards += 1
        try:
            with tracing:
                yield
        finally:
            self._forwards -= 1
            if self._forwards == 0:
                for handle in self._handles:
                    handle.remove()
                self._handles.clear()
                self._stacks.clear()
                self._learn()

    def forget(self) -> None:
        """Trace every part from now on: a loss was computed in a part that had none."""
        self._quiet.clear()

    def _enter(self, part: nn.Module, _inputs: Any) -> None:
        top = _get_current_function_mode()  # type: ignore[no-untyped-call]
        there: TracingMode | int | None = None
        if isinstance(top, TracingMode):
            there = _pop_mode() if self._quiet.get(part) else len(top.terms)  # type: ignore[no-untyped-call]
        self._stacks.setdefault(get_ident(), []).append(there)

    def _exit(self, part: nn.Module, _inputs: Any, _outputs: Any) -> None:
        stack = self._stacks.get(get_ident())
        if not stack:  # a checkpoint computes it again, and the last forward has ended meanwhile
            return
        there = stack.pop()
        if isinstance(there, TracingMode):
            _push_mode(there)  # type: ignore[no-untyped-call]
        elif there is not None:
            top = _get_current_function_mode()  # type: ignore[no-untyped-call]
            took = isinstance(top, TracingMode) and len(top.terms) > there
            self._traced[part] = took or self._traced.get(part, False)

    def _learn(self) -> None:
        traced, self._traced = self._traced, {}
        for part, took in traced.items():
            if not took:
                self._quiet[part] = True
            else:
                del self._quiet[part]
                self._quiet.update(dict.fromkeys(part.children(), False))
