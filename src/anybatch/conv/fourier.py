"""Convolutions by the fast Fourier transform, for windows that are large or long.

All three kernels are convolutions of two operands, one of which may have to be turned around, cut
into circles (`anybatch.conv.circles`) and multiplied there (`anybatch.conv.spectra`):

    forward   y  = x  * turned w        of x the tiles overlap
    data      dx = dy * w               of dy they do
    filter    dw = x  * turned dy       of x they do, and the products of all tiles are summed

Strides are applied to the result, or put between the outputs as zeros; dilation puts zeros into the
window. Nothing is conjugated: under a dispatch mode no code below autograd resolves a conjugate
that `Tensor.conj` has only marked, and flipping a window is less than a pass over its spectrum.

The common part of the parts of a mini-batch is transformed once for all of them: the filters before
the first, or the sum of their gradients behind the last.

torch's own kernels on the CPU take time in proportion to the window; this takes none for it. It
needs the spectra of all operands, which is much for many samples at a time and little for a few
(`anybatch.conv.divide`).

Source: Mathieu, Henaff and LeCun, Fast training of convolutional networks through FFTs (2014), to
which u-cuDNN's FFT algorithms go back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from anybatch.conv import rough, spectra, staged
from anybatch.conv.circles import Circle, cuts
from anybatch.conv.problem import Problem, Sizes

Circles = tuple[Circle, ...]

HALVES = (torch.float16, torch.bfloat16)
"""Types whose sums are in float32."""

CLEARLY = 0.7
"""Share of the cost of fast transforms, below which filters are transformed by products of
matrices, which need more workspace; in the inverse they need less."""


class Fourier:
    """Kernels as products of spectra; sums are of float32 where operands are of half precision.

    Args:
        circles: of a problem.
    """

    once = True

    def __init__(self, circles: Callable[[Problem], Circles]) -> None:
        self._circles = circles

    def shared(self, problem: Problem, w: Tensor) -> Tensor:
        """Return the spectra of the filters."""
        wide = spectra.filters(problem, _dilated(_exact(w), problem.dilation))
        turned = wide.flip(_dims(problem)) if problem.kernel == "forward" else wide
        circles = self._circles(problem)
        if not _staged(problem, circles, CLEARLY):
            return spectra.matrices(problem, turned, _lengths(circles))
        found = staged.spectrum(turned, circles)
        return found.view(len(found) * problem.groups, *turned.shape[1:3])

    def part(self, problem: Problem, one: Tensor, shared: Tensor) -> Tensor:
        """Return the result of a forward or of the gradient of the input for some samples."""
        circles = self._circles(problem)
        forward = problem.kernel == "forward"
        image = _exact(one) if forward else _dilated(_exact(one), problem.stride)
        product = spectra.times(problem, _tiles(problem, image, circles), shared)
        tiles = [circle.count for circle in circles]
        per = (problem.filters if forward else problem.channels) // problem.groups
        shape = (problem.groups, len(one), *tiles, per)
        if spectra.is_depthwise(problem):
            shape = (len(one), problem.groups, per, *tiles)
        product = spectra.spectra(problem, product, (*shape, *_frequencies(circles)))
        sizes = problem.outputs if forward else problem.image
        ones = (1,) * len(circles)
        return _result(problem, product, circles, sizes, problem.stride if forward else ones)

    def add(self, problem: Problem, total: Tensor | None, dy: Tensor, x: Tensor) -> Tensor:
        """Add the spectra of the filters' gradients for some samples."""
        circles = self._circles(problem)
        outputs = _turned(problem, _dilated(_exact(dy), problem.stride), circles)
        outputs = spectra.matrices(problem, outputs, _lengths(circles))
        return spectra.summed(problem, total, outputs, _tiles(problem, _exact(x), circles))

    def finish(self, problem: Problem, total: Tensor) -> Tensor:
        """Return the gradients of which these are the spectra."""
        circles = self._circles(problem)
        rows = zip(circles, problem.window, problem.dilation, strict=True)
        ends = [slice(c.first, c.first + (k - 1) * d + 1, d) for c, k, d in rows]
        if _staged(problem, circles, 1.0):
            columns = total.view(-1, prod(problem.weight[:2]))
            return staged.places(columns, circles, ends).view(problem.weight)
        shape = (*problem.weight[:2], *_frequencies(circles))
        return _back(spectra.spectra(problem, total, shape), circles, ends)


def _staged(problem: Problem, circles: Circles, share: float) -> bool:
    """Say whether filters are transformed by products of matrices, which take less than a share."""
    lengths = _lengths(circles)
    pays = rough.staged(lengths, problem.spans) < share * rough.fast(lengths)
    return pays and not spectra.is_depthwise(problem)


