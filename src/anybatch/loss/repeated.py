"""Comparison of two calls of a loss, which reveals state that no walk can list.

A loss may count in a file, in an extension, in an attribute of a library. So in the first step of a
signature it is called twice on the same outputs, with one RNG state and one listed state. It must
give the same value and the same gradient, but for rounding: kernels with atomic additions round in
another order each time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from anybatch.core import tree
from anybatch.core.batch import MicroBatch
from anybatch.core.meeting import as_it_is
from anybatch.core.memory_errors import out_of_memory
from anybatch.core.pieces import places
from anybatch.core.rng import RNGState
from anybatch.core.undo import same_values
from anybatch.errors import LossError
from anybatch.memory.fakes import is_fake

ROUNDING = 1000
"""Units in the last place by which two calls may differ."""

MOST = 1e-2
"""Difference that is always accepted, relative to the largest value."""

Around = Callable[[], AbstractContextManager[None]]
FullBatchLoss = Callable[[Any, MicroBatch], Tensor]


def refuse_hidden(
    loss_fn: FullBatchLoss,
    outputs: Any,
    micro: MicroBatch,
    guards: tuple[Around, Callable[[], None]],
    *,
    trains: bool,
) -> None:
    """Refuse a loss that gives two values or two gradients for the same outputs.

    Args:
        loss_fn: the loss.
        outputs: of a micro-batch.
        micro: the micro-batch.
        guards: the context of each call, which restores large tensors, and a function that restores
            the listed state after it.
        trains: compare gradients, too.

    Raises:
        LossError: it does.
    """
    around, restore = guards
    rng_state, found, outside = RNGState.now(), list[list[Tensor]](), sys.exception()
    for _ in range(2):
        try:
            # The call must reach no barrier of other lanes, and not record its batch normalisation
            # (test_a_declared_loss_outside_may_call_it).
            with around(), as_it_is(), torch._C.DisableTorchFunction():
                found.append(_called(loss_fn, outputs, micro, trains=trains))
        except LossError:
            raise
        except Exception as error:  # it takes all samples only: the step itself tells
            if out_of_memory(error, outside=outside):
                raise
            return
        finally:
            rng_state.put_back()
            restore()
    first, second = found
    if any(map(is_fake, first)) or all(map(_alike, first, second)):
        return
    a, b = (float(one[0]) for one in found)
    two = f"the values {a:g} and {b:g}" if a != b else "two gradients"
    raise LossError(
        "a loss that is called more than once a step must have state that anybatch can restore, "
        f"and it returned {two} for the same outputs: store its counts in an attribute of the loss "
        "or in a list or a tensor that it closes over (not in a file, a library or an extension), "
        "or give micro_batch >= the batch size, with which it is called once"
    )


def _called(
    loss_fn: FullBatchLoss, outputs: Any, micro: MicroBatch, *, trains: bool
) -> list[Tensor]:
    """Return the loss of copies, and the gradients of those that have one."""
    leaves: list[Tensor] = []

    def leaf(tensor: Tensor) -> Tensor:
        copied = tensor.detach().clone()
        if trains and tensor.requires_grad:
            leaves.append(copied.requires_grad_())
            return copied.view_as(copied)  # the loss may write to it
        return copied

    with torch.set_grad_enabled(trains):
        loss = loss_fn(tree.map_tensors(leaf, outputs), _own(micro))
    if not (leaves and loss.requires_grad):
        return [loss.detach()]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [loss.detach(), *(one for one in gradients if one is not None)]


def _own(micro: MicroBatch) -> MicroBatch:
    """Return the micro-batch with targets that the loss may write to."""
    targets = tree.map_tensors(lambda t: t if t.requires_grad else t.clone(), micro.targets)
    return MicroBatch(micro.inputs, targets, micro.size, micro.begin)


def _alike(a: Tensor, b: Tensor) -> bool:
    """Say whether two results are the same but for rounding."""
    if same_values(a, b):
        return True
    if a.shape != b.shape or not (a.is_floating_point() or a.is_complex()):
        return False
    every = list(places(a.shape))
    largest = torch.stack([a[place].abs().nan_to_num().amax() for place in every]).amax()
    within = min(MOST, ROUNDING * torch.finfo(a.dtype).eps) * largest
    return not any(bool(_differs(a[place], b[place], within)) for place in every)


def _differs(a: Tensor, b: Tensor, within: Tensor) -> Tensor:
    """Say whether a number of two pieces differs by more than rounding, or is NaN in only one."""
    differs = ((a - b).abs().nan_to_num() > within) | (a.isnan() != b.isnan())
    return differs.any()
