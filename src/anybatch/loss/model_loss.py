"""The loss that a model returns, as `Engine(model)` takes it: traced, and nothing declared.

    Engine(model)                            traced, or refused
    Engine(model, Loss.inside(count=...))    traced where it can be, and compared with the count;
                                             believed where it cannot

A count is compared in two places, which must be in proportion: of a micro-batch and of the full
batch. The unit of the count (samples, tokens, pixels) does not matter.

    count     15 of  80          contradicted: a decoder shifts its labels, and one of every
    traced    14 of  72          sample is left out
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from anybatch.core.accelerator import of
from anybatch.core.batch import MicroBatch
from anybatch.errors import LossError
from anybatch.loss.base import InsideLoss, Loss, Number, Part, Scope, Total, loss_among
from anybatch.loss.model_terms import TermOfAll, same
from anybatch.loss.traced_model import OfModel, TracedOutputs, Tracer
from anybatch.memory.fakes import is_fake

WAY_OUT = (
    "declare Loss.inside(count=...) if it is a mean, or mark the part in which samples meet with "
    "anybatch.coupled, and the square of a weight by coupled(lambda value: 0.1 * value)"
    "(weight.square().sum()), or give micro_batch >= the batch size"
)


class ModelLoss(OfModel):
    """The loss that a model returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(Tracer(model), WAY_OUT)
        self.name = "inside the model"
        self._model = model

    def run(self, forward: Callable[[], Any], inputs: Any) -> Any:
        """Run the model, and trace its loss."""
        if is_compiled(self._model):
            raise LossError(
                "the loss that a model returns must be traced to divide its batch, and a model "
                "that torch.compile has compiled as a whole cannot be: compile its parts, move "
                f"the loss out of it, or {WAY_OUT}"
            )
        outputs, traced = self._tracer.run(forward, inputs, returned_loss)
        traced["outputs"] = outputs
        return traced

    def outputs(self, found: Any) -> Any:
        """Return the outputs of the model."""
        return found["outputs"] if isinstance(found, TracedOutputs) else found

    def full_batch(self, outputs: Any, micro: MicroBatch) -> Tensor:
        """Return the model's loss."""
        del micro
        return returned_loss(self.outputs(outputs))


class DeclaredLoss(ModelLoss):
    """Loss of `Loss.inside`, traced in the model as far as possible.

    Attributes:
        believed: the current step divides by the declared count, which is not shown.
    """

    def __init__(self, model: nn.Module, declared: InsideLoss) -> None:
        super().__init__(model)
        self.name = declared.name
        self._declared = declared
        self._counts: dict[int, Counts] = {}
        self._compared = False

    def run(self, forward: Callable[[], Any], inputs: Any) -> Any:
        """Run the model, and trace its loss where that can be done."""
        if is_compiled(self._model):
            return forward()
        outputs, traced = self._tracer.run(forward, inputs)
        traced["outputs"] = outputs
        return traced

    def full_batch(self, outputs: Any, micro: MicroBatch) -> Tensor:
        """Return the model's loss."""
        return self._declared.full_batch(self.outputs(outputs), micro)

    def totals(self, scope: Scope) -> list[Total]:
        """Return the traced totals where there are any, else the declared ones.

        Raises:
            LossError: they contradict each other.
        """
        declared = self._declared.totals(scope)
        assert declared is not None
        traced = self._traced(scope)
        self.believed, self._counts = traced is None, {}
        if traced is None:
            return declared
        for index, total in enumerate(traced):
            self._refuse_other_reduction(total)
            counts = Counts(scope.size, declared[0].denominator, total.denominator)
            if not counts.unknown:
                self._counts[index] = counts
        return traced

    def parts(self, outputs: Any, micro: MicroBatch, totals: list[Total]) -> list[Part]:
        """Return a micro-batch's numerators.

        Raises:
            LossError: its count is not in proportion to the model's denominator.
        """
        self._compare(outputs, micro)
        if any(total.term is not None for total in totals):
            return super().parts(outputs, micro, totals)
        return self._declared.parts(self.outputs(outputs), micro, totals)

    def describe(self, totals: list[Total]) -> str:
        """Return the loss in words."""
        return super().describe(totals) if any(total.term for total in totals) else self.name

    def _traced(self, scope: Scope) -> list[Total] | None:
        terms = scope.outputs.terms if isinstance(scope.outputs, TracedOutputs) else None
        if not terms:
            return None
        if self._tracer.sizes.meets(terms):
            names = " + ".join(dict.fromkeys(term.name for _, term in terms))
            raise LossError(
                "samples must not meet in a loss with a declared count, and the arguments of "
                f"{names} grow with the samples in two dimensions: mark that part with "
                "anybatch.coupled, or give micro_batch >= the batch size"
            )
        try:
            return super().totals(scope)
        except LossError:
            return None

    def _refuse_other_reduction(self, total: Total) -> None:
        """Refuse a mean that was declared a sum, and a sum that was declared a mean."""
        term, mean = total.term, self._declared.count is not None
        if term is None or isinstance(term, TermOfAll) or term.divides == mean:
            return
        says, does = ("a mean", "a sum") if mean else ("a sum", "a mean")
        raise LossError(
            f"Loss.inside must agree with the model, and it declares the loss as {says}, while "
            f"{term.name} in it is {does}: leave the declaration out, Engine(model) traces it"
        )

    def _compare(self, outputs: Any, micro: MicroBatch) -> None:
        """Refuse a micro-batch's count that contradicts another one's or the full batch's."""
        count, terms = self._declared.count, isinstance(outputs, TracedOutputs) and outputs.terms
        if count is None or not terms:
            return
        here = count(micro.inputs, micro.targets)
        for index, (_, term) in enumerate(terms):
            counts = Counts(micro.size, here, term.count)
            # A coupled value is the same in all parts, so no count can contradict it
            # (test_the_weights_of_micro_batches_may_be_any).
            if not term.divides or isinstance(term, TermOfAll) or counts.unknown:
                continue
            if counts.on_device and self._compared:
                continue  # every comparison waits for the device
            other = self._counts.setdefault(index, counts)
            counts.refuse_other(other, term.name)
            self._compared |= bool(counts.traced != 0)


