"""Micro-Batch Streaming, with the gradient of the full batch (MBS, Algorithm 1, made exact).

The paper divides each micro-batch's loss by the number of micro-batches. Here line 11 divides each
numerator by the denominator of the full batch, which is counted before the first backward; if it is
known only at the end (samples loaded during the step), an estimate replaces it and the sum is
multiplied by estimate / truth when it is delivered.

    mu_0: forward, backward(numerator_0 / D) │ mu_1: ... │ mu_2: ... │ add to .grad
    memory: one micro-batch, one set of gradients
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from anybatch.core import accelerator
from anybatch.core.batch import MicroBatch
from anybatch.core.rng import RNGState
from anybatch.distributed.local_batch import GlobalBatch, LocalBatch
from anybatch.execution.gradients import HALF
from anybatch.execution.parts import Parts
from anybatch.execution.retry import in_pieces
from anybatch.execution.step import Step, check_trains
from anybatch.loss.declared import Number, Part, Total
from anybatch.loss.watched import NotAPartError
from anybatch.memory.fakes import is_fake


def stream(step: Step) -> Tensor | None:
    """Run the step, or return None, having delivered nothing, where the loss couples samples.

    Args:
        step: the mini-batch and the model; see `anybatch.execution.step`.

    Returns:
        The loss of the full batch, a detached 0-dim tensor.

    Source: MBS, Algorithm 1; its lines are numbered on the right.
    """
    streaming = Streaming(step)
    step.offer()
    try:
        if step.loss.couples and step.batch.size:
            normalization(step, None)
        for micro in step.feed():  # 8
            in_pieces(step, micro, step.under(streaming.train))
        normalize = streaming.normalize or normalization(step, [])
    except NotAPartError:
        if streaming.normalize is not None:  # the others count on parts
            step.global_batch.again(coupled=True)
        return None
    if step.gradients is not None and step.batch.size:
        check_trains(streaming.trained)
    step.finish(normalize.correction())
    return normalize.loss()


class Streaming:
    """Lines 9 to 12, with the state that is stored for the next micro-batch."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.trained = 0
        self.normalize: Normalization | None = None

    def train(self, micro: MicroBatch) -> None:
        """Train on a micro-batch; when it returns or fails, its memory is free.

        Raises:
            NotAPartError: the loss couples samples.
        """
        step = self.step
        if self.normalize is None and step.discover is not None:
            self._refuse_coupled(micro)
        outputs = step.forward(micro)  # 9
        normalize = self.normalize or self._first(outputs, micro)
        parts = step.parts(outputs, micro, normalize.totals)  # 10
        weights = normalize(parts, micro.size)  # 11
        with step.sending(micro, normalize.correction):
            trained = step.backward([part.numerator for part in parts], weights)  # 12
        normalize.count()
        self.trained += trained
        step.show(outputs, micro)

    def _refuse_coupled(self, micro: MicroBatch) -> None:
        """Find out without a graph where only one part of it fits, if the loss couples samples."""
        step = self.step
        if len(Parts(step, micro.inputs)) == 1:
            return
        rng = RNGState.now()
        with torch.no_grad():
            coupled = step.totals(step.forward(micro), micro) is None
        step.forget_casts()
        rng.put_back()
        if coupled:
            normalization(step, None)

    def _first(self, outputs: Any, micro: MicroBatch) -> Normalization:
        """Find the denominator of the full batch's loss, from its first outputs."""
        totals = self.step.totals(outputs, micro)
        self.normalize = normalization(self.step, totals)
        return self.normalize


def normalization(step: Step, totals: list[Total] | None) -> Normalization:
    """Return the denominators of the loss over all ranks, as a `Normalization`.

    Args:
        step: the step.
        totals: of this rank's samples; None if the loss couples them, empty without samples.

    Raises:
        NotAPartError: the loss couples samples, here or elsewhere.
    """
    found = step.global_batch.totals(totals)
    if found is None:
        raise NotAPartError
    step.found = step.loss.describe(found)
    return Normalization(found, step.batch.size, step.global_batch, step.nothing())


