"""Comparison of gradients: a few rows in two micro-batches must add up to the same rows in one.

Masks show which samples meet in a backward that is not torch's own. They do not show a number that
counts rows, nor a row that is treated by its place. Gradients can be added, so here they are
compared, up to rounding:

    backward(rows 0 1 2 3)  =  backward(rows 0 1) + backward(rows 2 3)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from anybatch.core import tree
from anybatch.core.batch import MicroBatch

Axes = Sequence[int | None] | None


def add_up(
    run: Callable[[MicroBatch], Any], full: MicroBatch, axes: Axes, leaves: Sequence[Tensor]
) -> bool | None:
    """Say whether the gradients of the rows in one and in two micro-batches are the same.

    None where no output has samples and a gradient: a loss that the model returns is no row.

    Args:
        run: calls the model, each time as the first time.
        full: the rows.
        axes: where each output holds the samples, None where it holds none; None in place of all if
            the model returns its loss: the first dimension of the other outputs.
        leaves: tensors that get a gradient; their previous ones are restored.
    """
    half = full.size // 2
    held = [leaf.grad for leaf in leaves]
    seeds: list[Tensor] = []
    try:
        every = _gradients(run, full, (0, full.size), axes, leaves, seeds)
        if all(gradient is None for gradient in every[0]):
            return None
        first = _gradients(run, full, (0, half), axes, leaves, seeds)
        second = _gradients(run, full, (half, full.size), axes, leaves, seeds)
    finally:
        for leaf, gradient in zip(leaves, held, strict=True):
            leaf.grad = gradient
    rows = [torch.cat(pair) for pair in zip(first[1], second[1], strict=True)]
    sums = [_sum(pair) for pair in zip(first[0], second[0], strict=True)]
    pairs = [*zip(every[0], sums, strict=True), *zip(every[1], rows, strict=True)]
    sizes = [float(g.abs().max()) for g, _ in pairs if g is not None and g.numel()]
    scale = max(sizes, default=0.0)
    return all(_alike(one, other, scale) for one, other in pairs)


def _gradients(
    run: Callable[[MicroBatch], Any],
    full: MicroBatch,
    of: tuple[int, int],
    axes: Axes,
    leaves: Sequence[Tensor],
    seeds: list[Tensor],
) -> tuple[list[Tensor | None], list[Tensor]]:
    """Return the gradients of some rows: for the leaves, and for the rows of the inputs."""
    begin, end = of
    inputs = tree.map_tensors(leaf_of, tree.rows(full.inputs, begin, end, full.size))
    rows = [t for _, t in tree.tensors(inputs) if t.requires_grad]
    outputs = run(MicroBatch(tree.map_tensors(moved, inputs), None, end - begin))
    every = [t for _, t in tree.tensors(outputs)]
    seeds += [_seed(t) for t in every] if not seeds else []
    if axes is None:
        axes = [0 if t.dim() and t.shape[0] == end - begin else None for t in every]
    roots, gradients = [], []
    for one, seed, axis in zip(every, seeds, axes, strict=False):
        if one.requires_grad and axis is not None:
            roots.append(one)
            gradients.append(seed.narrow(axis, begin, end - begin))
    for leaf in leaves:
        leaf.grad = None
    if roots:
        torch.autograd.backward(roots, gradients)  # reentrant checkpoints refuse grad()
    return [_dense(leaf.grad) for leaf in leaves], [
        torch.zeros_like(row) if row.grad is None else row.grad for row in rows
    ]


def leaf_of(tensor: Tensor) -> Tensor:
    """Return a leaf that takes a gradient, where a tensor can have one."""
    if not _real(tensor):
        return tensor
    return tensor.detach().clone().requires_grad_()


def moved(tensor: Tensor) -> Tensor:
    """Return a tensor that forward may write to in place of a leaf."""
    return tensor.clone() if tensor.requires_grad else tensor


def _seed(output: Tensor) -> Tensor:
    """Return numbers of its shape that differ from place to place; they are drawn from nothing."""
    if not _real(output):
        return output
    places = torch.arange(1, output.numel() + 1, device=output.device, dtype=torch.float32)
    return places.cos().reshape(output.shape).to(output.dtype)


def _real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _dense(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient that can be compared: that of a sparse embedding names rows twice."""
    sparse = gradient is not None and gradient.layout != torch.strided
    return gradient.to_dense() if sparse and gradient is not None else gradient


def _sum(pair: tuple[Tensor | None, Tensor | None]) -> Tensor | None:
    one, other = pair
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _alike(one: Tensor | None, other: Tensor | None, scale: float) -> bool:
    """Compare gradients up to rounding; a result that counts rows or places is far from it.

    A gradient whose true value is 0 is compared with the largest of all.
    """
    if one is None or other is None:
        return one is other
    finite = one.isfinite() & other.isfinite()
    a, b = one[finite], other[finite]
    if not len(a):
        return True
    eps = torch.finfo(one.dtype).eps
    bound = eps ** (0.5 if eps == torch.finfo(torch.float64).eps else 0.25)
    largest = max(float(torch.maximum(a.abs(), b.abs()).max()), 0.01 * scale, eps)
    return bool((a - b).abs().max() <= bound * largest)
