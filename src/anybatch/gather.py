"""A loss that couples the samples, computed once on the outputs of the whole batch.

Dice, InfoNCE, or any function that is not known to be a sum over samples needs all outputs at once;
outputs are small, what the model saves for backward is not. So the outputs come first, without
graphs; the loss is taken on all of them; and a second pass hands each micro-batch its rows of the
gradient of the loss. It is exact for every loss, and costs one more forward.

    pass 1:  forward mu_0, mu_1, mu_2            outputs kept, no graph
             loss(all outputs), backward         d loss / d outputs
    pass 2:  forward mu_0, backward(its rows); mu_1; mu_2      the same samples, the same dice

Source: the chain rule; as gradient caching, Gao et al. 2021, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anybatch import tree
from anybatch.batch import MicroBatch, TensorBatch
from anybatch.errors import BatchError, NotReproducibleError
from anybatch.rng import Dice
from anybatch.step import Step, check_trains

COUPLED = "coupled"
"""What such a loss is called in a plan."""

Prints = list[int | None]


def gather(step: Step) -> Tensor:
    """Run the step in two passes; in one, where there are no gradients to take.

    Args:
        step: the mini-batch and the model; see `anybatch.step`.

    Returns:
        The loss of the whole batch, a detached 0-dim tensor.

    Raises:
        NotReproducibleError: the second pass met other samples or other outputs.
        BatchError: an output has no first dimension of samples.
    """
    step.found = COUPLED
    start = Dice.now()
    outputs, targets, prints = _first_pass(step)
    whole = MicroBatch(None, targets, step.batch.size)
    if step.gradients is None:
        return step.loss.whole(outputs, whole).detach()
    loss, gradients = _loss_of_all(step, outputs, whole)
    end = Dice.now()
    start.put_back()
    step.buffers.restart()
    _second_pass(step, outputs, gradients, prints)
    end.put_back()
    step.finish()
    return loss


def _first_pass(step: Step) -> tuple[Any, Any, Prints]:
    """Return the outputs and targets of the whole batch, and a fingerprint a micro-batch."""
    outputs, targets = [], []
    prints: Prints = []
    lazy = not isinstance(step.batch, TensorBatch)
    device_type = _device_type(step)
    with torch.no_grad():
        for micro in step.feed():
            out = step.forward(micro)
            _check_rows(out, micro.size)
            outputs.append(tree.map_tensors(Tensor.detach, out))
            targets.append(micro.targets)
            prints.append(micro.fingerprint() if lazy else None)
            if step.gradients is None:
                step.show(out, micro)
    if torch.is_autocast_enabled(device_type):
        torch.clear_autocast_cache()  # its casts were made without a graph
    return tree.join(outputs), tree.join(targets), prints


def _loss_of_all(step: Step, outputs: Any, whole: MicroBatch) -> tuple[Tensor, list[Tensor | None]]:
    """Return the loss, and the gradient of each output tensor, in order, or None."""

    def leaf(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        differentiable = tensor.is_floating_point() or tensor.is_complex()
        return tensor.requires_grad_() if differentiable else tensor

    leaves = tree.map_tensors(leaf, outputs)
    loss = step.loss.whole(leaves, whole)
    check_trains(int(loss.requires_grad))
    step.backward([loss])
    return loss.detach(), [tensor.grad for _, tensor in tree.tensors(leaves)]


def _second_pass(step: Step, outputs: Any, gradients: list[Tensor | None], prints: Prints) -> None:
    kept = [tensor for _, tensor in tree.tensors(outputs)]
    begin = trained = 0
    for micro, fingerprint in zip(step.feed(), prints, strict=True):
        if fingerprint is not None and micro.fingerprint() != fingerprint:
            raise NotReproducibleError(
                "both passes over a lazy batch must load the same samples, and the second loaded "
                "others: draw augmentations from torch's, numpy's or random's global generator, or "
                "declare the loss by Loss.per_sample or Loss.ratio, which needs one pass"
            )
        end = begin + micro.size
        out = step.forward(micro)
        roots, grads = [], []
        for (path, tensor), first, share in zip(
            tree.tensors(out, "outputs"), kept, gradients, strict=True
        ):
            if tensor.dim() > 0:
                _check_same(path, tensor, first[begin:end])
            if share is not None and tensor.requires_grad:
                roots.append(tensor)
                grads.append(share[begin:end] if tensor.dim() > 0 else share)
        if roots:
            step.backward(roots, grads)
            trained += 1
        step.show(out, micro)
        begin = end
    check_trains(trained)


def _check_rows(outputs: Any, n: int) -> None:
    for path, tensor in tree.tensors(outputs, "outputs"):
        if tensor.dim() == 0 or tensor.shape[0] != n:
            raise BatchError(
                f"a loss that couples the samples needs outputs whose first dimension is the "
                f"samples, {n} here, and {path} has shape {tuple(tensor.shape)}: move the samples "
                "to the front in the model and back in the loss, or declare the loss"
            )


def _check_same(path: str, now: Tensor, before: Tensor) -> None:
    """Compare the outputs of both passes up to rounding: other dice differ by far more."""
    if torch.equal(now, before):
        return
    if now.is_floating_point() and now.shape == before.shape:
        finite = before[before.isfinite()].abs()
        bound = torch.finfo(now.dtype).eps ** 0.5 * (float(finite.max()) if len(finite) else 0.0)
        if torch.allclose(now.detach(), before, rtol=0.0, atol=bound, equal_nan=True):
            return
    raise NotReproducibleError(
        f"both passes must give the same outputs, and {path} differs: the model draws from a "
        "generator of its own, or changes from call to call. Use the global generators, or "
        "declare the loss by Loss.per_sample or Loss.ratio, which needs one pass"
    )


def _device_type(step: Step) -> str:
    parameter = next(step.model.parameters(), None)
    return "cpu" if parameter is None else parameter.device.type
