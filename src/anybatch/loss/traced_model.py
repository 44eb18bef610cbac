"""The loss that a model computes inside its forward, traced to its terms without a declaration.

A model that returns its own loss is wrapped in `TracedModel`, whose forward is the model's own
under `TracingMode`, and returns the terms of the loss, numerators and denominators of these rows.
The denominator of the mini-batch is counted before the first backward, from the labels only
(`loss.model_terms`); if the computation of the targets from the labels is not traced, it is the sum
of those of the micro-batches, corrected at the end.

Rows must be samples: forwards of two sizes (those of the inspection) must pass the functional rows
in proportion, and the same rows to the same samples. A loss that is not a weighted sum of
recognised losses, or of means and sums of the model's own, is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import fields
from functools import partial
from math import isclose, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from anybatch.core import accelerator, pytree
from anybatch.core.barrier import looks_here
from anybatch.core.batch import MicroBatch, TensorBatch
from anybatch.core.modules import name_of
from anybatch.core.norm import NonReducingNorms
from anybatch.errors import LossError
from anybatch.loss import functionals
from anybatch.loss.base import Loss, Part, Scope, Total, first_loss, loss_inside, rest_of
from anybatch.loss.model_terms import (
    SumBySamples,
    Tally,
    TermOfAll,
    TracedTerm,
    agree,
    by_sample,
    rounding,
    same,
)
from anybatch.loss.model_trace import Quiet, TracingMode
from anybatch.loss.terms import bounded
from anybatch.memory.fakes import is_fake

Weighted = list[tuple[float, TracedTerm]]
Shapes = tuple[tuple[float, tuple[torch.Size, ...]], ...]
"""For each term its weight, and the shapes of its arguments with rows."""

ROUNDING = 1e-12
"""Tolerance for weights of a loss that are quotients of the same numbers."""

DIVIDED = "the model divides its loss by the samples in some steps, and for one it does not show"

MOST = 16
"""Forms of a loss that are inspected; an option that changes in every step adds one in each."""

WEIGHTS = "weights of"
"""Key of the class weights of a loss among the inspected tensors, which must be of no sample."""

OPTIONS = "the loss is called with other options from step to step"


class OtherFormError(LossError):
    """Error for a loss form that was not observed at two sizes: inspect the model again."""


class TracedOutputs(dict[str, Any]):
    """Outputs of a model, as far as they are needed, with the traced terms of its loss.

    Attributes:
        terms: weights and terms of the loss; None if it is not recognised.
        odd: names of the functions that made it unknown.
        rows: samples it was called with.
    """

    terms: Weighted | None = None
    odd: tuple[str, ...] = ()
    rows: int = 0


class Sizes:
    """Whether a form of loss takes rows in proportion to the samples, as two sizes have shown.

    A copy of the model that is rehearsed without data shows it too.
    """

    def __init__(self) -> None:
        self.checked: set[Any] = set()
        self.crossed: set[Any] = set()
        self._proportional: dict[Any, bool] = {}
        self._divided: dict[Any, dict[frozenset[int], list[float]]] = {}
        self._unequal: dict[Any, str] = {}
        self._first: dict[Any, tuple[int, Shapes, list[float]]] = {}
        self._names: set[Any] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> Sizes:
        return self

    def note(self, traced: TracedOutputs, inputs: Any) -> None:
        """Record a forward of some samples; a later inspection may find another divisor."""
        if traced.terms is None:
            return
        form = _form(traced.terms)
        if form in self._proportional and not looks_here():
            return
        if len(self._first) > MOST:  # one that is new in every step
            self._first.clear()
        n, shapes = traced.rows, _shapes(traced.terms)
        signature = form, tuple(t.shape[1:] for _, t in pytree.tensors(inputs))
        m, others, factors = self._first.get(signature, (n, shapes, []))
        if n == m:
            self._first[signature] = n, shapes, _factors(traced.terms)
            return
        # First, for `chosen` may read indices that were not saved, and then the inspection runs
        # again (test_what_is_honest_is_exact_and_shown).
        masked = chosen(traced.terms, masks=True)
        self._first.clear()
        self._names.add(_named(traced.terms))
        terms = list(zip(shapes, others, strict=True))
        pairs = [p for (_, xs), (_, ys) in terms for p in zip(xs, ys, strict=True)]
        same = self._note_weights(traced.terms, n, [weight for weight, _ in others], m)
        if not agree(factors, _factors(traced.terms)):
            self._unequal[form] = f"a number that forward makes is not for {n} what it is for {m}"
            same = False
        grows = all(_grow(a, b, n, m) for a, b in pairs)  # and not by chance
        self._proportional[form] = same and grows and not masked
        if any(_crossed(a, b, n, m) for a, b in pairs):
            self.crossed.add(form)

    def _note_weights(self, terms: Weighted, n: int, others: list[float], m: int) -> bool:
        """Note which sums are divided by the samples; say whether all weights are understood."""
        form, divided, unequal = _form(terms), set[int](), ""
        for place, ((a, term), b) in enumerate(zip(terms, others, strict=True)):
            if a == b:
                continue
            if not term.divides and isclose(a * n, b * m, rel_tol=ROUNDING):
                divided.add(place)
            else:
                unequal = f"{term.name} is {a:g} for {n} samples and {b:g} for {m}"
        self._unequal[form] = unequal
        ways = self._divided.setdefault(form, {})
        ways.pop(frozenset(divided), None)
        ways[frozenset(divided)] = _weights(_means(terms, n, divided))
        return not unequal

    def unequal(self, terms: Weighted) -> str:
        """Say of which term the weight is another for another number of samples; "" for none."""
        return self._unequal.get(_form(terms), "")

    def divided(self, traced: TracedOutputs) -> tuple[frozenset[int], ...]:
        """Return the places of sums that the model divides by the samples, in every way that fits.

        A loss may divide in some steps and not in others: its weights show the inspected form.
        """
        terms = traced.terms or []
        ways = self._divided.get(_form(terms), {frozenset[int](): []})
        if len(ways) == 1:
            return (*ways,)
        return tuple(
            way
            for way, weights in ways.items()
            if all(map(_close, _weights(_means(terms, traced.rows, way)), weights))
        )

    def proportional(self, terms: Weighted) -> bool | None:
        """Return whether rows are in proportion to samples; None where one size was observed."""
        return self._proportional.get(_form(terms))

    def familiar(self, terms: Weighted) -> bool:
        """Say whether many forms were inspected, and one of the same losses among them."""
        alike = _named(terms) in self._names and all(self._proportional.values())
        return alike and len(self._proportional) >= MOST

    def meets(self, terms: Weighted) -> bool:
        """Return whether a form of loss was observed to compare samples."""
        return _form(terms) in self.crossed


class Tracer:
    """Runs a model and finds the terms of the loss that it returns.

    Args:
        model: any module that returns its loss: a 0-dim tensor, an object with ``.loss``, a mapping
            with ``"loss"``, or a tuple that begins with it.

    Attributes:
        sizes: results of forwards of two sizes.
        logits: bytes of the largest logits of the last forward.
    """

    def __init__(self, model: nn.Module) -> None:
        self.sizes = Sizes()
        self.quiet = Quiet(model)
        self.logits = 0

    def run(
        self,
        forward: Callable[[], Any],
        inputs: Any,
        loss_of: Callable[[Any], Any] = loss_inside,
    ) -> tuple[Any, TracedOutputs]:
        """Run a model on some rows, and follow its loss.

        Returns:
            The outputs, and the terms of the loss.
        """
        tracing = TracingMode(inputs)
        with self.quiet.around(tracing):
            outputs = forward()
        loss = loss_of(outputs)
        traced = TracedOutputs(loss=loss)
        traced.terms, traced.odd = tracing.combination(loss), tuple(tracing.odd)
        if traced.terms is None and not traced.odd:
            traced.odd = made_by(loss)
        if traced.terms is None:
            self.quiet.forget()
        traced.rows = tracing.rows
        self.logits = max((term.bytes for term in tracing.terms), default=0)
        self.sizes.note(traced, inputs)
        if looks_here():  # else the logits would stay until their backward is done
            # Labels that number a sample among gathered rows differ from batch to batch
            # (test_a_place_among_gathered_rows_belongs_to_no_sample).
            some = slice(1 if _gathers() else None)
            masked = traced.terms is not None and chosen(traced.terms, masks=True)
            arguments = [] if masked else tracing.arguments  # whose rows stand for no samples
            traced["losses of"] = [
                by_sample(t, traced.rows) for one in arguments for t in one[some]
            ]
            traced[WEIGHTS] = tracing.weights()
        return outputs, traced


class TracedModel(nn.Module):
    """Wrapper of a model, with a forward that returns its loss and the traced terms.

    Attributes:
        lists: the last forward returned a list.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.lists = model, False
        self.training = model.training
        self.tracer = Tracer(model)

    @property
    def logits(self) -> int:
        """Bytes of the largest logits of the last forward."""
        return self.tracer.logits

    def forward(self, *args: Any, **kwargs: Any) -> TracedOutputs:
        """Run the model, and trace its loss."""
        forward = partial(self.model, *args, **kwargs)
        outputs, traced = self.tracer.run(forward, (args, kwargs), first_loss)
        self.lists = isinstance(outputs, list)
        if looks_here():
            traced.update(rest_of(outputs))
        return traced


