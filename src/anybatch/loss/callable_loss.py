"""Plain callable as a loss: a sum of listed losses where traced as one, else a coupled loss.

At the first micro-batch of a step the function is called on outputs that have shapes and no data
(meta tensors), with the targets of the full batch: that gives the weight and the denominator of
every term as the undivided batch has them. It is called once more at the size of a micro-batch, to
see that nothing but the weights depends on the size. Then each micro-batch takes its numerators.

In a rehearsal the function runs outside of the mode of fake tensors, so the constants that it makes
have data, and can be compared.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from anybatch.core import pytree
from anybatch.core.batch import MicroBatch, TensorBatch
from anybatch.core.modules import keywords
from anybatch.core.oom import out_of_memory
from anybatch.core.retry import Retry
from anybatch.loss.base import Loss, Part, Scope, Total, call_loss, scalar
from anybatch.loss.function_trace import LossTrace, same_calls
from anybatch.loss.functionals import numerator
from anybatch.loss.replay import (
    SUSPENDED,
    RecipeTrace,
    Replay,
    Replays,
    form_of,
    read_values,
    recipes_of,
)
from anybatch.loss.terms import CallLog, ConstantTerm, Term, listed

Weighted = list[tuple[float, Term]]


MANY = 100
"""Cached calls of a loss that were found equal at all sizes."""

MISSED = 16
"""Steps in a row with other shapes or values, after which a loss is traced in each: they move."""


@dataclass(frozen=True)
class FullBatchTrace:
    """Traced loss of the full batch, for comparison with that of its parts.

    Attributes:
        key: equal for steps with the same loss.
        outputs: of the first micro-batch, without data.
        targets: the same.
        layout: where each output holds the samples.
        device: of the outputs.
        terms: weights and terms.
        loss_trace: all that was called.
        reads: it reads rows that are no tensors.
        parts: places and sizes of the micro-batches that have been compared, and all their calls.
        replay: the terms of this loss without a call; None (default) where each step needs one.
    """

    key: tuple[Any, ...]
    outputs: Any
    targets: Any
    layout: tuple[int | None, ...]
    device: torch.device
    terms: Weighted
    loss_trace: LossTrace
    reads: bool
    parts: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    replay: Replay | None = None

    @property
    def entries(self) -> bool:
        """Whether the targets hold rows that are no tensors."""
        return holds(self.targets)

    def rows(self, size: int) -> tuple[Any, Any]:
        """Return outputs and targets of so many samples, without data."""
        outputs = _of_size(self.outputs, size, self.layout)
        return outputs, _of_size(self.targets, size, None)


class Numerators(TorchFunctionMode):
    """Function mode that records the numerators of a loss with a traced form.

    Args:
        terms: the terms of the full batch; `found` holds the same calls on other samples.
        samples: how many those are.
        rows: outputs and targets of these; None records no calls.
    """

    def __init__(self, terms: list[Term], samples: int, rows: tuple[Any, Any] | None) -> None:
        super().__init__()
        self._samples = samples
        self.found: list[Term] = []
        self.log = None if rows is None else CallLog(*rows)
        self._terms = {term.index: term for term in terms}
        self._calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the numerator for a listed functional that is a term; run all others."""
        kwargs = keywords(func, kwargs)
        if self.log is None:
            return self._answer(func, args, kwargs)
        self.log.call(func, args, kwargs)
        result = self._answer(func, args, kwargs)
        self.log.returned(result)
        return result

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        called = listed(func, args, kwargs)
        if called is not None:
            term = self._terms.get(self._calls)
            self._calls += 1
            function, arguments = called
            if term is not None and function is term.function:
                sums = numerator(function, arguments)
                own = (term.index, function, arguments, term.constants, sums)
                self.found.append(Term(*own, samples=self._samples))
                # The loss may write to its result: `loss += penalty` added to the numerator, too
                # (test_a_loss_that_writes_to_its_terms_is_exact).
                return sums.clone()
        return func(*args, **kwargs)


