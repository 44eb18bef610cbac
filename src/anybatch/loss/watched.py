"""A plain callable as a loss: a sum of known losses where it is seen to be one, coupled otherwise.

At the first micro-batch of a step the function is called on outputs that have shapes and no data
(meta tensors), with the targets of the whole batch: that gives the weight and the denominator of
every term as the undivided batch has them. It is called once more at the size of a micro-batch, to
see that nothing but the weights depends on the size. Then each micro-batch takes its numerators.

In a rehearsal it is watched outside of it: the constants that it makes have their data then, and
can be compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from anybatch import tree
from anybatch.batch import MicroBatch
from anybatch.loss.declared import Loss, Part, Scope, Total, call_loss, scalar
from anybatch.loss.terms import Numerators, Term
from anybatch.loss.watch import Watch, same_calls
from anybatch.memory_errors import out_of_memory

Weighted = list[tuple[float, Term]]


class NotAPartError(Exception):
    """A micro-batch's loss is not the part of the whole that was seen: take the loss as coupled."""


MANY = 100
"""Calls of a loss that are known to be alike at all sizes, before they are forgotten."""


class Watched(Loss):
    """A plain callable: watched at every step."""

    def __init__(self, fn: Callable[..., Tensor]) -> None:
        self.name = "as written"
        self._fn = fn
        self._held: set[Any] = set()

    def whole(self, outputs: Any, micro: MicroBatch) -> Tensor:
        """Return the loss as the person wrote it."""
        return scalar(call_loss(self._fn, outputs, micro.targets), "the loss")

    def totals(self, scope: Scope) -> list[Total] | None:
        """Watch the loss of the whole batch, without data."""
        lazy = scope.batch is None
        real = scope.first.targets if scope.batch is None else scope.batch.targets
        whole = self._watch(scope, scope.size, None if lazy else real)
        if whole is None or not self._holds_at_all_sizes(whole, scope):
            return None
        found = whole[0] if not scope.everyone else self._of_everyone(whole, scope)
        if found is None:
            return None
        late = lazy and any(term.divides for _, term in found)
        if late and len(found) > 1:
            return None  # one late denominator can be made good at the end, not two
        if lazy:  # each micro-batch is loaded with rows as long as its own
            found = [(weight, replace(term, axes={})) for weight, term in found]
        try:
            return [
                Total(weight, None if late else term.denominator(), term) for weight, term in found
            ]
        except (RuntimeError, ValueError, IndexError):  # weights that do not fit the targets
            return None

    def parts(self, outputs: Any, micro: MicroBatch, totals: list[Total]) -> list[Part]:
        """Call the loss, and take the numerators from it.

        Raises:
            NotAPartError: it is another function of these samples than of the whole batch, or fails
                on them (``squeeze()`` of a single sample).
        """
        terms = [total.term for total in totals if total.term is not None]
        mode, outside = Numerators(terms, micro.size), sys.exception()
        try:
            with mode:
                call_loss(self._fn, outputs, micro.targets)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if out_of_memory(error, outside=outside):
                raise
            raise NotAPartError from error
        same = len(mode.found) == len(terms) and all(map(Term.part_of, mode.found, terms))
        if not same:
            raise NotAPartError
        return [Part(term.numerator, term.denominator) for term in mode.found]

    def functions(self) -> tuple[Any, ...]:
        """Return the callable."""
        return (self._fn,)

    def _of_everyone(self, here: tuple[Weighted, Watch], scope: Scope) -> Weighted | None:
        """Return the terms that were found here, weighted as in the loss of all processes."""
        every = self._watch(scope, scope.everyone, None)
        if every is None or not same_calls(every[1], here[1]) or len(every[0]) != len(here[0]):
            return None
        pairs = zip(every[0], here[0], strict=True)
        return [(weight, term) for (weight, _), (_, term) in pairs]

    def _holds_at_all_sizes(self, whole: tuple[Weighted, Watch], scope: Scope) -> bool:
        """Compare with the loss at the size of a micro-batch, once for each that calls the same."""
        shapes = tuple(tensor.shape for _, tensor in tree.tensors(scope.outputs))
        numbers = [(name, given) for name, given, *_ in whole[1].calls]
        told = repr((numbers, [(term.name, term.options()) for _, term in whole[0]]))
        key = (scope.size, shapes, told, scope.batch is None)
        if key in self._held:
            return True
        part = self._watch(scope, scope.first.size, None)
        held = (
            part is not None
            and same_calls(whole[1], part[1])
            and (scope.batch is not None or whole[0][0][0] == part[0][0][0])
        )
        if held:
            if len(self._held) > MANY:  # a weight that moves in every step
                self._held.clear()
            self._held.add(key)
        return held

    def _watch(self, scope: Scope, size: int, targets: Any) -> tuple[Weighted, Watch] | None:
        """Return the terms for `size` samples; `targets` None takes shapes for them, too."""
        with unset_fake_temporarily():
            return self._watch_outside(scope, size, targets)

    def _watch_outside(
        self, scope: Scope, size: int, targets: Any
    ) -> tuple[Weighted, Watch] | None:
        axes = iter(scope.layout)
        outputs = tree.map_tensors(lambda t: _shape_only(t, next(axes), size), scope.outputs)
        if targets is None and scope.first.targets is not None:
            targets = tree.map_tensors(
                lambda t: _shape_only(t, 0 if t.dim() else None, size), scope.first.targets
            )
        device = next((t.device for _, t in tree.tensors(scope.outputs)), torch.device("cpu"))
        watch = Watch((outputs, scope.layout), targets, size, device)
        try:
            with watch:
                result = call_loss(self._fn, outputs, targets)
            found = watch.combination(result)
        except Exception:  # whatever it did with data that is not there: not known
            return None
        return None if found is None else (found, watch)


class Rehearsed(Watched):
    """The same where fewer rows are tried than the batch has.

    A loss that closes over something for every sample of the batch (labels, weights) takes all of
    them only. A step calls it so; in a rehearsal of fewer rows a sum of the outputs stands for it.
    """

    def __init__(self, loss: Watched) -> None:
        super().__init__(loss._fn)
        self._held = loss._held

    def whole(self, outputs: Any, micro: MicroBatch) -> Tensor:
        """Return the loss as the person wrote it, if it can be had, with a gradient in any case."""
        outside = sys.exception()
        try:
            return super().whole(outputs, micro)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            of_fakes = type(error).__module__ != "builtins"  # they have no data to tell
            if of_fakes or out_of_memory(error, outside=outside):
                raise
        floats = [t for _, t in tree.tensors(outputs) if t.is_floating_point() or t.is_complex()]
        return torch.stack([t.sum().abs() for t in floats]).sum()


def _shape_only(tensor: Tensor, axis: int | None, size: int) -> Tensor:
    shape = list(tensor.shape)
    if axis is not None:
        shape[axis] = size
    empty = torch.empty(shape, dtype=tensor.dtype, device="meta")
    return empty.requires_grad_(tensor.requires_grad)
