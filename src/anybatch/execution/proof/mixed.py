"""Outputs without rows that samples have had a part in: none of these may be trained.

An output without rows counts as a constant, the same for every micro-batch. By its value it may be
one (a gate that is 0) while its gradient is of the samples: `gate * h.mean(0)`. A loss that does
not use it is accepted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from anybatch.core import tree
from anybatch.core.batch import MicroBatch
from anybatch.core.meeting import ForwardOf
from anybatch.core.memory_errors import out_of_memory
from anybatch.errors import NotExactError
from anybatch.execution.proof.declared import LossRows, Own
from anybatch.execution.proof.halves import leaf_of
from anybatch.execution.proof.masks import PLACE, SAMPLES
from anybatch.execution.proof.verdict import UNDIVIDED, Output


def mixed_outputs(outputs: Iterable[Output], layout: Sequence[int | None]) -> frozenset[int]:
    """Return which outputs have a gradient and no rows, and samples have had a part in them.

    Args:
        outputs: of a forward under masks.
        layout: where each holds the samples; None where it holds none.
    """
    pairs = enumerate(zip(outputs, layout, strict=False))
    return frozenset(
        at
        for at, (one, axis) in pairs
        if axis is None
        and one.trains
        and one.mask is not None
        and bool((one.mask & (SAMPLES | PLACE)).any())
    )


def refuse_trained(paths: Sequence[str], trained: Iterable[bool], mixed: frozenset[int]) -> None:
    """Refuse a loss that trains an output of `mixed`.

    Args:
        paths: of the outputs.
        trained: whether the loss gives each a gradient.
        mixed: outputs without rows that samples have had a part in.

    Raises:
        NotExactError: it does.
    """
    for at, (path, trains) in enumerate(zip(paths, trained, strict=True)):
        if trains and at in mixed:
            raise NotExactError(
                "outputs without rows must be the same for every micro-batch when the batch is "
                f"split, and the loss trains {path}, which depends on samples of one micro-batch: "
                "return one value a sample, in a tensor of shape [n], and combine these in the "
                f"loss, or {UNDIVIDED}"
            )


def refuse_declared_use(
    own: Own, rows: LossRows, layout: Sequence[int | None], mixed: frozenset[int]
) -> None:
    """Refuse a declared loss that trains an output of `mixed`.

    Args:
        own: the loss.
        rows: outputs and targets of a few samples.
        layout: where each output holds the samples; None where it holds none.
        mixed: outputs without rows that samples have had a part in.

    Raises:
        NotExactError: it does.
    """
    if not mixed:
        return
    leaves: list[Tensor] = []

    def leaf(tensor: Tensor) -> Tensor:
        leaves.append(leaf_of(tensor))
        return leaves[-1] * 1 if leaves[-1].requires_grad else leaves[-1]

    outside = sys.exception()
    try:
        with torch.enable_grad(), ForwardOf(rows.size, standalone=True):
            micro = MicroBatch(None, rows.targets, rows.size)
            loss = own(tree.map_tensors(leaf, rows.outputs), micro)
            some = [one for one in leaves if one.requires_grad]
            if not loss.requires_grad or len(leaves) != len(layout):
                return
            found = iter(torch.autograd.grad(loss.sum(), some, allow_unused=True))
    except (RuntimeError, ValueError, IndexError, TypeError, KeyError) as error:
        if out_of_memory(error, outside=outside):
            raise
        return  # as a doubt says
    trained = [one.requires_grad and next(found) is not None for one in leaves]
    refuse_trained([path for path, _ in tree.tensors(rows.outputs, "outputs")], trained, mixed)
