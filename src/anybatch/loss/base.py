"""A loss as numerator over denominator, so that a part of the batch can do its part of it.

Dividing each micro-batch's mean by the number of micro-batches (MBS, Algorithm 1, line 11) is the
loss of the batch only when every micro-batch has the same denominator: not for a ragged tail, not
for ignored or weighted targets. Here the denominator D is that of the full batch, counted first,
and micro-batch i contributes

    sum_k  c_k * numerator_k,i / D_k

`Loss` is the declaration; a plain callable becomes one in `anybatch.loss.callable_loss`. The
streaming code asks a loss two questions: `totals` (the denominators over the full batch; None if
the loss couples the samples) and `parts` (the numerators of one micro-batch). Source: MBS, section
3.4, Eq. 14-17; the exact form is ours.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core import modules
from anybatch.core.barrier import ForwardOf, in_a_meeting
from anybatch.core.batch import MicroBatch, TensorBatch
from anybatch.errors import LossError
from anybatch.loss.terms import Term
from anybatch.memory.fakes import is_fake

Number = float | int | Tensor


@dataclass(slots=True)
class Scope:
    """Facts of the mini-batch that are available once its first micro-batch has run.

    Attributes:
        size: N_B, samples of this process.
        micro_batches: N_S.
        batch: its tensors; None where they are loaded micro-batch by micro-batch.
        outputs: the first micro-batch's.
        first: the first micro-batch.
        layout: for each output tensor the dimension of the samples, or None.
        global_size: samples of all processes; 0 (default) where there is one.
        values: those that the function of the loss reads, where they have just been read; empty
            (default) where not.
    """

    size: int
    micro_batches: int
    batch: TensorBatch | None
    outputs: Any
    first: MicroBatch
    layout: tuple[int | None, ...]
    global_size: int = 0
    values: Sequence[Any] = ()


@dataclass(frozen=True)
class Total:
    """Term of the full batch's loss: its weight c and denominator D (None: not yet counted).

    Attributes:
        sums: it is a plain sum, of any part and of the full batch. Default False.
    """

    weight: float
    denominator: Number | None
    term: Term | None = None
    sums: bool = False

    @property
    def adds(self) -> bool:
        """Whether denominators of parts add up to that of the full batch: that of a sum is 1."""
        return not self.sums and (self.term is None or self.term.divides)


@dataclass(slots=True)
class Part:
    """A term of one micro-batch: its numerator, and its share of the denominator."""

    numerator: Tensor
    denominator: Callable[[], Number]


class Loss(ABC):
    """A loss that declares how it divides over micro-batches.

    torch's own losses need no declaration, nor does a sum of them. Declare a loss of your own with
    `per_sample`, `ratio` or `inside`; an undeclared one is exact too, at the cost of a second
    forward.

    Example:
        >>> loss = anybatch.Loss.per_sample(lambda out, y: (out - y).square().sum(-1))
    """

    name: str
    takes_outputs = True
    """Whether the loss is computed from the outputs; else the outputs hold it."""
    couples = False
    """Whether samples meet in it, for any outputs."""
    believed = False
    """Whether the denominator of the current step is declared by the user, and not shown."""
    doubts: tuple[str, ...] = ()
    """Why it is not shown that the result is the loss of the batch."""
    declares = False
    """Whether the losses of single samples, which `own` returns, are declared by the user."""
    counts = False
    """Whether the denominator is a count by the user."""

    @staticmethod
    def per_sample(fn: Callable[..., Tensor]) -> Loss:
        """Declare a mean over samples.

        Args:
            fn: ``fn(outputs, targets)`` -> losses of shape [n], one a sample; without targets
                ``fn(outputs)``.

        Returns:
            The loss ``mean(fn(outputs, targets))``.

        Raises:
            LossError: at the first step, `fn` does not return shape [n].
            NotExactError: at the first step, `fn` couples samples, or depends on their number.
        """
        return PerSample(fn)

    @staticmethod
    def ratio(num: Callable[..., Tensor], den: Callable[[Any], Number]) -> Loss:
        """Declare a sum over samples divided by a number that the targets decide.

        Args:
            num: ``num(outputs, targets)`` -> 0-dim tensor, a sum over the samples passed to it.
            den: ``den(targets)`` -> number or 0-dim tensor, which adds up over samples.

        Returns:
            The loss ``sum num / den(all targets)``.

        Raises:
            NotExactError: at the first step, `num` couples samples, or depends on their number.
        """
        return Ratio(num, den)

    @staticmethod
    def inside(*, count: Callable[[Any, Any], Number] | None) -> Loss:
        """Declare the denominator of a loss that the model computes, where it cannot be traced.

        ``Engine(model)`` traces it, and most models need no declaration. A count that contradicts
        the traced denominator is refused with both numbers; without a trace it is not checked.

        Args:
            count: ``count(inputs, targets)`` -> the denominator of the mean that the model takes,
                which adds up over samples. Count as the model does: a model that shifts its labels
                divides by the number of the rest. None: the loss is a plain sum without division.

        Returns:
            The loss that the model returns: a 0-dim tensor, an object with ``.loss``, a mapping
            with ``"loss"``, or a tuple that begins with it.

        Raises:
            LossError: at a step, `count` contradicts the denominator of the model.
        """
        return InsideLoss(count)

    @staticmethod
    def algorithm1(fn: Callable[..., Tensor]) -> Loss:
        """Take the paper's loss normalization to the letter: micro-batch loss / N_S.

        It gives the gradient of the full batch only if all micro-batches are equal (Eq. 17). Its
        purpose is to reproduce the paper.

        Args:
            fn: ``fn(outputs, targets)`` -> 0-dim tensor, a mean over the micro-batch.

        Source: MBS, Algorithm 1, line 11, Eq. 14.
        """
        return Algorithm1(fn)

    def run(self, forward: Callable[[], Any], inputs: Any) -> Any:
        """Run the model's forward on some rows of a batch that is divided.

        Args:
            forward: runs the model; returns its outputs.
            inputs: of these rows.

        Returns:
            The outputs, or those that this loss replaces.
        """
        del inputs
        return forward()

    def outputs(self, found: Any) -> Any:
        """Return the outputs of the model from the result of `run`."""
        return found

    def own(self, outputs: Any, micro: MicroBatch) -> Tensor:
        """Return losses that are declared to be of single samples, or their sum.

        Args:
            outputs: of some rows.
            micro: these rows.
        """
        raise NotImplementedError

    @abstractmethod
    def full_batch(self, outputs: Any, micro: MicroBatch) -> Tensor:
        """Return the loss of an undivided batch, a 0-dim tensor."""

    @abstractmethod
    def totals(self, scope: Scope) -> list[Total] | None:
        """Return the terms of the full batch's loss; None where it couples the samples."""

    @abstractmethod
    def parts(self, outputs: Any, micro: MicroBatch, totals: list[Total]) -> list[Part]:
        """Return a micro-batch's part of each of `totals`."""

    def describe(self, totals: list[Total]) -> str:
        """Return the loss in words: the names of its terms, or its own name."""
        terms: dict[str, None] = {}
        for total in totals:
            if total.term is not None:
                terms[total.term.name] = None
        return " + ".join(terms) or self.name

    def functions(self) -> tuple[Any, ...]:
        """Return the user's functions; those that are modules have state and parameters."""
        return ()


