"""Plain callable as a loss: a sum of listed losses where traced as one, else a coupled loss.

At the first micro-batch of a step the function is called on outputs that have shapes and no data
(meta tensors), with the targets of the whole batch: that gives the weight and the denominator of
every term as the undivided batch has them. It is called once more at the size of a micro-batch, to
see that nothing but the weights depends on the size. Then each micro-batch takes its numerators.

In a rehearsal it is watched outside of it: the constants that it makes have their data then, and
can be compared.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from anybatch.core import tree
from anybatch.core.batch import MicroBatch, TensorBatch
from anybatch.core.memory_errors import out_of_memory
from anybatch.loss.declared import Loss, Part, Scope, Total, call_loss, scalar
from anybatch.loss.entries import Asked, holds, unread
from anybatch.loss.terms import Numerators, Term
from anybatch.loss.watch import Watch, same_calls

Weighted = list[tuple[float, Term]]


class NotAPartError(Exception):
    """Error for a micro-batch's loss that is no part of the traced one: the loss is coupled."""


MANY = 100
"""Calls of a loss that are known to be alike at all sizes, before they are forgotten."""


@dataclass(frozen=True)
class Seen:
    """Traced loss of the full batch, for comparison with that of its parts.

    Attributes:
        key: what other steps have in common with it, where their losses are the same.
        outputs: of the first micro-batch, without data.
        targets: the same.
        layout: where each output holds the samples.
        device: of the outputs.
        terms: weights and terms.
        watch: all that was called.
        reads: it reads rows that are no tensors.
        parts: places and sizes of the micro-batches that have been compared.
    """

    key: tuple[Any, ...]
    outputs: Any
    targets: Any
    layout: tuple[int | None, ...]
    device: torch.device
    terms: Weighted
    watch: Watch
    reads: bool
    parts: set[tuple[int, int]] = field(default_factory=set)

    @property
    def entries(self) -> bool:
        """Whether the targets hold rows that are no tensors."""
        return holds(self.targets)

    def rows(self, size: int) -> tuple[Any, Any]:
        """Return outputs and targets of so many samples, without data."""
        outputs = _of_size(self.outputs, size, self.layout)
        return outputs, _of_size(self.targets, size, None)


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
        """Return the terms of the full batch's loss, traced without data."""
        lazy = scope.batch is None
        real = scope.first.targets if scope.batch is None else scope.batch.targets
        first = _without_data(scope.outputs), _without_data(scope.first.targets)
        targets = _of_size(first[1], scope.size, None) if lazy else real
        whole, reads = self._whole(_of_size(first[0], scope.size, scope.layout), targets, scope)
        if whole is None or (reads and (lazy or scope.everyone)):
            return None  # the entries of all samples are not here
        seen = self._seen(scope, first, whole, reads=reads)
        if not self._holds_in_all_parts(seen, scope):
            return None
        found = whole[0] if not scope.everyone else self._of_everyone(seen, scope)
        if found is None:
            return None
        late = lazy and any(term.divides for _, term in found)
        if late and len(found) > 1:
            return None  # one late denominator can be made good at the end, not two
        if lazy:  # each micro-batch is loaded with rows as long as its own
            found = [(weight, replace(term, axes={})) for weight, term in found]
        try:
            counts = [None if late else term.denominator() for _, term in found]
        except (RuntimeError, ValueError, IndexError):  # weights that do not fit the targets
            return None
        if any(isinstance(count, Tensor) and count.is_meta for count in counts):
            return None  # classes that the model returns, of which only some are here
        return [
            Total(weight, count, replace(term, seen=seen))
            for (weight, term), count in zip(found, counts, strict=True)
        ]

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
        seen = terms[0].seen if terms else None
        if not same or (seen is not None and not self._is_part(seen, outputs, micro)):
            raise NotAPartError
        return [Part(term.numerator, term.denominator) for term in mode.found]

    def functions(self) -> tuple[Any, ...]:
        """Return the callable."""
        return (self._fn,)

    def _of_everyone(self, here: Seen, scope: Scope) -> Weighted | None:
        """Return the terms that were found here, weighted as in the loss of all processes."""
        every = self._watch(*here.rows(scope.everyone), here, scope.everyone)
        terms = here.terms
        if every is None or not same_calls(every[1], here.watch) or len(every[0]) != len(terms):
            return None
        return [(weight, term) for (weight, _), (_, term) in zip(every[0], terms, strict=True)]

    def _whole(
        self, outputs: Any, targets: Any, scope: Scope
    ) -> tuple[tuple[Weighted, Watch] | None, bool]:
        """Trace the loss of the full batch; return whether it reads rows that are no tensors.

        What a list says of the samples must be seen in each part of the batch, and what one among
        the outputs says of all of them is not known.
        """
        asked = Asked()
        if not (holds(outputs) or holds(targets)):
            return self._watch(outputs, targets, scope, scope.size), False
        found = self._watch(outputs, targets, scope, scope.size, asked)
        if asked.outputs or (found is not None and not asked.targets):
            return None if asked.outputs else found, False
        return self._watch(outputs, targets, scope, scope.size), True

    def _seen(
        self, scope: Scope, first: tuple[Any, Any], whole: tuple[Weighted, Watch], *, reads: bool
    ) -> Seen:
        shapes = tuple(tensor.shape for tensor in tree.flat(first))
        told = repr(
            ([call[:3] for call in whole[1].calls], [(t.name, t.options()) for _, t in whole[0]])
        )
        key = scope.size, shapes, told, scope.batch is None
        return Seen(key, *first, scope.layout, _device_of(scope.outputs), *whole, reads=reads)

    def _holds_in_all_parts(self, seen: Seen, scope: Scope) -> bool:
        """Compare with the loss of each size of a micro-batch; of each one, where it reads lists.

        All is known so before the first backward.
        """
        if seen.reads and scope.batch is not None:
            # all of them, where a rehearsal has the first few
            each = TensorBatch.micro_batches(scope.batch, scope.first.size)
            return all(self._is_part(seen, scope.outputs, micro) for micro in each)
        n = scope.first.size
        if all((seen.key, size) in self._held for size in (n, scope.size % n or n)):
            return True
        # Two calls, tail or none: what a rehearsal counts must not depend on whether there is one.
        held = [self._holds_anew(seen, size) for size in (n, scope.size % n or n)]
        return all(held)

    def _is_part(self, seen: Seen, outputs: Any, micro: MicroBatch) -> bool:
        """Return whether a micro-batch's loss is the full batch's, but for its samples."""
        if not seen.reads:
            lazy = seen.key[-1] and not seen.entries and holds(micro.targets)
            return not lazy and self._holds_at(seen, micro.size)
        place = micro.begin, micro.size
        if place in seen.parts:
            return True
        outputs = _of_size(_without_data(outputs), micro.size, seen.layout)
        if self._compare(seen, outputs, micro.targets, micro.size):
            seen.parts.add(place)
        return place in seen.parts

    def _holds_at(self, seen: Seen, size: int) -> bool:
        """Compare with the loss of so many samples, once for each that calls the same."""
        return (seen.key, size) in self._held or self._holds_anew(seen, size)

    def _holds_anew(self, seen: Seen, size: int) -> bool:
        held = self._compare(seen, *seen.rows(size), size)
        if held:
            if len(self._held) > MANY:  # a weight that moves in every step
                self._held.clear()
            self._held.add((seen.key, size))
        return held

    def _compare(self, seen: Seen, outputs: Any, targets: Any, size: int) -> bool:
        part = self._watch(outputs, targets, seen, size)
        lazy = seen.key[-1]
        return (
            part is not None
            and same_calls(seen.watch, part[1])
            and (not lazy or seen.terms[0][0] == part[0][0][0])
        )

    def _watch(
        self, outputs: Any, targets: Any, of: Scope | Seen, size: int, asked: Asked | None = None
    ) -> tuple[Weighted, Watch] | None:
        """Return the terms for `size` samples; with stand-ins, where reads are recorded."""
        device = of.device if isinstance(of, Seen) else _device_of(of.outputs)
        with unset_fake_temporarily():
            watch = Watch((outputs, of.layout), targets, size, device)
            if asked is not None:
                outputs, targets = unread(outputs, asked.outputs), unread(targets, asked.targets)
            try:
                with watch, silent():
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


@contextmanager
def silent() -> Iterator[None]:
    """Suppress warnings: no step computes such rows, or it warns again where it does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _without_data(values: Any) -> Any:
    """Return a tree of the same shapes on no device, and without graphs."""
    with unset_fake_temporarily():
        return tree.map_tensors(_empty, values)


def _empty(tensor: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    shape = tensor.shape if shape is None else shape
    empty = torch.empty(shape, dtype=tensor.dtype, device="meta")
    return empty.requires_grad_(tensor.requires_grad)


def _of_size(values: Any, size: int, layout: Sequence[int | None] | None) -> Any:
    """Return a tree without data of `size` samples, first where no layout says where they lie."""
    axes = None if layout is None else iter(layout)

    def sized(tensor: Tensor) -> Tensor:
        axis = next(axes) if axes is not None else (0 if tensor.dim() else None)
        shape = list(tensor.shape)
        if axis is not None:
            shape[axis] = size
        return _empty(tensor, shape)

    with unset_fake_temporarily():
        return tree.map_tensors(sized, values)


def _device_of(outputs: Any) -> torch.device:
    return next((t.device for t in tree.flat(outputs)), torch.device("cpu"))