class CallableLoss(Loss):
    """A plain callable as a loss, traced at every step."""

    def __init__(self, fn: Callable[..., Tensor]) -> None:
        self.name = "as written"
        self._fn = fn
        self._held: dict[Any, list[Any]] = {}
        self._replays = Replays()
        self._missed = 0

    def full_batch(self, outputs: Any, micro: MicroBatch) -> Tensor:
        """Return the loss as the user wrote it."""
        return scalar(call_loss(self._fn, outputs, micro.targets), "the loss")

    def totals(self, scope: Scope) -> list[Total] | None:
        """Return the terms of the full batch's loss: those of an earlier step, or traced."""
        batch, values = scope.batch, [*scope.values]
        if batch is None or SUSPENDED[0] or not (values or read_values(self._fn, values)):
            return self._traced(scope)
        form = form_of(scope.outputs, scope.first.targets)
        key = scope.size, scope.first.size, scope.global_size, scope.layout, form
        replay = self._replays.get(key)
        if replay is not None and replay.holds(values):
            self._missed = 0
            return replay.totals(batch.targets)
        totals = self._traced(scope)
        self._missed += 1
        if form is None or totals is None or self._missed > MISSED:
            return totals
        replay = self._replay(totals, values, scope.first.size)
        if replay is None:
            return totals
        if len(self._replays) > MANY:
            self._replays.clear()
        self._replays[key] = replay
        return replay.totals(batch.targets)

    def _replay(self, totals: list[Total], values: list[Any], n: int) -> Replay | None:
        """Return the replay of a loss; None where an argument cannot be computed again.

        Args:
            totals: of the full batch.
            values: read by the loss beside its arguments.
            n: samples of a micro-batch: computed with the same numbers, or not replayed.
        """
        terms = [(total.weight, total.term) for total in totals if total.term is not None]
        trace: FullBatchTrace = terms[0][1].trace
        size = trace.key[0]
        rows = trace.rows(size)
        found, part = (
            self._watch(*one, trace, count, mode=RecipeTrace)
            for one, count in ((rows, size), (trace.rows(n), n))
        )
        if found is None or part is None or not same_calls(found[1], trace.loss_trace):
            return None
        calls = [(weight, term) for (weight, _), (_, term) in zip(terms, found[0], strict=True)]
        sources = recipes_of(*found, values)
        if sources is None or sources != recipes_of(*part, values):
            return None
        trace = replace(trace, terms=found[0], loss_trace=found[1])
        return Replay(values, calls, sources, rows[0], trace)

    def _traced(self, scope: Scope) -> list[Total] | None:
        lazy = scope.batch is None
        real = scope.first.targets if scope.batch is None else scope.batch.targets
        first = _without_data(scope.outputs), _without_data(scope.first.targets)
        targets = _of_size(first[1], scope.size, None) if lazy else real
        traced, reads = self._traced_full_batch(
            _of_size(first[0], scope.size, scope.layout), targets, scope
        )
        if traced is None or (reads and (lazy or scope.global_size)):
            return None  # the entries of all samples are not here
        trace = self._full_batch_trace(scope, first, traced, reads=reads)
        if not self._holds_in_all_parts(trace, scope):
            return None
        found = traced[0] if not scope.global_size else self._over_all_ranks(trace, scope)
        if found is None:
            return None
        late = lazy and any(term.divides for _, term in found)
        if late and len(found) > 1:
            return None  # one late denominator can be made good at the end, not two
        weighed = [term.by for _, term in found if term.by is not None]
        if weighed and (lazy or (scope.global_size and not all(one.adds for one in weighed))):
            return None  # a sum of weights that are not all here
        if lazy:  # each micro-batch is loaded with rows as long as its own
            found = [(weight, replace(term, axes={})) for weight, term in found]
        try:
            counts = [None if late else term.denominator() for _, term in found]
        except (RuntimeError, ValueError, IndexError):  # weights that do not fit the targets
            return None
        if any(isinstance(count, Tensor) and count.is_meta for count in counts):
            return None  # classes that the model returns, of which only some are here
        return [
            Total(weight, count, replace(term, trace=trace))
            for (weight, term), count in zip(found, counts, strict=True)
        ]

    def parts(self, outputs: Any, micro: MicroBatch, totals: list[Total]) -> list[Part]:
        """Return the numerators: replayed, or from a call of the loss.

        Raises:
            Retry: it is another function of these samples than of the full batch, or fails
                on them (``squeeze()`` of a single sample).
        """
        outside, replay = sys.exception(), _replay_of(totals)
        try:
            if replay is None or SUSPENDED[0]:
                return self._called(outputs, micro, totals)
            tensors = list[Tensor]()
            form = None if replay.called else form_of(outputs, micro.targets, tensors)
            if form in replay.forms:
                return replay.parts(tensors)
            parts = self._called(outputs, micro, totals)
            if form is not None:
                replay.forms.add(form)
            return parts
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if out_of_memory(error, outside=outside):
                raise
            raise Retry("coupled") from error

    def _called(self, outputs: Any, micro: MicroBatch, totals: list[Total]) -> list[Part]:
        terms = [total.term for total in totals if total.term is not None]
        called = [term for term in terms if not isinstance(term, ConstantTerm)]
        straight = _replay_of(totals) is not None  # it calls the same in every step
        mode = Numerators(called, micro.size, None if straight else (outputs, micro.targets))
        with mode:
            call_loss(self._fn, outputs, micro.targets)
        same = len(mode.found) == len(called) and all(map(Term.part_of, mode.found, called))
        trace = terms[0].trace if terms else None
        if not same or (trace is not None and not self._is_part(trace, outputs, micro)):
            raise Retry("coupled")
        if trace is not None and mode.log and mode.log.calls != self._log(trace, micro):
            raise Retry("coupled")
        parts = iter(mode.found)
        found = [
            term.of(micro.size, mode.found) if isinstance(term, ConstantTerm) else next(parts)
            for term in terms
        ]
        return [Part(term.numerator, term.denominator) for term in found]

    def describe(self, totals: list[Total]) -> str:
        """Return the loss in words."""
        replay = _replay_of(totals)
        return super().describe(totals) if replay is None else replay.name

    def functions(self) -> tuple[Any, ...]:
        """Return the callable."""
        return (self._fn,)

    def _over_all_ranks(self, here: FullBatchTrace, scope: Scope) -> Weighted | None:
        """Return the terms that were found here, weighted as in the loss of all processes."""
        every = self._watch(*here.rows(scope.global_size), here, scope.global_size)
        terms = here.terms
        if (
            every is None
            or not same_calls(every[1], here.loss_trace)
            or len(every[0]) != len(terms)
        ):
            return None
        return [(weight, term) for (weight, _), (_, term) in zip(every[0], terms, strict=True)]

    def _traced_full_batch(
        self, outputs: Any, targets: Any, scope: Scope
    ) -> tuple[tuple[Weighted, LossTrace] | None, bool]:
        """Trace the loss of the full batch; return whether it reads rows that are no tensors.

        The values of a list of samples must be read in each part of the batch, and those of a list
        among the outputs are unknown for all of them.
        """
        recorded = StandInReads()
        if not (holds(outputs) or holds(targets)):
            return self._watch(outputs, targets, scope, scope.size), False
        found = self._watch(outputs, targets, scope, scope.size, recorded)
        if recorded.outputs or (found is not None and not recorded.targets):
            return None if recorded.outputs else found, False
        return self._watch(outputs, targets, scope, scope.size), True

    def _full_batch_trace(
        self,
        scope: Scope,
        first: tuple[Any, Any],
        traced: tuple[Weighted, LossTrace],
        *,
        reads: bool,
    ) -> FullBatchTrace:
        shapes = tuple(tensor.shape for tensor in pytree.flat(first))
        log = traced[1].log.calls  # with the numbers by which terms are multiplied
        text = repr(([call[:3] for call in traced[1].calls], log))
        key = scope.size, shapes, text, scope.batch is None
        return FullBatchTrace(
            key, *first, scope.layout, _device_of(scope.outputs), *traced, reads=reads
        )

    def _holds_in_all_parts(self, trace: FullBatchTrace, scope: Scope) -> bool:
        """Compare with the loss of each size of a micro-batch; of each one, where it reads lists.

        So all denominators are counted before the first backward.
        """
        if trace.reads and scope.batch is not None:
            # A dry run, too, compares all rows, and not only its first few
            # (test_a_list_that_makes_the_last_samples_others_is_planned_for).
            each = TensorBatch.micro_batches(scope.batch, scope.first.size)
            return all(self._is_part(trace, scope.outputs, micro) for micro in each)
        n = scope.first.size
        if all((trace.key, size) in self._held for size in (n, scope.size % n or n)):
            return True
        # Two calls, tail or none: what a dry run counts must not depend on whether there is one
        # (test_class_weights_that_a_loss_makes_are_rehearsed_without_data).
        held = [self._holds_anew(trace, size) for size in (n, scope.size % n or n)]
        return all(held)

    def _is_part(self, trace: FullBatchTrace, outputs: Any, micro: MicroBatch) -> bool:
        """Return whether a micro-batch's loss is the full batch's, but for its samples."""
        if not trace.reads:
            lazy = trace.key[-1] and not trace.entries and holds(micro.targets)
            return not lazy and self._holds_at(trace, micro.size)
        place = micro.begin, micro.size
        if place in trace.parts:
            return True
        outputs = _of_size(_without_data(outputs), micro.size, trace.layout)
        log = self._compare(trace, outputs, micro.targets, micro.size)
        if log is not None:
            trace.parts[place] = log
        return log is not None

    def _log(self, trace: FullBatchTrace, micro: MicroBatch) -> list[Any]:
        if trace.reads:
            return trace.parts[micro.begin, micro.size]
        return self._held[trace.key, micro.size]

    def _holds_at(self, trace: FullBatchTrace, size: int) -> bool:
        """Compare with the loss of so many samples, once for each that calls the same."""
        return (trace.key, size) in self._held or self._holds_anew(trace, size)

    def _holds_anew(self, trace: FullBatchTrace, size: int) -> bool:
        held = self._compare(trace, *trace.rows(size), size)
        if held is not None:
            if len(self._held) > MANY:  # a weight that moves in every step
                self._held.clear()
            self._held[trace.key, size] = held
        return held is not None

    def _compare(
        self, trace: FullBatchTrace, outputs: Any, targets: Any, size: int
    ) -> list[Any] | None:
        """Return all calls of the loss of so many samples; None where they are others."""
        part = self._watch(outputs, targets, trace, size)
        lazy = trace.key[-1]
        if part is None or not same_calls(trace.loss_trace, part[1]):
            return None
        return part[1].log.calls if not lazy or trace.terms[0][0] == part[0][0][0] else None

    def _watch(
        self,
        outputs: Any,
        targets: Any,
        of: Scope | FullBatchTrace,
        size: int,
        recorded: StandInReads | None = None,
        *,
        mode: type[LossTrace] = LossTrace,
    ) -> tuple[Weighted, LossTrace] | None:
        """Return the terms for `size` samples; with stand-ins, where reads are recorded."""
        device = of.device if isinstance(of, FullBatchTrace) else _device_of(of.outputs)
        with unset_fake_temporarily():
            loss_trace = mode((outputs, of.layout), targets, size, device)
            if recorded is not None:
                outputs, targets = (
                    unread(outputs, recorded.outputs),
                    unread(targets, recorded.targets),
                )
            try:
                with loss_trace, silent():
                    result = call_loss(self._fn, outputs, targets)
                found = loss_trace.combination(result)
            except Exception:  # whatever it did with data that is not there: not known
                return None
            return None if found is None else (found, loss_trace)


