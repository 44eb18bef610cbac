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

from anybatch import graph, tree
from anybatch.batch import MicroBatch, TensorBatch
from anybatch.errors import LossError, NotReproducibleError
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
        LossError: the loss uses tensors that it was not given.
    """
    step.found = COUPLED
    start = Dice.now()
    first = _first_pass(step)
    whole = MicroBatch(None, first.targets, step.batch.size)
    if step.gradients is None:
        loss = step.loss.whole(first.outputs, whole).detach()
        _show_all(step, first)
        return loss
    loss, gradients = _loss_of_all(step, first.outputs, whole)
    end, statistics = Dice.now(), step.buffers.statistics()
    last = step.batch.size - first.last.size
    trained = step.pull(*_shares(step, first.graph, gradients, last))
    start.put_back()
    step.buffers.restart()
    trained += _second_pass(step, first, gradients)
    check_trains(trained)
    end.put_back()
    step.buffers.settle(statistics)
    _show_all(step, first)
    step.finish()
    return loss


def _first_pass(step: Step) -> FirstPass:
    outputs, targets, sizes = [], [], []
    prints: list[int | None] = []
    lazy = not isinstance(step.batch, TensorBatch)
    for index, micro in enumerate(step.feed()):
        with torch.set_grad_enabled(step.gradients is not None and index == step.count - 1):
            step.forget_casts()
            out = step.forward(micro)
        if index == 0:
            step.check_structure(out)
        outputs.append(tree.map_tensors(Tensor.detach, out))
        targets.append(micro.targets)
        sizes.append(micro.size)
        prints.append(micro.fingerprint() if lazy else None)
    joined = tree.join(outputs, list(step.layout or ()), sizes=sizes)
    return FirstPass(joined, tree.join(targets, sizes=sizes, name="targets"), prints, micro, out)


def _loss_of_all(step: Step, outputs: Any, whole: MicroBatch) -> tuple[Tensor, list[Tensor | None]]:
    """Return the loss, and the gradient of each output tensor, in order, or None."""
    leaves = [tensor.detach() for _, tensor in tree.tensors(outputs)]
    for leaf in leaves:
        if leaf.is_floating_point() or leaf.is_complex():
            leaf.requires_grad_()
    step.own.update(map(id, leaves))
    moment, given = graph.now(), iter(leaves)
    # The loss gets copies: it may write to them.
    loss = step.loss.whole(tree.map_tensors(lambda _: next(given).clone(), outputs), whole)
    if graph.reaches_before(loss, moment):
        raise LossError(
            "a loss must compute from the outputs and targets it is given, and it uses a tensor "
            "that forward left elsewhere, which belongs to one micro-batch only (an attribute of "
            "a module, what a hook kept): return it from the model, as one value a sample"
        )
    check_trains(step.backward([loss], [torch.ones_like(loss)]))
    return loss.detach(), [leaf.grad for leaf in leaves]


def _second_pass(step: Step, first: FirstPass, gradients: list[Tensor | None]) -> int:
    """Run all micro-batches but the last again, and hand out their gradients."""
    begin = trained = 0
    for micro, fingerprint in zip(_but_the_last(step), first.prints, strict=False):
        if fingerprint is not None and micro.fingerprint() != fingerprint:
            raise NotReproducibleError(
                "both passes over a lazy batch must load the same samples, and the second loaded "
                "others: draw augmentations from torch's, numpy's or random's global generator, or "
                "declare the loss by Loss.per_sample or Loss.ratio, which needs one pass"
            )
        out = step.forward(micro)
        before = _rows(step, first.outputs, begin, micro.size)
        for (path, now), (_, then) in zip(
            tree.tensors(out, "outputs"), tree.tensors(before), strict=True
        ):
            _check_same(path, now, then)
        trained += step.pull(*_shares(step, out, gradients, begin))
        begin += micro.size
    return trained


def _but_the_last(step: Step) -> Iterator[MicroBatch]:
    return islice(step.feed(), step.count - 1)


def _rows(step: Step, outputs: Any, begin: int, size: int) -> Any:
    """Return the rows of a micro-batch of the outputs of all."""
    axes = iter(step.layout or ())

    def narrow(tensor: Tensor) -> Tensor:
        axis = next(axes)
        return tensor if axis is None else tensor.narrow(axis, begin, size)

    return tree.map_tensors(narrow, outputs)


def _shares(
    step: Step, outputs: Any, gradients: list[Tensor | None], begin: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the output tensors that the loss depends on, and their rows of its gradient.

    An output without samples is the same for all micro-batches: the first one hands it back.
    """
    roots, shares = [], []
    for (_, tensor), gradient, axis in zip(
        tree.tensors(outputs), gradients, step.layout or (), strict=True
    ):
        if gradient is None or (axis is None and begin > 0):
            continue
        size = 0 if axis is None else tensor.shape[axis]
        roots.append(tensor)
        shares.append(gradient if axis is None else gradient.narrow(axis, begin, size))
    return roots, shares


def _show_all(step: Step, first: FirstPass) -> None:
    begin = 0
    for start in range(0, step.batch.size, step.micro_batch):
        size = min(step.micro_batch, step.batch.size - start)
        targets = tree.rows(first.targets, begin, begin + size, step.batch.size)
        step.show(_rows(step, first.outputs, begin, size), MicroBatch(None, targets, size))
        begin += size


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