class Ratio(Loss):
    """`Loss.ratio`."""

    declares = counts = True

    def __init__(self, num: Callable[..., Tensor], den: Callable[[Any], Number]) -> None:
        self.name = "declared: sum / count of targets"
        self._num, self._den = num, den

    def full_batch(self, outputs: Any, micro: MicroBatch) -> Tensor:
        """Return num / den."""
        return (self._numerator(outputs, micro) / self._count(micro.targets)).reshape(())

    def totals(self, scope: Scope) -> list[Total] | None:
        """Count over all targets at once."""
        batch = scope.batch
        return [Total(1.0, None if batch is None else self._count(batch.targets))]

    def parts(self, outputs: Any, micro: MicroBatch, totals: list[Total]) -> list[Part]:
        """Return the micro-batch's sum and count."""
        del totals
        with ForwardOf(micro.size, standalone=True), _derivative_errors():
            numerator = self._numerator(outputs, micro)
        return [Part(numerator, lambda: self._count(micro.targets))]

    def own(self, outputs: Any, micro: MicroBatch) -> Tensor:
        """Return the sum."""
        return self._numerator(outputs, micro)

    def _count(self, targets: Any) -> Number:
        return count_of("den(targets)", self._den, targets)

    def functions(self) -> tuple[Any, ...]:
        """Return num and den."""
        return self._num, self._den

    def _numerator(self, outputs: Any, micro: MicroBatch) -> Tensor:
        return scalar(call_loss(self._num, outputs, micro.targets), "num")