def _exact(tensor: Tensor) -> Tensor:
    """Return a tensor of float32 in the place of one of half precision."""
    return tensor.float() if tensor.dtype in HALVES else tensor


def _dims(problem: Problem) -> list[int]:
    return list(range(-len(problem.image), 0))


def _lengths(circles: Circles) -> Sizes:
    return tuple(circle.length for circle in circles)


def _frequencies(circles: Circles) -> Sizes:
    return rough.frequencies(_lengths(circles))


def _tiles(problem: Problem, image: Tensor, circles: Circles) -> Tensor:
    """Return the spectra of all tiles."""
    tiles = _padded(image, cuts(tuple(image.shape[2:]), circles))
    for at, circle in enumerate(circles):
        tiles = tiles.unfold(2 + at, circle.length, circle.step)
    tiles = spectra.images(problem, tiles)
    return spectra.matrices(problem, tiles, _lengths(circles))


def _padded(image: Tensor, ends: Sequence[tuple[int, int]]) -> Tensor:
    """Return an image with zeros at both ends of each direction, or with entries left out."""
    if not any(end for pair in ends for end in pair):
        return image
    return F.pad(image, [end for pair in reversed(ends) for end in pair])


def _turned(problem: Problem, outputs: Tensor, circles: Circles) -> Tensor:
    """Return outputs cut into tiles that do not overlap, each turned around."""
    rows = zip(outputs.shape[2:], circles, strict=True)
    ends = [(0, circle.count * circle.span - h) for h, circle in rows]
    tiles = _padded(outputs, ends)
    for at, circle in enumerate(circles):
        tiles = tiles.unfold(2 + at, circle.span, circle.span)
    return spectra.images(problem, tiles.flip(_dims(problem)))


def _dilated(tensor: Tensor, steps: Sizes) -> Tensor:
    """Return a tensor with zeros between its entries, so that their distance is `steps`."""
    if all(step == 1 for step in steps):
        return tensor
    sizes = tensor.shape[-len(steps) :]
    lengths = [(h - 1) * step + 1 for h, step in zip(sizes, steps, strict=True)]
    wide = tensor.new_zeros((*tensor.shape[: -len(steps)], *lengths))
    inner: Any = (..., *(slice(None, None, step) for step in steps))
    wide[inner] = tensor
    return wide


def _back(product: Tensor, circles: Circles, places: Sequence[slice]) -> Tensor:
    """Return some places of all circles, of spectra [..., *frequencies]."""
    dims = len(circles)
    for at, (circle, wanted) in enumerate(zip(circles, places, strict=True)):
        if at < dims - 1:
            product = torch.fft.ifft(product, dim=at - dims)
        else:
            product = product.contiguous()  # a transform would copy it where no meter sees it
            product = torch.fft.irfft(product, n=circle.length, dim=-1)
        inner: Any = (..., wanted, *[slice(None)] * (dims - at - 1))
        product = product[inner]
    return product


def _result(
    problem: Problem, product: Tensor, circles: Circles, sizes: Sizes, steps: Sizes
) -> Tensor:
    """Return a result [N, channels, *sizes] of the spectra of all its tiles.

    Args:
        problem: the kernel.
        product: as `spectra.spectra` returns it.
        circles: of all directions.
        sizes: of the result in space.
        steps: between entries that are wanted.
    """
    dims = len(circles)
    rows = list(zip(circles, sizes, steps, strict=True))
    ends = [(o - 1) * s + 1 for _, o, s in rows]
    single = [circle.count == 1 for circle in circles]
    inside = [
        slice(c.first, c.first + end, s) if one else slice(c.first, c.first + c.step)
        for (c, _, s), end, one in zip(rows, ends, single, strict=True)
    ]
    found = _back(product, circles, inside)
    if not spectra.is_depthwise(problem):
        found = found.permute(1, 0, 2 + dims, *range(2, 2 + dims), *range(3 + dims, 3 + 2 * dims))
    axes = [axis for at in range(dims) for axis in (3 + at, 3 + dims + at)]
    lengths = [found.shape[3 + at] * found.shape[3 + dims + at] for at in range(dims)]
    joined = found.permute(0, 1, 2, *axes).reshape(len(found), -1, *lengths)
    last: Any = tuple(
        slice(None) if one else slice(0, end, s)
        for (_, _, s), end, one in zip(rows, ends, single, strict=True)
    )
    return joined[(..., *last)]
