"""The loss of all outputs at once, and the gradient of each of them.

Both ways to gather the outputs of a batch (two passes, or lockstep) end here. Any loss is called on
copies of all of them, on every rank. A contrastive loss computes only the rows of this rank: no
rank computes a gradient for another one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from anybatch.core import graph, tree
from anybatch.core.batch import MicroBatch
from anybatch.distributed.local_batch import Rows
from anybatch.errors import LossError
from anybatch.execution.proof.mixed import refuse_trained
from anybatch.execution.step import Step, check_trains
from anybatch.loss.contrastive import Contrastive


class LossGradients(NamedTuple):
    """Loss of all outputs at once, with the gradients of these outputs.

    Attributes:
        loss: of the full batch, detached.
        gradients: of each output tensor, in order, or None.
        begin: the first row of this rank among those of `gradients`.
    """

    loss: Tensor
    gradients: list[Tensor | None]
    begin: int


def value_of_all(step: Step, rows: Rows) -> Tensor:
    """Return the loss of the full batch without a gradient; a rank without samples joins in."""
    if isinstance(step.loss, Contrastive):
        return _of_rows(step, step.loss, rows, _here(step, rows)).detach()
    return step.full_loss(rows.outputs, _full_targets(rows)).detach()


def loss_of_all(step: Step, rows: Rows) -> LossGradients:
    """Return the loss of the full batch, and the gradients of the outputs.

    Args:
        step: the step.
        rows: outputs and targets of all ranks. Parameters of the loss itself get their gradient on
            the rank that leads.

    Raises:
        LossError: the loss uses tensors that it was not given.
    """
    own = isinstance(step.loss, Contrastive)
    outputs = _here(step, rows) if own else rows.outputs
    leaves = [tensor.detach() for _, tensor in tree.tensors(outputs)]
    for leaf in leaves:
        if leaf.is_floating_point() or leaf.is_complex():
            leaf.requires_grad_()
    step.own.update(map(id, leaves))
    moment, remaining = graph.now(), iter(leaves)
    if isinstance(step.loss, Contrastive):
        loss = _of_rows(step, step.loss, rows, tree.map_tensors(lambda _: next(remaining), outputs))
    else:  # the loss gets copies, for it may write to them; nobody else keeps them
        loss = _of_copies(
            step, tree.map_tensors(lambda _: next(remaining).clone(), outputs), _full_targets(rows)
        )
    if graph.reaches_before(loss, moment):
        trained = [path for path, t in tree.tensors(rows.targets, "targets") if t.requires_grad]
        if trained:
            raise LossError(
                "targets of a loss in which samples meet must not be trained, because they are "
                f"joined over all micro-batches, and {trained[0]} requires a gradient: give it to "
                "the model as an input and return it among the outputs, or detach() it"
            )
        raise LossError(
            "a loss must compute from its outputs and targets, and it uses a tensor that forward "
            "stored elsewhere, which belongs to one micro-batch only (an attribute of a module, a "
            "variable of a hook): return it from the model, as one value a sample"
        )
    into = None if rows.leads or own else [leaf for leaf in leaves if leaf.requires_grad]
    check_trains(step.pull([loss], step.scaled([torch.ones_like(loss)]), into))
    if step.mixed and len(leaves) == len(step.layout or ()):
        paths = [path for path, _ in tree.tensors(outputs, "outputs")]
        refuse_trained(paths, [leaf.grad is not None for leaf in leaves], step.mixed)
    return LossGradients(loss.detach(), [leaf.grad for leaf in leaves], 0 if own else rows.begin)


def _of_copies(step: Step, outputs: Any, micro: MicroBatch) -> Tensor:
    """Return the loss of copies of the outputs, without the graphs that made them.

    Raises:
        LossError: the loss differentiates one by another.
    """
    try:
        return step.full_loss(outputs, micro)
    except RuntimeError as error:
        if graph.UNUSED not in str(error):
            raise
        raise LossError(
            "a loss in which samples meet must not differentiate what the model returns, because "
            "it gets outputs of all micro-batches without their graphs, and torch.autograd.grad "
            "found none: differentiate in forward, inside `with torch.enable_grad():`, and return "
            "the derivative; or declare anybatch.Loss.per_sample where the loss is a mean over "
            "samples, and let forward return the tensor it is differentiated by, too"
        ) from error


def _full_targets(rows: Rows) -> MicroBatch:
    return MicroBatch(None, rows.targets, rows.size)


def _here(step: Step, rows: Rows) -> Any:
    """Return the outputs for the samples of this rank."""
    if not step.global_batch.several:
        return rows.outputs
    return step.rows(rows.outputs, rows.begin, rows.here, rows.size)


def _of_rows(step: Step, loss: Contrastive, rows: Rows, own: Any) -> Tensor:
    """Return a contrastive loss that is differentiable in `own`, the rows of this rank."""
    global_batch = step.global_batch
    if not global_batch.several:
        return loss.full_batch(own, _full_targets(rows))

    def gather(part: Tensor) -> Tensor:
        return global_batch.gather("the contrastive loss", part.contiguous())[0]

    return loss.of_rows(own, rows.outputs, rows.begin, _full_targets(rows), gather)