class PerSample(Loss):
    """`Loss.per_sample`."""

    declares = True

    def __init__(self, fn: Callable[..., Tensor]) -> None:
        self.name = "declared: mean over samples"
        self._fn = fn

    def full_batch(self, outputs: Any, micro: MicroBatch) -> Tensor:
        """Return the mean."""
        return self._losses(outputs, micro).mean()

    def totals(self, scope: Scope) -> list[Total] | None:
        """The denominator is the number of samples."""
        return [Total(1.0, scope.size)]

    def parts(self, outputs: Any, micro: MicroBatch, totals: list[Total]) -> list[Part]:
        """Return the sum over the micro-batch."""
        del totals
        with ForwardOf(micro.size, standalone=True), _derivative_errors():
            losses = self._losses(outputs, micro)
        return [Part(losses.sum(), lambda: micro.size)]

    def functions(self) -> tuple[Any, ...]:
        """Return fn."""
        return (self._fn,)

    def own(self, outputs: Any, micro: MicroBatch) -> Tensor:
        """Return the losses."""
        return self._losses(outputs, micro)

    def _losses(self, outputs: Any, micro: MicroBatch) -> Tensor:
        losses = call_loss(self._fn, outputs, micro.targets)
        if not isinstance(losses, Tensor) or losses.shape != (micro.size,):
            came = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise LossError(
                f"Loss.per_sample must return one loss a sample, shape ({micro.size},), and it "
                f"returned {came}: average over all other dimensions, or declare Loss.ratio"
            )
        return losses


class InsideLoss(Loss):
    """Loss of `Loss.inside`, trusted; an engine compares it with the trace (`model_loss`)."""

    takes_outputs = False
    believed = True

    def __init__(self, count: Callable[[Any, Any], Number] | None) -> None:
        self.name = f"inside the model, {'a sum' if count is None else 'its count declared'}"
        self.count = count

    def full_batch(self, outputs: Any, micro: MicroBatch) -> Tensor:
        """Return the model's loss."""
        del micro
        return loss_inside(outputs)

    def totals(self, scope: Scope) -> list[Total] | None:
        """Count the denominator over the full batch."""
        if self.count is None:
            return [Total(1.0, 1, sums=True)]
        batch = scope.batch
        return [Total(1.0, None if batch is None else self._counted(batch))]

    def parts(self, outputs: Any, micro: MicroBatch, totals: list[Total]) -> list[Part]:
        """Convert the micro-batch's mean to its sum; a mean over no targets adds nothing."""
        loss = loss_inside(outputs)
        if self.count is None:
            return [Part(loss, lambda: 1)]
        count = self._counted(micro)
        total = totals[0].denominator
        # Multiplying NaN by 0 gives NaN: a micro-batch without any target adds 0, and this 0 has a
        # graph where other lanes wait for its backward
        # (test_a_mask_is_named_and_the_advice_is_exact).
        fake = is_fake(count) or is_fake(total)
        if not fake and bool(count == 0) and (total is None or bool(total != 0)):
            zero = nothing(loss) if in_a_meeting() else torch.zeros_like(loss)
            return [Part(zero, lambda: count)]
        return [Part(loss * count, lambda: count)]

    def _counted(self, rows: MicroBatch | TensorBatch) -> Number:
        assert self.count is not None
        return count_of("count(inputs, targets)", self.count, rows.inputs, rows.targets)


class Algorithm1(Loss):
    """`Loss.algorithm1`."""

    def __init__(self, fn: Callable[..., Tensor]) -> None:
        self.name = "MBS Algorithm 1: mean / number of micro-batches"
        self._fn = fn

    def full_batch(self, outputs: Any, micro: MicroBatch) -> Tensor:
        """Return the loss: N_S is 1."""
        return scalar(call_loss(self._fn, outputs, micro.targets), "the loss")

    def totals(self, scope: Scope) -> list[Total] | None:
        """The denominator is N_S."""
        return [Total(1.0, scope.micro_batches)]

    def parts(self, outputs: Any, micro: MicroBatch, totals: list[Total]) -> list[Part]:
        """Return the micro-batch's mean loss."""
        del totals
        return [Part(self.full_batch(outputs, micro), lambda: 1)]

    def functions(self) -> tuple[Any, ...]:
        """Return fn."""
        return (self._fn,)


@contextmanager
def _derivative_errors() -> Iterator[None]:
    """Convert torch's error about an unused tensor to a `LossError` of one sentence."""
    try:
        yield
    except RuntimeError as error:
        if modules.UNUSED not in str(error):
            raise
        raise LossError(
            "a declared loss may differentiate outputs by other outputs of forward, and "
            "torch.autograd.grad found that the tensor it differentiates by is no part of their "
            "graph (a micro-batch computes with rows of the inputs; those of targets are other "
            "tensors): let forward return these inputs, too, or differentiate in forward, inside "
            "`with torch.enable_grad():`, and return the derivative"
        ) from error


def call_loss(fn: Callable[..., Any], outputs: Any, targets: Any) -> Any:
    """Return ``fn(outputs, targets)``, or ``fn(outputs)`` where there are no targets.

    A function that requires more arguments gets the items of a tuple of outputs one by one.
    """
    passed: tuple[Any, ...] = (outputs,) if targets is None else (outputs, targets)
    if isinstance(outputs, tuple) and _required(fn) > len(passed):
        passed = *outputs, *passed[1:]
    return fn(*passed)


