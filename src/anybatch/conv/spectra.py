"""Products of spectra, and the order in memory in which they are fast.

Where every channel of an output has one channel of the input, spectra are multiplied as they are:

    depthwise   [N, channels, *tiles, *frequencies]

Where it has several, there is a product of matrices for each frequency, and a library is fast at
these when each lies in one piece. So the input of the transform is laid out in an order whose
transpose is that:

    together    [groups, N, *tiles, channels of a group, *places]        as it is transformed
                [frequencies, groups, N x tiles, channels of a group]    transposed as one matrix

A transpose of one matrix is several times as fast as a permutation of many
dimensions where these are powers of two.

Source: Mathieu, Henaff and LeCun (2014), section 3, "transpose, then a product of matrices".
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from anybatch.conv.problem import Problem, Sizes
from anybatch.conv.rough import frequencies

BLOCK = 1 << 19
"""Bytes of spectra that are transformed and transposed at a time."""

ROWS = 32
"""The fewest of them."""


def is_depthwise(problem: Problem) -> bool:
    """Say whether every output has one input channel: spectra are multiplied as they are."""
    one = problem.channels == problem.groups
    return one and (problem.kernel != "data" or problem.filters == problem.groups)


def images(problem: Problem, tiles: Tensor) -> Tensor:
    """Return tiles [N, channels, *tiles, *places] in the order of their products."""
    if is_depthwise(problem):
        return tiles.contiguous()
    dims = len(problem.image)
    grouped = _grouped(problem, tiles)
    order = 1, 0, *range(3, 3 + dims), 2, *range(3 + dims, 3 + 2 * dims)
    return grouped.permute(order).contiguous()


def filters(problem: Problem, w: Tensor) -> Tensor:
    """Return filters [F, C / groups, *places] in the order of their products."""
    if is_depthwise(problem):
        return w
    grouped = w.reshape(problem.groups, -1, *w.shape[1:])
    return grouped.transpose(1, 2).contiguous() if problem.kernel == "forward" else grouped


def matrices(problem: Problem, laid: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the spectra of the result of `images` or `filters`, in the layout of their products.

    Some rows at a time are transformed and transposed, so that they stay in the processor's cache
    and no second copy of all exists.
    """
    dims = list(range(-len(lengths), 0))
    if is_depthwise(problem):
        found: Tensor = torch.fft.rfftn(laid, s=list(lengths), dim=dims)
        return found
    columns, count = laid.shape[-len(lengths) - 1], prod(frequencies(lengths))
    rows = laid.reshape(-1, *laid.shape[-len(lengths) :])
    dtype = rows.dtype.to_complex()
    first = torch.empty((count, len(rows)), dtype=dtype, device=rows.device)
    block = max(ROWS, BLOCK // (count * dtype.itemsize))
    for begin in range(0, len(rows), block):
        some = torch.fft.rfftn(rows[begin : begin + block], s=list(lengths), dim=dims)
        first[:, begin : begin + block] = some.reshape(len(some), -1).t()
    return first.view(count * problem.groups, -1, columns)


def spectra(problem: Problem, product: Tensor, shape: Sizes) -> Tensor:
    """Return the spectra of a product in the layout before `matrices`: [..., *frequencies]."""
    if is_depthwise(problem):
        return product.view(shape)
    count = prod(shape[-len(problem.image) :])
    return product.view(count, -1).t().contiguous().view(shape)


def times(problem: Problem, one: Tensor, shared: Tensor) -> Tensor:
    """Return the product of images, which may be written over, and all filters.

    Args:
        problem: a forward, or a gradient of the input.
        one: images.
        shared: filters.

    Returns:
        Matrices; or [N, groups, filters of one, *tiles, *frequencies].
    """
    if not is_depthwise(problem):
        return torch.bmm(one, shared)
    ones = [1] * len(problem.image)
    per = problem.filters // problem.groups
    windows = shared.reshape(problem.groups, per, *ones, *shared.shape[2:])
    grouped = one.unsqueeze(2)
    return grouped.mul_(windows) if per == 1 else grouped * windows


def summed(problem: Problem, total: Tensor | None, dy: Tensor, x: Tensor) -> Tensor:
    """Add the product of outputs and images, over all samples and tiles, to those before.

    Args:
        problem: a gradient of the filters.
        total: of other samples. Default None: there are none.
        dy: outputs.
        x: images.

    Returns:
        Matrices; or [groups, filters of one, *frequencies].
    """
    if not is_depthwise(problem):
        rows = dy.mT
        return torch.bmm(rows, x) if total is None else total.baddbmm_(rows, x)
    dims = len(problem.image)
    ys = _grouped(problem, dy).flatten(3, 2 + dims)
    xs = x.unsqueeze(2).flatten(3, 2 + dims)
    for number in range(len(ys)):
        for tile in range(ys.shape[3]):
            y, image = ys[number, :, :, tile], xs[number, :, :, tile]
            total = y * image if total is None else total.addcmul_(y, image)
    assert total is not None
    return total


def _grouped(problem: Problem, images: Tensor) -> Tensor:
    """Return [N, groups, channels of one, ...]."""
    return images.reshape(len(images), problem.groups, -1, *images.shape[2:])