class OfModel(Loss):
    """The loss of a `TracedModel`.

    Args:
        model: the model.
        way_out: the remedy for a loss that is not recognised, a sentence without its end.
    """

    takes_outputs = False
    _tally: Tally | None = None
    always: tuple[str, ...] = ()
    """Why it is not shown, for any step, that the result is the loss."""

    def __init__(
        self, model: TracedModel | Tracer, way_out: str = "declare Loss.inside(count=...)"
    ) -> None:
        self.name = "inside the model, as traced"
        self._tracer = model.tracer if isinstance(model, TracedModel) else model
        self._way_out = way_out

    def full_batch(self, outputs: Any, micro: MicroBatch) -> Tensor:
        """Return the model's loss."""
        del micro
        return loss_inside(outputs)

    def totals(self, scope: Scope) -> list[Total]:
        """Count denominators from the full batch's labels; any others are counted late."""
        terms = self._terms(scope.outputs)
        self._refuse_joined(terms)
        terms = _means(terms, scope.outputs.rows, self._divided(scope.outputs))
        single = len(terms) == 1
        counts = [
            self._count(term, scope, single=single) if term.divides else 1 for _, term in terms
        ]
        if None in counts and len(terms) > 1:
            raise LossError(
                f"the denominators of a loss of several terms must be countable from the batch, "
                f"and that of {_names(terms)} is not: {self._way_out}"
            )
        bounds = [term.bounds for _, term in terms]
        if any(bounds) and (None in counts or scope.global_size):
            raise LossError(
                "a count with a bound (clamp, + 1e-8) inside the model must be countable from the "
                f"batch of one process, and that of {_names(terms)} is not: {self._way_out}"
            )
        compared = self._tally is not None and self._tally.done
        denominators = [
            None if isinstance(term, TermOfAll) or not term.divides else count
            for (_, term), count in zip(terms, counts, strict=True)
        ]
        self._tally = Tally(scope.size, denominators, waits=not compared)
        return [
            Total(weight, None if count is None else bounded(count, term.bounds), term)
            for (weight, term), count in zip(terms, counts, strict=True)
        ]

    def parts(self, outputs: Any, micro: MicroBatch, totals: list[Total]) -> list[Part]:
        """Return a micro-batch's numerators.

        Raises:
            LossError: it has another form than that of the first micro-batch, or is the last one,
                and the sum of their denominators is not that of the full batch.
        """
        terms = self._terms(outputs)
        divided = {k for k, total in enumerate(totals) if isinstance(total.term, SumBySamples)}
        terms = _means(terms, outputs.rows, divided)
        other = _other_form(totals, terms)
        if other:
            raise LossError(
                f"the loss of a model must have the same terms in every micro-batch, and {other}: "
                f"{self._way_out}"
            )
        if self._tally is not None:
            every = [term for _, term in terms]
            self._tally.add(micro, [t.count for t in every], [t.name for t in every])
        return [Part(term.numerator, lambda term=term: term.count) for _, term in terms]  # type: ignore[misc]

    def _refuse_joined(self, terms: Weighted) -> None:
        """Refuse terms with rows that are not shown to belong to single samples.

        Raises:
            OtherFormError: no two sizes were inspected.
            LossError: they do not grow with the samples.
        """
        proportional = self._tracer.sizes.proportional(terms)
        unseen = proportional is None and self._tracer.sizes.familiar(terms)
        self.doubts = (*self.always, *([OPTIONS] if unseen else []))
        if proportional or unseen:
            return
        if proportional is None and not chosen(terms, masks=True):
            raise OtherFormError(
                "a loss inside the model must be called with the same options for any samples, "
                f"and no two calls of {_names(terms)} for more and for fewer samples had the same: "
                f"{self._way_out}"
            )
        unequal = self._tracer.sizes.unequal(terms)
        if unequal:
            raise LossError(
                "the weight of a loss inside the model must be the same for any number of samples, "
                f"or a sum be divided by the samples, and that of {unequal}: {self._way_out}"
            )
        if chosen(terms):
            raise LossError(
                "the number of rows of a loss inside the model must not depend on values, and for "
                f"{_names(terms)} some are selected before (x[mask]): give it all rows, those that "
                f"do not count with ignore_index as their target, or {self._way_out}"
            )
        raise LossError(
            "every row of a loss inside the model must belong to one sample, and for "
            f"{_names(terms)} the rows do not grow with the samples: {self._way_out}"
        )

    def _divided(self, traced: TracedOutputs) -> frozenset[int]:
        """Return the places of sums that the model divides by the samples."""
        ways = self._tracer.sizes.divided(traced)
        if not ways:
            raise OtherFormError(
                "a sum inside the model must be divided by the samples in every call or in none, "
                f"and {_names(traced.terms or [])} has other weights than in the inspection: "
                f"{self._way_out}"
            )
        if len(ways) > 1:  # of one sample a sum and its mean are the same
            self.doubts += (DIVIDED,)
        return ways[-1]

    def _terms(self, outputs: Any) -> Weighted:
        assert isinstance(outputs, TracedOutputs)
        if outputs.terms is None:
            what = ", ".join(dict.fromkeys(outputs.odd)) or "none of them was called"
            raise LossError(
                "the loss that a model computes inside must be a weighted sum of torch's own "
                "losses, or of means and sums of its own over all samples, so that its "
                f"denominator is known, and it is something else ({what}): {self._way_out}"
            )
        return outputs.terms

    def _count(self, term: TracedTerm, scope: Scope, *, single: bool) -> functionals.Count | None:
        """Return the denominator of the full batch; None where its labels do not determine it.

        That of a single term of a loss may be found at the end; of several, shapes must show it.
        """
        if isinstance(term, TermOfAll | SumBySamples):
            return scope.size
        batch = scope.batch
        if batch is None:
            return None if single else _counted(term, None, scope.size, scope.first.size)
        try:
            total = _counted(term, batch.inputs, scope.size, scope.first.size)
            if total is None or is_fake(total) or self._adds_up(term, total, scope, batch):
                return total
        except (RuntimeError, ValueError, IndexError, TypeError):
            pass  # written for so many rows
        return None

    def _adds_up(
        self, term: TracedTerm, total: functionals.Count, scope: Scope, batch: TensorBatch
    ) -> bool:
        """Return whether counts add up and match the trace, checked once a signature."""
        shapes = tuple(t.shape[1:] for _, t in pytree.tensors(batch.inputs))
        signature = term.form, term.index, scope.size, scope.first.size, shapes
        checked = signature in self._tracer.sizes.checked
        if checked and not accelerator.of(torch.as_tensor(term.count).device).host:
            return True  # a device would have to be waited for
        first = _counted(term, scope.first.inputs, scope.first.size, scope.first.size)
        if first is None or not same(float(first), float(term.count), rounding(term.count)):
            return False
        parts = [] if checked else list(batch.micro_batches(scope.first.size))
        if sum(micro.size for micro in parts) != scope.size:
            return True  # or a rehearsal of the first few: what it divides by does not matter
        counts: list[functionals.Count | None] = [
            _counted(term, micro.inputs, micro.size, scope.first.size) for micro in parts
        ]
        there = [float(count) for count in counts if count is not None]
        if len(there) < len(counts) or not same(sum(there), float(total), rounding(total)):
            return False
        self._tracer.sizes.checked.add(signature)
        return True


