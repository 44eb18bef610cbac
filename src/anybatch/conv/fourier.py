"""Convolutions by the fast Fourier transform, for windows that are large or long.

All three kernels are convolutions of two operands, one of which may have to be turned around, cut
into circles (`anybatch.conv.circles`) and multiplied there (`anybatch.conv.spectra`):

    forward   y  = x  * turned w        of x the tiles overlap
    data      dx = dy * w               of dy they do
    filter    dw = x  * turned dy       of x they do, and the products of all tiles are summed

Strides are taken from the result, or put between the outputs as zeros; dilation puts zeros into the
window. Nothing is conjugated: under a dispatch mode nobody below autograd resolves a conjugate that
`Tensor.conj` has only marked, and turning a window around is less than a pass over its spectrum.

What parts of a mini-batch have in common is transformed once for all of them: the filters before
the first, or the sum of their gradients behind the last.

torch's own kernels on the CPU take time in proportion to the window; this takes none for it. It
needs the spectra of all operands, which is much for many samples at a time and little for a few
(`anybatch.conv.divide`).

Source: Mathieu, Henaff and LeCun, Fast training of convolutional networks through FFTs (2014), to
which u-cuDNN's FFT algorithms go back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from anybatch.conv import spectra
from anybatch.conv.circles import Circle, cuts
from anybatch.conv.problem import Problem, Sizes

Circles = tuple[Circle, ...]

HALVES = (torch.float16, torch.bfloat16)
"""Types of which sums are kept in float32."""


class Fourier:
    """Kernels as products of spectra; sums are of float32 where operands are of half precision.

    Args:
        circles: of a problem.
    """

    once = True

    def __init__(self, circles: Callable[[Problem], Circles]) -> None:
        self._circles = circles

    def shared(self, problem: Problem, w: Tensor) -> Tensor:
        """Return the spectra of the filters: [groups x frequencies, ...]."""
        wide = _apart(_exact(w), problem.dilation)
        turned = wide.flip(_dims(problem)) if problem.kernel == "forward" else wide
        return spectra.filters(problem, _spectrum(turned, self._circles(problem)))

    def part(self, problem: Problem, one: Tensor, shared: Tensor) -> Tensor:
        """Return what a forward or the gradient of the input is for some samples."""
        circles = self._circles(problem)
        forward = problem.kernel == "forward"
        image = _exact(one) if forward else _apart(_exact(one), problem.stride)
        product = spectra.times(problem, _tiles(image, circles), shared)
        sizes = problem.outputs if forward else problem.image
        return _result(product, circles, sizes, problem.stride if forward else None)

    def add(self, problem: Problem, total: Tensor | None, dy: Tensor, x: Tensor) -> Tensor:
        """Add the spectra of the filters' gradients for some samples."""
        circles = self._circles(problem)
        outputs = _turned(_apart(_exact(dy), problem.stride), circles)
        return spectra.summed(
            problem, total, _spectrum(outputs, circles), _tiles(_exact(x), circles)
        )

    def finish(self, problem: Problem, total: Tensor) -> Tensor:
        """Return the gradients of which these are the spectra."""
        circles = self._circles(problem)
        product = spectra.gradients(problem, total, _frequencies(circles))
        alone = tuple(Circle(c.length, 1, c.length, 0, c.first, c.span) for c in circles)
        return _result(product, alone, problem.window, problem.dilation)


def _exact(tensor: Tensor) -> Tensor:
    """Return a tensor of float32 in the place of one of half precision."""
    return tensor.float() if tensor.dtype in HALVES else tensor


def _dims(problem: Problem) -> list[int]:
    return list(range(-len(problem.image), 0))


def _frequencies(circles: Circles) -> Sizes:
    *others, last = (circle.length for circle in circles)
    return (*others, last // 2 + 1)


def _spectrum(tensor: Tensor, circles: Circles) -> Tensor:
    """Return the spectra of tensors that begin where their circles do."""
    dims = list(range(-len(circles), 0))
    found: Tensor = torch.fft.rfftn(tensor, s=[c.length for c in circles], dim=dims)
    return found


def _tiles(image: Tensor, circles: Circles) -> Tensor:
    """Return the spectra of all tiles: [N, channels, *tiles, *frequencies]."""
    ends = cuts(tuple(image.shape[2:]), circles)
    padded = F.pad(image, [end for pair in reversed(ends) for end in pair])
    for at, circle in enumerate(circles):
        padded = padded.unfold(2 + at, circle.length, circle.step)
    padded = padded.contiguous()  # a transform would copy it where no meter sees it
    return _spectrum(padded, circles)


def _turned(outputs: Tensor, circles: Circles) -> Tensor:
    """Return outputs cut into tiles that do not overlap, each turned around."""
    ends = [
        (0, circle.count * circle.span - h)
        for h, circle in zip(outputs.shape[2:], circles, strict=True)
    ]
    padded = F.pad(outputs, [end for pair in reversed(ends) for end in pair])
    for at, circle in enumerate(circles):
        padded = padded.unfold(2 + at, circle.span, circle.span)
    return padded.flip(list(range(-len(circles), 0)))


def _apart(tensor: Tensor, steps: Sizes) -> Tensor:
    """Return a tensor with zeros between its entries, so that they are `steps` apart."""
    if all(step == 1 for step in steps):
        return tensor
    sizes = tensor.shape[-len(steps) :]
    lengths = [(h - 1) * step + 1 for h, step in zip(sizes, steps, strict=True)]
    wide = tensor.new_zeros((*tensor.shape[: -len(steps)], *lengths))
    inner: Any = (..., *(slice(None, None, step) for step in steps))
    wide[inner] = tensor
    return wide


def _result(
    product: Tensor, circles: Circles, sizes: Sequence[int], steps: Sequence[int] | None
) -> Tensor:
    """Return what is wanted of the places of all circles, tile after tile.

    Args:
        product: spectra, [rows, channels, *tiles, *frequencies].
        circles: of all directions.
        sizes: of the result.
        steps: between entries that are wanted. Default None: 1.
    """
    dims = len(circles)
    steps = steps or [1] * dims
    for at, (circle, size, step) in enumerate(zip(circles, sizes, steps, strict=True)):
        dim = at - dims
        if at < dims - 1:
            product = torch.fft.ifft(product, dim=dim)
        else:
            product = product.contiguous()
            product = torch.fft.irfft(product, n=circle.length, dim=dim)
        places = slice(circle.first, circle.first + circle.step)
        if circle.count == 1:
            places = slice(circle.first, circle.first + (size - 1) * step + 1, step)
        inner: Any = (..., places, *[slice(None)] * (dims - at - 1))
        product = product[inner]
    return _joined(product, circles, sizes, steps)


def _joined(tiles: Tensor, circles: Circles, sizes: Sequence[int], steps: Sequence[int]) -> Tensor:
    """Return tiles [rows, channels, *tiles, *places] beside each other."""
    dims = len(circles)
    rows, channels = tiles.shape[:2]
    order = [axis for at in range(dims) for axis in (2 + at, 2 + dims + at)]
    beside = tiles.permute(0, 1, *order)
    lengths = [tiles.shape[2 + at] * tiles.shape[2 + dims + at] for at in range(dims)]
    whole = beside.reshape(rows, channels, *lengths)
    places = [
        slice(None) if circle.count == 1 else slice(0, (size - 1) * step + 1, step)
        for circle, size, step in zip(circles, sizes, steps, strict=True)
    ]
    inner: Any = (..., *places)
    return whole[inner]