def _required(fn: Callable[..., Any]) -> int:
    """Return the number of positional arguments that `fn` requires; 0 if it does not tell."""
    function = fn
    if isinstance(fn, nn.Module) and type(fn).__call__ is nn.Module.__call__:
        function = fn.forward
    try:
        # A wrapper takes what it says itself, and passes on what it does not name.
        found = inspect.signature(function, follow_wrapped=False).parameters
        if any(p.kind is p.VAR_POSITIONAL for p in found.values()):
            found = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return 0
    by_position = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return sum(p.kind in by_position and p.default is p.empty for p in found.values())


def count_of(call: str, fn: Callable[..., Number], *passed: Any) -> Number:
    """Return the denominator that a declaration counts.

    Args:
        call: how the function is called, in words.
        fn: the user's.
        passed: its arguments.

    Raises:
        LossError: it is no function of these arguments, or returns several numbers.
    """
    try:
        count = fn(*passed)
    except TypeError as error:
        try:
            inspect.signature(fn).bind(*passed)
        except TypeError:
            raise LossError(f"the denominator of a loss is counted by {call}: {error}") from error
        except ValueError:  # it has no signature
            pass
        raise
    return scalar(count, call) if isinstance(count, Tensor) else count


def scalar(value: Any, what: str) -> Tensor:
    """Return `value`, which must be a 0-dim tensor."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value if value.dim() == 0 else value.reshape(())
    came = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    mend = "sum or average it, or declare Loss.per_sample"
    if isinstance(value, int | float):
        mend = "return the tensor itself, without .item() or float()"
    raise LossError(f"{what} must return one number as a tensor, and it returned {came}: {mend}")


def loss_inside(outputs: Any) -> Tensor:
    """Return the loss that a model computed itself."""
    return scalar(loss_among(outputs), "a model with its loss inside")


def loss_among(outputs: Any) -> Any:
    """Return the loss among the outputs of a model; None where there is none."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    if isinstance(outputs, tuple | list) and not hasattr(outputs, "loss"):
        return outputs[0] if outputs else None
    return getattr(outputs, "loss", None)


# The loss of a micro-batch in which nothing counts, where others wait for its backward.
#
# A mean over no targets is 0/0, and its gradient is NaN even times 0. Streaming skips such a
# micro-batch. In lockstep it must run: BatchNorm, in backward, gives its rows a gradient that
# depends on the others. So backward starts, from 0, and the output of each node between the loss
# and the last barriers is set to 0, its true value.
#
#     loss ──0──> / ──0──> sum ──0──> head ──0──> BatchNorm ──dx──> body
#            what only the loss reaches: hooked     │  and all behind it: as it comes


def nothing(loss: Tensor) -> Tensor:
    """Return 0 with a graph in which backward passes the nodes of `loss`, and gives them 0.

    Args:
        loss: of no targets, 0-dim; its graph is run once.
    """
    if not loss.requires_grad:
        return torch.zeros_like(loss)
    every = list(modules.nodes([loss]))
    behind = set(modules.behind([node for node in every if _may_meet(node)]))
    for node in every:
        if node not in behind and not _may_meet(node) and not modules.ends_in(node):
            node.register_hook(_zeros)
    found: Tensor = _Nothing.apply(loss)  # type: ignore[no-untyped-call]
    return found


def _may_meet(node: Any) -> bool:
    """Say whether a node is written in Python: a place where samples meet, or a checkpoint."""
    return hasattr(type(node), "_forward_cls")


def _zeros(flowed: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if one is None else torch.zeros_like(one) for one in flowed)


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:  # noqa: ARG004
        return torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # noqa: ARG004
        return torch.zeros_like(dy)


def first_loss(outputs: Any) -> Any:
    """Return the loss that a model returned."""
    return _of_mapping(outputs) if isinstance(outputs, Mapping) else loss_inside(outputs)


def _of_mapping(outputs: Mapping[str, Any]) -> Tensor:
    loss = outputs.get("loss")
    if not isinstance(loss, Tensor):
        raise LossError(
            "a model that computes its own loss must return it, and it returned "
            f"{', '.join(map(str, outputs)) or 'nothing'}: does the batch hold labels?"
        )
    return loss


def rest_of(outputs: Any) -> dict[str, Any]:
    """Return the outputs of a model without its loss, by name or place."""
    if isinstance(outputs, Mapping):
        return {str(key): value for key, value in outputs.items() if key != "loss"}
    rest = outputs[1:] if isinstance(outputs, tuple | list) else ()
    return {str(place): value for place, value in enumerate(rest)}
