"""Gradients of a chunk of logits: of cross-entropy where the logits are, else by autograd.

For cross-entropy autograd holds three tensors of the logits' size: log-probabilities, the gradient
of these, and that of the logits. Here logits become probabilities, and these the gradient, in one:

    logits ──> exp(logits - most) / sum  ──> (probabilities - 1 at the target) * weight of the row
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

Differentiated = tuple[Tensor, Callable[[Tensor], Tensor]]
"""Results of rows, and the function from gradients of these to gradients of the logits."""


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of each row and its class, as torch computes it.

    Attributes:
        compute: torch's.
        ignored: the class of rows that do not count.
        weight: [V], of each class; None is 1.
    """

    compute: Callable[[Tensor, Tensor], Tensor]
    ignored: int
    weight: Tensor | None

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the losses of rows."""
        return self.compute(z, y)

    def differentiated(self, z: Tensor, y: Tensor) -> Differentiated:
        """Return the losses of rows, and the function to gradients, which are where `z` is.

        Args:
            z: [c, V], logits in float32 or float64.
            y: [c], classes.
        """
        there = y != self.ignored
        at = torch.where(there, y, 0)[:, None]
        each = there.to(z.dtype) if self.weight is None else self.weight.to(z)[at[:, 0]] * there
        target, most = z.gather(1, at), z.amax(1, keepdim=True)
        total = z.sub_(most).exp_().sum(1, keepdim=True)
        # Of large logits both differ by little (test_losses_and_gradients_are_those_of_torch).
        losses = (total.log() - (target - most))[:, 0] * each
        z.div_(total)

        def gradient(above: Tensor) -> Tensor:
            z.scatter_(1, at, z.gather(1, at) - 1)
            return z.mul_((each * above)[:, None])

        return torch.where(there, losses, 0), gradient


class _Begin(torch.autograd.Function):
    """Begin a graph at a tensor that it holds only as long as it needs it, which a leaf is not."""

    @staticmethod
    def forward(_ctx: Any, _leaf: Tensor, tensor: Tensor) -> Tensor:
        """Return the tensor as a result that has a gradient."""
        return tensor


def differentiated(held: list[Tensor], results: Callable[[Tensor], Tensor]) -> Differentiated:
    """Return results of logits, and the function to gradients, by autograd.

    Where a graph does not need logits they are let go before backward
    (test_logits_of_a_chunk_are_let_go_before_backward).

    Args:
        held: takes the logits out of it, so that they are kept nowhere else.
        results: from logits.
    """
    with torch.enable_grad():
        begin = held[0].new_empty(0).requires_grad_()
        held.append(_Begin.apply(begin, held.pop()))  # type: ignore[no-untyped-call]
        edge, result = get_gradient_edge(held[0]), results(held.pop())
    return result, lambda above: torch.autograd.grad(result, edge, above)[0]