def _replay_of(totals: list[Total]) -> Replay | None:
    term = totals[0].term if totals else None
    return None if term is None or term.trace is None else term.trace.replay


class Rehearsed(CallableLoss):
    """The same where fewer rows are tried than the batch has.

    A loss that closes over something for every sample of the batch (labels, weights) takes all of
    them only. A step calls it so; in a rehearsal of fewer rows a sum of the outputs stands for it.
    """

    def __init__(self, loss: CallableLoss) -> None:
        super().__init__(loss._fn)
        self._held = loss._held

    def full_batch(self, outputs: Any, micro: MicroBatch) -> Tensor:
        """Return the loss as the user wrote it, if it can be computed, always with a gradient."""
        outside = sys.exception()
        try:
            return super().full_batch(outputs, micro)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            of_fakes = type(error).__module__ != "builtins"  # they have no data to tell
            if of_fakes or out_of_memory(error, outside=outside):
                raise
        floats = [t for _, t in pytree.tensors(outputs) if t.is_floating_point() or t.is_complex()]
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
        return pytree.map_tensors(_empty, values)


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
        return pytree.map_tensors(sized, values)


def _device_of(outputs: Any) -> torch.device:
    return next((t.device for t in pytree.flat(outputs)), torch.device("cpu"))


# Rows that are no tensors: whether a loss reads the lists, texts and arrays of its samples.
#
# torch can trace operations on tensors, but not Python's on a list, such as the largest of its
# entries. So a loss is first called with placeholders, which have no values: if it reads one, its
# result may depend on the other samples.

