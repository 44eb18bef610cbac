"""A loss that couples the samples, computed once on the outputs of the whole batch.

Dice, InfoNCE, or any function that is not known to be a sum over samples needs all outputs at once;
outputs are small, what the model saves for backward is not. So the outputs come first, without
graphs; the loss is taken on all of them; and a second pass hands each micro-batch its rows of the
gradient of the loss. It is exact for every loss, and costs one more forward of all micro-batches
but the last, whose graph is still there when the loss has been taken.

    pass 1:  forward mu_0, mu_1, mu_2           outputs kept; a graph of mu_2 only
             loss(all outputs), backward        d loss / d outputs;  backward of mu_2
    pass 2:  forward mu_0, backward(its rows);  mu_1                 the same samples and dice

Source: the chain rule; as gradient caching, Gao et al. 2021, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
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


@dataclass(frozen=True)
class FirstPass:
    """What the first pass keeps.

    Attributes:
        outputs: of the whole batch, without graph.
        targets: of the whole batch.
        prints: a fingerprint of each micro-batch of samples that are loaded again.
        last: the last micro-batch.
        graph: its outputs, with their graph.
    """

    outputs: Any
    targets: Any
    prints: list[int | None]
    last: MicroBatch
    graph: Any


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
    first = _first_pass(step)
    whole = MicroBatch(None, first.targets, step.batch.size)
    if step.gradients is None:
        return step.loss.whole(first.outputs, whole).detach()
    loss, gradients = _loss_of_all(step, first.outputs, whole)
    end, statistics = Dice.now(), step.buffers.statistics()
    last = step.batch.size - first.last.size
    trained = step.pull(*_rows(first.graph, gradients, last))
    start.put_back()
    step.buffers.restart()
    outputs = [tensor for _, tensor in tree.tensors(first.outputs)]
    trained += _second_pass(step, outputs, gradients, first.prints[:-1])
    check_trains(trained)
    step.show(first.graph, first.last)
    end.put_back()
    step.buffers.settle(statistics)
    step.finish()
    return loss


def _first_pass(step: Step) -> FirstPass:
    outputs, targets = [], []
    prints: list[int | None] = []
    lazy = not isinstance(step.batch, TensorBatch)
    for index, micro in enumerate(step.feed()):
        with torch.set_grad_enabled(step.gradients is not None and index == step.count - 1):
            _forget_casts(step)
            out = step.forward(micro)
        _check_rows(out, micro.size)
        outputs.append(tree.map_tensors(Tensor.detach, out))
        targets.append(micro.targets)
        prints.append(micro.fingerprint() if lazy else None)
        if step.gradients is None:
            step.show(out, micro)
    return FirstPass(tree.join(outputs), tree.join(targets), prints, micro, out)


def _forget_casts(step: Step) -> None:
    """Drop the casts of the weights that autocast keeps: some were made without a graph."""
    parameter = next(step.model.parameters(), None)
    if parameter is not None and torch.is_autocast_enabled(parameter.device.type):
        torch.clear_autocast_cache()


def _loss_of_all(step: Step, outputs: Any, whole: MicroBatch) -> tuple[Tensor, list[Tensor | None]]:
    """Return the loss, and the gradient of each output tensor, in order, or None."""

    def leaf(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        differentiable = tensor.is_floating_point() or tensor.is_complex()
        return tensor.requires_grad_() if differentiable else tensor

    leaves = tree.map_tensors(leaf, outputs)
    loss = step.loss.whole(leaves, whole)
    check_trains(step.backward([loss], [torch.ones_like(loss)]))
    return loss.detach(), [tensor.grad for _, tensor in tree.tensors(leaves)]


def _second_pass(
    step: Step, outputs: list[Tensor], gradients: list[Tensor | None], prints: list[int | None]
) -> int:
    """Run all micro-batches but the last again, and hand out their gradients."""
    begin = trained = 0
    for micro, fingerprint in zip(_but_the_last(step), prints, strict=True):
        if fingerprint is not None and micro.fingerprint() != fingerprint:
            raise NotReproducibleError(
                "both passes over a lazy batch must load the same samples, and the second loaded "
                "others: draw augmentations from torch's, numpy's or random's global generator, or "
                "declare the loss by Loss.per_sample or Loss.ratio, which needs one pass"
            )
        out = step.forward(micro)
        for (path, now), before in zip(tree.tensors(out, "outputs"), outputs, strict=True):
            _check_same(path, now, before[begin : begin + micro.size])
        trained += step.pull(*_rows(out, gradients, begin))
        step.show(out, micro)
        begin += micro.size
    return trained


def _but_the_last(step: Step) -> Iterator[MicroBatch]:
    return islice(step.feed(), step.count - 1)


def _rows(
    outputs: Any, gradients: list[Tensor | None], begin: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the output tensors that the loss depends on, and their rows of its gradient."""
    pairs = [
        (tensor, gradient[begin : begin + len(tensor)])
        for (_, tensor), gradient in zip(tree.tensors(outputs), gradients, strict=True)
        if gradient is not None
    ]
    return [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]


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