@dataclass(frozen=True)
class Counts:
    """Denominators of some samples, as declared and as traced.

    Attributes:
        samples: how many.
        declared: the result of the user's count.
        traced: the model's denominator.
    """

    samples: int
    declared: Number | None
    traced: Number | None

    @property
    def unknown(self) -> bool:
        """Whether one of them is missing, or is one of a dry run."""
        return any(one is None or is_fake(one) for one in (self.declared, self.traced))

    @property
    def on_device(self) -> bool:
        """Whether reading them waits for a device."""
        return any(
            isinstance(one, Tensor) and not of(one.device).host
            for one in (self.declared, self.traced)
        )

    def numbers(self) -> tuple[float, float]:
        """Return both as numbers."""
        assert self.declared is not None
        assert self.traced is not None
        return float(self.declared), float(self.traced)

    def refuse_other(self, other: Counts, name: str) -> None:
        """Refuse counts that are not in proportion to those of `other` samples."""
        (a, b), (c, d) = other.numbers(), self.numbers()
        if same(a * d, c * b):
            return
        raise LossError(
            f"Loss.inside(count=...) must return the denominator of the model: of {self.samples} "
            f"samples count says {c:g} and the model divides by {d:g} ({name}), of {other.samples} "
            f"it says {a:g} and the model divides by {b:g}. Leave the declaration out: "
            "Engine(model) traces the model's count (a causal model shifts its labels, and drops "
            "one of each sample)"
        )


def returned_loss(outputs: Any) -> Tensor:
    """Return the loss that a model returned, which must be one number."""
    loss = loss_among(outputs)
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    raise LossError(
        "without a loss_fn a model must return its loss, as a 0-dim tensor, as .loss, as ['loss'] "
        f"or first in a tuple, and it returned {_described(outputs)}: give a loss_fn, "
        "Engine(model, loss_fn), or the labels from which the model computes its loss"
    )


def _described(outputs: Any) -> str:
    if isinstance(outputs, Tensor):
        return f"a tensor of shape {tuple(outputs.shape)}"
    if isinstance(outputs, Mapping):
        return f"a mapping of {', '.join(map(str, outputs)) or 'nothing'}"
    if isinstance(outputs, tuple | list):
        first = _described(outputs[0]) if outputs else "nothing"
        return f"a {type(outputs).__name__} that begins with {first}"
    return f"{type(outputs).__name__}"


def is_compiled(model: nn.Module) -> bool:
    """Return whether a model itself is compiled, not only its parts."""
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


def loss_of(model: nn.Module, loss_fn: Loss | None) -> Loss:
    """Return the loss of an engine: that of the model where `loss_fn` is None."""
    if loss_fn is None:
        return ModelLoss(model)
    return DeclaredLoss(model, loss_fn) if isinstance(loss_fn, InsideLoss) else loss_fn