ASKS = (
    "len getitem setitem delitem iter next reversed contains bool int float index complex hash "
    "repr str format bytes array array_function array_ufunc eq ne lt le gt ge add radd iadd sub "
    "rsub mul rmul imul truediv rtruediv floordiv mod pow neg abs and or xor invert call enter"
).split()
"""Names, without underscores, that Python looks up on a type and not on the object."""


class UnreadError(Exception):
    """Error for a read of a stand-in, which has no values."""


class StandIn:
    """Stand-in for a list, text or array of samples, which records a read and fails.

    Args:
        leaf: the value that it replaces.
        reads: the type of the leaf is added to it, for each read.
    """

    def __init__(self, leaf: Any, reads: list[type]) -> None:
        object.__setattr__(self, "_stands", (type(leaf), reads))

    def __getattribute__(self, name: str) -> Any:
        """Return its class, which all parts of the batch share; record and refuse other reads."""
        type_, reads = object.__getattribute__(self, "_stands")
        if name == "__class__":
            return type_
        reads.append(type_)
        raise UnreadError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse it."""
        getattr(self, name)


def _reader(name: str) -> Callable[..., Any]:
    def read(self: StandIn, *_: Any) -> Any:
        return getattr(self, name)

    return read


for _name in (f"__{name}__" for name in ASKS):
    setattr(StandIn, _name, _reader(_name))


def is_entries(leaf: Any) -> bool:
    """Say whether a leaf of a tree has one entry a sample and is no tensor."""
    if isinstance(leaf, np.ndarray):
        return leaf.ndim > 0
    return isinstance(leaf, pytree.LISTS)  # of samples, or of texts: others are structure


def holds(values: Any) -> bool:
    """Say whether a tree holds rows that are no tensors."""
    return any(is_entries(leaf) for _, leaf in pytree.leaves(values))


@dataclass(frozen=True)
class StandInReads:
    """Types of the stand-ins that were read: one for each read."""

    outputs: list[type] = field(default_factory=list)
    targets: list[type] = field(default_factory=list)


def unread(values: Any, reads: list[type]) -> Any:
    """Return a tree with stand-ins for the rows that are no tensors.

    Args:
        values: outputs or targets.
        reads: the type of each leaf that is read is added to it.
    """
    return pytree.map_leaves(lambda x: StandIn(x, reads) if is_entries(x) else x, values)
