"""The loss of a micro-batch in which nothing counts, where others wait for its backward.

A mean over no targets is 0/0, and its gradient is NaN even times 0. Streaming skips such a
micro-batch. In lockstep it must run: BatchNorm, in backward, gives its rows a gradient that depends
on the others. So backward starts, from 0, and the output of each node between the loss and the last
barriers is set to 0, its true value.

    loss ──0──> / ──0──> sum ──0──> head ──0──> BatchNorm ──dx──> body
           what only the loss reaches: hooked     │  and all behind it: as it comes
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anybatch.core import graph


def nothing(loss: Tensor) -> Tensor:
    """Return 0 with a graph in which backward passes the nodes of `loss`, and gives them 0.

    Args:
        loss: of no targets, 0-dim; its graph is run once.
    """
    if not loss.requires_grad:
        return torch.zeros_like(loss)
    every = list(graph.nodes([loss]))
    behind = set(graph.behind([node for node in every if _may_meet(node)]))
    for node in every:
        if node not in behind and not _may_meet(node) and not graph.ends_in(node):
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
