"""Loss with gradients computed in advance, which its backward adds to ``.grad``.

A trainer may clear the gradients between the loss and its backward, and weight or scale the loss
there. So the gradients of the full batch, which are computed with the loss, are stored. The loss
that the trainer gets is a number with one edge of graph; the gradient along it (a loss scale,
1 / something) multiplies them:

    p.grad  +=  waiting gradient of p  *  gradient of the loss / scale that it has already
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Handed:
    """Gradients of the full batch, on their way from the engine to ``.grad``.

    Args:
        module: whose parameters they are of.
        optimizers: whose parameters count too.
        scaler: a GradScaler by which they are scaled already, or None.
    """

    def __init__(self, module: nn.Module, optimizers: Any, scaler: Any) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        every = [*module.parameters(), *(p for group in groups for p in group["params"])]
        self._parameters = list({id(p): p for p in every}.values())
        self._scale = 1.0 if scaler is None else float(scaler.get_scale())
        self._waiting: list[tuple[Tensor, Tensor]] = []

    @property
    def waits(self) -> bool:
        """Whether the gradients have not been handed over."""
        return bool(self._waiting)

    @contextmanager
    def aside(self, *, drop: bool) -> Iterator[None]:
        """Store the gradients of the body separately, and restore the earlier ones after it.

        Args:
            drop: those of before will be emptied anyway: they go first, not in the middle.
        """
        before = [None if drop else p.grad for p in self._parameters]
        for p in self._parameters:
            p.grad = None
        try:
            yield
            found = ((p, p.grad) for p in self._parameters)
            self._waiting = [(p, grad) for p, grad in found if grad is not None]
        finally:
            for p, grad in zip(self._parameters, before, strict=True):
                p.grad = grad

    def loss(self, value: Tensor) -> Tensor:
        """Return a loss with this value and a backward that hands over the gradients."""
        spark = torch.zeros((), dtype=value.dtype, device=value.device, requires_grad=True)
        loss: Tensor = _Edge.apply(spark, value, self)  # type: ignore[no-untyped-call]
        return loss

    def over(self, gradient: Tensor) -> None:
        """Add the gradients to ``.grad``, where `gradient` is that of the loss.

        Raises:
            RuntimeError: they were handed over before.
        """
        if not self._waiting:
            raise RuntimeError(
                "the gradients of a full batch can be delivered once, and this is the second "
                "backward of its loss: compute the loss again, which makes another step"
            )
        factor = float(gradient) / self._scale
        for p, waiting in self._waiting:
            grad = waiting if factor == 1.0 else waiting * factor
            p.grad = grad if p.grad is None else p.grad + grad
        self._waiting = []


class _Edge(torch.autograd.Function):
    """The one edge of graph behind the loss."""

    @staticmethod
    def forward(ctx: Any, spark: Tensor, value: Tensor, handed: Handed) -> Tensor:
        del spark
        ctx.handed = handed
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None, None]:
        with torch.no_grad():
            ctx.handed.over(gradients[0])
        return None, None, None