class Normalization:
    """Line 11: the weight of each numerator, and the factor that the sum lacks at the end.

    The multiplication is left to backward, which starts from the weight instead of 1. Where the
    terms come in half precision the weights are powers of two, which rounds nothing; 1/D itself,
    rounded to half, would bend every gradient the same way.

    Args:
        totals: the terms of the full batch's loss; at most one denominator is still unknown.
        size: N_B, samples in the mini-batch of this rank.
        global_batch: the batch over all ranks; None (default) is one process.
        nothing: 0, as the loss of no samples. Default a float32 on the CPU.
    """

    def __init__(
        self,
        totals: list[Total],
        size: int,
        global_batch: GlobalBatch | None = None,
        nothing: Tensor | None = None,
    ) -> None:
        self.totals = totals
        self._size = size
        self._global_batch = global_batch or LocalBatch(size)
        self._nothing = torch.zeros(()) if nothing is None else nothing
        self._all: Number | None = None
        self._late = totals[0].denominator is None
        self._counted: Number = 0
        self._estimate: Number = 1.0
        self._lacks: Number = 1.0
        self._scales: list[Number] = []
        self._weights: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._values: list[Tensor] = []
        self._denominator: Number = 0

    def __call__(self, parts: list[Part], n: int) -> list[Tensor]:
        """Return the weight of each numerator; the numerators' values are stored until `count`.

        Args:
            parts: a micro-batch's numerators, one for each of `totals`.
            n: its samples.
        """
        values = [part.numerator.detach() for part in parts]
        if not self._weights:
            self._scales = self._first_scales(parts, n)
            self._sums = [torch.zeros_like(_wide(value)) for value in values]
            # Last: where memory runs out before, the next micro-batch is the first one
            # (test_at_every_allocation).
            self._weights = [
                torch.as_tensor(scale, dtype=value.dtype, device=value.device)
                for scale, value in zip(self._scales, values, strict=True)
            ]
        if self._late:
            self._denominator = parts[0].denominator()
        self._values = values
        return self._weights

    def count(self) -> None:
        """Count the micro-batch of the last requested weights: it is done."""
        counted = self._counted + self._denominator
        for total, value in zip(self._sums, self._values, strict=True):
            total.add_(value)
        self._counted = counted

    def correction(self) -> float | Tensor:
        """Return the factor that the delivered sum lacks; 1.0 in the plain case."""
        if not self._late:
            return self._lacks
        if self._all is None:
            self._all = self._global_batch.sum_of("the denominator", _number(self._counted))
        return self._lacks * _ratio(self._estimate, self._all)

    def loss(self) -> Tensor:
        """Return the loss of the full batch."""
        correction = self.correction()
        if not self._sums:  # a rank without samples
            return self._global_batch.loss(self._nothing, self._nothing.dtype)
        shares = [total * scale for total, scale in zip(self._sums, self._scales, strict=True)]
        full = shares[0] if len(shares) == 1 else torch.stack(shares).sum()
        return self._global_batch.loss(full * correction, self._weights[0].dtype)

    def _first_scales(self, parts: list[Part], n: int) -> list[Number]:
        divisors = [_number(total.denominator) for total in self.totals if not self._late]
        if self._late:
            first = _number(parts[0].denominator())
            single_rank = self._global_batch.size == self._size
            # All ranks need one estimate: BatchNorm adds up what their backwards begin with
            # (test_a_denominator_computed_at_the_end_is_one_for_all_ranks).
            self._estimate, other = first * (self._size / n), float(self._global_batch.size)
            if not single_rank:
                self._estimate = other
            elif isinstance(first, Tensor):  # nobody waits for its device
                self._estimate = torch.where(first > 0, self._estimate, other)
            # The first micro-batch may count no target, and a weight of 1 / 0 is infinite
            # (test_it_is_exact_where_the_batch_is_loaded_on_the_way).
            elif first <= 0:
                self._estimate = other
            divisors = [self._estimate]
        scales = [
            _ratio(total.weight, divisor)
            for total, divisor in zip(self.totals, divisors, strict=True)
        ]
        # 1 / D, rounded to half precision, changes every gradient in the same way
        # (test_2048_micro_batches_are_summed_to_5e_4_where_bfloat16_loses_percents).
        if any(part.numerator.dtype in HALF for part in parts) and not any(map(is_fake, scales)):
            scales = self._powers_of_two([float(scale) for scale in scales])
        return scales

    def _powers_of_two(self, scales: list[float]) -> list[Number]:
        first = abs(scales[0])
        if first == 0.0 or not math.isfinite(first):
            return list(scales)
        power = 2.0 ** round(math.log2(first))
        self._lacks = first / power
        return [scale * power / first for scale in scales]


def _number(value: Number | None) -> Number:
    """Return a host number; of a value on a device, or of a fake, a tensor."""
    assert value is not None
    if isinstance(value, Tensor):
        here = accelerator.of(value.device).host and not is_fake(value)
        return float(value) if here else accelerator.wide(value.detach())
    return float(value)


def _ratio(above: Number, below: Number) -> Number:
    """Return above / below, with the infinities and NaN of IEEE instead of an exception."""
    if isinstance(below, Tensor) or isinstance(above, Tensor):
        return above / below
    # Python raises for a division by 0
    # (test_a_batch_in_which_nothing_counts_is_nan_as_it_is_undivided).
    if below == 0.0:
        return math.nan if above == 0.0 or math.isnan(above) else math.copysign(math.inf, above)
    return above / below


def _wide(share: Tensor) -> Tensor:
    return share.float() if share.dtype in HALF else share