NEAR = 16
"""Nodes of a graph that are tested for a selection of rows."""


def chosen(terms: Weighted, *, masks: bool = False) -> bool:
    """Say whether rows are chosen shortly before a term.

    Args:
        terms: of a loss.
        masks: only those selected by masks, whose number depends on values. Default False.
    """
    parts = (term for _, term in terms if not isinstance(term, TermOfAll))
    nodes = [term.numerator.grad_fn for term in parts]
    for _ in range(NEAR):
        node = nodes.pop(0) if nodes else None
        if node is None:
            continue
        name = name_of(node)
        indices = getattr(node, "_saved_indices", ()) if name.startswith("IndexBackward") else ()
        by_mask = any(isinstance(one, Tensor) and one.dtype == torch.bool for one in indices)
        if by_mask or name.startswith("MaskedSelect") or (indices and not masks):
            return True
        nodes += [before for before, _ in node.next_functions]
    return False


def made_by(loss: Any) -> tuple[str, ...]:
    """Return the name of the operation that a loss comes from, where it has a graph."""
    node = loss.grad_fn if isinstance(loss, Tensor) else None
    return () if node is None else (name_of(node).removesuffix("0").removesuffix("Backward"),)


def _gathers() -> bool:
    """Say whether forward has called `anybatch.gather_batch`, where micro-batches are to wait."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(isinstance(mode, NonReducingNorms) and mode.gathered for mode in modes)


def _counted(
    term: TracedTerm, inputs: Any, size: int, traced_size: int
) -> functionals.Count | None:
    """Return the denominator of `size` samples, from a term traced on others; None if unknown."""
    tensors = [tensor for _, tensor in pytree.tensors(inputs)]
    arguments = dict(term.arguments)
    for name, recipe in term.recipes.items():
        if recipe is not None and inputs is not None:
            arguments[name] = recipe.made(tensors)
            continue
        shape = list(term.shapes[name])
        if not shape or (shape[0] * size) % traced_size:
            return None
        shape[0] = shape[0] * size // traced_size
        rows = torch.empty(shape, dtype=term.dtypes[name], device="meta")
        arguments[name] = rows.movedim(0, functionals.TABLE[term.function].rows[name] or 0)
    count = functionals.TABLE[term.function].count(arguments)
    return None if isinstance(count, Tensor) and count.is_meta else count


def _grow(a: torch.Size, b: torch.Size, n: int, m: int) -> bool:
    """Say whether shapes for n and for m samples are in proportion, in their first dimension.

    It holds the same number of rows of every sample: half as many as samples are of a part of
    the batch (test_a_part_of_the_batch_is_refused).
    """
    alike = a[1:] == b[1:] or 1 in (n, m)  # one sample may be squeezed away
    every = all(k == 1 or (len(x) > 0 and x[0] % k == 0) for x, k in ((a, n), (b, m)))
    return prod(a) * m == prod(b) * n and alike and every


def _crossed(a: torch.Size, b: torch.Size, n: int, m: int) -> bool:
    """Say whether another dimension than the first grows with the samples: they are compared."""
    pairs = zip(a[1:], b[1:], strict=False)
    return len(a) == len(b) and any(i != j and i * m == j * n for i, j in pairs)


def _form(terms: Weighted) -> Any:
    return tuple(term.form for _, term in terms)


def _named(terms: Weighted) -> Any:
    return tuple((term.name, tuple(term.shapes)) for _, term in terms)


def _means(terms: Weighted, rows: int, divided: Collection[int]) -> Weighted:
    """Return terms of a loss, where some sums are means over the samples."""
    return [
        (weight * rows, _by_samples(term, rows)) if place in divided else (weight, term)
        for place, (weight, term) in enumerate(terms)
    ]


def _weights(terms: Weighted) -> list[float]:
    return [weight for weight, _ in terms]


def _close(a: float, b: float) -> bool:
    return isclose(a, b, rel_tol=ROUNDING)


def _by_samples(term: TracedTerm, rows: int) -> SumBySamples:
    held = {field.name: getattr(term, field.name) for field in fields(term) if field.init}
    return SumBySamples(**{**held, "count": rows})


def _other_form(totals: list[Total], terms: Weighted) -> str:
    if len(totals) != len(terms):
        first = " + ".join(total.term.name for total in totals if total.term is not None)
        return f"they were {first} and then {_names(terms)}"
    for total, (weight, term) in zip(totals, terms, strict=True):
        one = total.term
        if one is not None and one.name != term.name:
            return f"{one.name} is {term.name} in a later one"
        if not isclose(total.weight, weight, rel_tol=ROUNDING):
            return f"the weight of {term.name} is {total.weight:g} in one and {weight:g} in another"
        if isinstance(one, TracedTerm):
            if one.form != term.form:
                return f"{term.name} is called with other options in another"
            if not one.part_of(term):
                words = ", ".join(term.constants)
                return f"{term.name} is called with another {words or 'layer'} in another"
        elif one is not None:
            return f"{term.name} is another loss in a later one"
    return ""


def _shapes(terms: Weighted) -> Shapes:
    return tuple((weight, tuple(term.shapes.values())) for weight, term in terms)


def _factors(terms: Weighted) -> list[float]:
    every = (one for _, term in terms for one in term.factors)
    values = (one.detach() if isinstance(one, Tensor) else one for one in every)
    return [math.nan if is_fake(one) else float(one) for one in values]


def _names(terms: Weighted) -> str:
    return " + ".join(term.name for _, term in terms)
