"""Products of spectra, and the order in memory in which they are fast.

Where every output channel has one input channel, spectra are multiplied as they are. Where it has
several, there is a product of matrices for each frequency, and a library takes those one after
another when each lies in one piece:

    spectra of images   [N, channels, *tiles, *frequencies]     as a transform returns them
    matrices            [groups x frequencies, N x tiles, channels of a group]

Source: Mathieu, Henaff and LeCun (2014), section 3, "transpose, then a product of matrices".
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from anybatch.conv.problem import Problem


def filters(problem: Problem, spectrum: Tensor) -> Tensor:
    """Return the spectra of filters as `times` wants them.

    Args:
        problem: the kernel.
        spectrum: [F, C / groups, *frequencies].
    """
    if _alone(problem):
        return spectrum
    per = problem.filters // problem.groups
    apart = spectrum.reshape(problem.groups, per, spectrum.shape[1], -1)
    order = (0, 3, 2, 1) if problem.kernel == "forward" else (0, 3, 1, 2)
    return apart.permute(order).flatten(0, 1).contiguous()


def times(problem: Problem, images: Tensor, shared: Tensor) -> Tensor:
    """Return the spectra of what all filters make of images; those may be written over.

    Args:
        problem: a forward, or a gradient of the input.
        images: [N, channels, *tiles, *frequencies].
        shared: as `filters` returns it.

    Returns:
        [N, channels of the result, *tiles, *frequencies].
    """
    size, groups, forward = len(images), problem.groups, problem.kernel == "forward"
    channels = problem.filters if forward else problem.channels
    shape = (size, channels, *images.shape[2:])
    if _alone(problem):
        tiles, dims = [1] * len(problem.image), images.shape[2 + len(problem.image) :]
        if problem.channels == problem.filters:
            return images.mul_(shared.reshape(channels, *tiles, *dims))
        found = images.unsqueeze(2) * shared.reshape(groups, -1, *tiles, *dims)
        return found.view(shape)
    rows = _matrices(problem, images)
    product = torch.bmm(rows, shared)
    return _images(product, groups, shape)


def summed(problem: Problem, total: Tensor | None, outputs: Tensor, images: Tensor) -> Tensor:
    """Add the spectra of the filters' gradients, over all samples and tiles, to those before.

    Args:
        problem: a gradient of the filters.
        total: those of other samples. Default None: there are none.
        outputs: [N, F, *tiles, *frequencies].
        images: [N, C, *tiles, *frequencies].
    """
    dims = len(problem.image)
    if problem.channels == problem.groups:
        per = problem.filters // problem.groups
        places = outputs.shape[2 + dims :]
        ys = outputs.reshape(len(outputs), problem.groups, per, -1, *places)
        xs = images.reshape(len(images), problem.groups, 1, -1, *places)
        for number in range(len(ys)):
            for tile in range(ys.shape[3]):
                y, x = ys[number, :, :, tile], xs[number, :, :, tile]
                total = y * x if total is None else total.addcmul_(y, x)
        assert total is not None
        return total
    ys, xs = _matrices(problem, outputs).mT, _matrices(problem, images)
    return torch.bmm(ys, xs) if total is None else total.baddbmm_(ys, xs)


def gradients(problem: Problem, total: Tensor, frequencies: Sequence[int]) -> Tensor:
    """Return the spectra of gradients as those of filters: [F, C / groups, *tiles, *frequencies].

    There is one tile in each direction.
    """
    ones = [1] * len(problem.image)
    per = problem.channels // problem.groups
    if problem.channels == problem.groups:
        return total.reshape(problem.filters, per, *ones, *frequencies)
    apart = total.view(problem.groups, prod(frequencies), -1, per).permute(0, 2, 3, 1)
    return apart.reshape(problem.filters, per, *ones, *frequencies)


def _alone(problem: Problem) -> bool:
    """Say whether every channel of the result has one channel that it comes from."""
    one = problem.channels == problem.groups
    return one if problem.kernel == "forward" else one and problem.filters == problem.groups


def _matrices(problem: Problem, images: Tensor) -> Tensor:
    """Return [groups x frequencies, N x tiles, channels of a group], in one piece."""
    dims, groups = len(problem.image), problem.groups
    size, channels = images.shape[:2]
    tiles = prod(images.shape[2 : 2 + dims])
    apart = images.reshape(size, groups, channels // groups, tiles, -1)
    return apart.permute(1, 4, 0, 3, 2).reshape(-1, size * tiles, channels // groups)


def _images(product: Tensor, groups: int, shape: tuple[int, ...]) -> Tensor:
    """Return the spectra of images [N, channels, *tiles, *frequencies] of such matrices."""
    size, channels = shape[:2]
    tiles = product.shape[1] // size
    apart = product.view(groups, -1, size, tiles, channels // groups)
    return apart.permute(2, 0, 4, 3, 1).reshape(shape)
