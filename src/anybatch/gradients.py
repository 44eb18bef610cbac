"""Where the gradients of the micro-batches come together (MBS, Algorithm 1, line 12).

Autograd adds to ``.grad`` in place, which is the fastest sum there is, and right for float32
parameters. Two cases need more. Half-precision sums lose small addends (2048 micro-batches in
bfloat16 lose percents), so those are summed in float32 and cast once. And gradients that were there
before the step must survive a failed one, so they are set aside and added to at the end.

    micro-batch:   p.grad (new) ──> p.grad +=          in place
                   p.grad (half) ──> float32 sum +=    accumulator
    delivery:      p.grad = before + factor * sum
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype its gradient has: ``grad_dtype`` where torch knows it, else its own."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


class Gradients:
    """The sum of the gradients of a step, delivered once.

    Args:
        parameters: all tensors that may receive a gradient.
        wide: sum half-precision gradients in float32. Default True.
    """

    def __init__(self, parameters: Iterable[Tensor], *, wide: bool = True) -> None:
        self.parameters = list(parameters)
        self._half = [p for p in self.parameters if wide and gradient_dtype(p) in HALF]
        self._sums: dict[Tensor, Tensor] = {}
        self._before: dict[Tensor, Tensor] = {}
        self._totals: dict[Tensor, Tensor | None] = {}

    @property
    def half(self) -> tuple[str, ...]:
        """Names of the dtypes whose gradients are summed in float32."""
        return tuple(sorted({str(gradient_dtype(p)).removeprefix("torch.") for p in self._half}))

    @property
    def added(self) -> bool:
        """Whether gradients were there before, to which the sum is added."""
        return bool(self._before)

    def set_aside(self) -> None:
        """Take away the gradients that are there, so that the step starts from none."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                self._before[parameter] = parameter.grad
                parameter.grad = None

    def collect(self) -> None:
        """Add what the last micro-batch left, where autograd did not do it."""
        for parameter in self._half:
            gradient = parameter.grad
            if gradient is None:
                continue
            parameter.grad = None
            if parameter in self._sums:
                self._sums[parameter].add_(gradient)
            else:
                self._sums[parameter] = gradient.float()

    def finish(self, factor: float | Tensor = 1.0) -> None:
        """Make the sum ready for delivery, times `factor`; nothing that was there is touched.

        Args:
            factor: what the sum still lacks: a denominator known only at the end.
        """
        if _is_one(factor) and not self._sums and not self._before:
            return  # the sums are where they belong
        with torch.no_grad():
            self._totals = {p: self._total(p, factor) for p in self.parameters}

    def deliver(self) -> None:
        """Make ``.grad`` what it was before the step plus the sum; nothing is allocated."""
        with torch.no_grad():
            for parameter, total in self._totals.items():
                before = self._before.get(parameter)
                if before is None or total is None:
                    parameter.grad = before if total is None else total
                else:
                    parameter.grad = _added(before, total)

    def _total(self, parameter: Tensor, factor: float | Tensor) -> Tensor | None:
        total = self._sums.pop(parameter, parameter.grad)
        if total is None:
            return None
        if not _is_one(factor):
            total.mul_(factor)
        kept = parameter in self._before
        return total if kept else total.to(gradient_dtype(parameter))


def _added(before: Tensor, total: Tensor) -> Tensor:
    """Return `before`, the same tensor, with `total` added; rounded once if it is half."""
    if before.is_sparse or total.is_sparse:
        return before + total
    if before.dtype == total.dtype:
        return before.add_(total)
    return before.copy_(total.add_(before))


def _is_one(factor: float | Tensor) -> bool:
    return isinstance(factor, int | float) and factor == 1.0
