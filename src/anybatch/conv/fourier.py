"""Convolutions by the fast Fourier transform, for windows that are large or long.

All three kernels are convolutions of two operands, one of which may have to be turned around, cut
into circles (`anybatch.conv.circles`) and multiplied there:

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
from math import pi, prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from anybatch.conv import circles as rough
from anybatch.conv.circles import Circle, cuts, frequencies
from anybatch.conv.problem import Problem, Sizes

Circles = tuple[Circle, ...]

HALVES = (torch.float16, torch.bfloat16)
"""Types whose sums are in float32."""

CLEARLY = 0.7
"""Share of the cost of fast transforms, below which filters are transformed by products of
matrices, which need more workspace; in the inverse they need less."""


class Fourier:
    """Kernels as products of spectra; sums are of float32 where operands are of half precision."""

    once = True

    def __init__(self, circles: Callable[[Problem], Circles]) -> None:
        self._circles = circles

    def shared(self, problem: Problem, w: Tensor) -> Tensor:
        """Return the spectra of the filters."""
        wide = filters(problem, _dilated(_exact(w), problem.dilation))
        turned = wide.flip(_dims(problem)) if problem.kernel == "forward" else wide
        circles = self._circles(problem)
        if not _stages_win(problem, circles, CLEARLY):
            return matrices(problem, turned, _lengths(circles))
        found = spectrum(turned, circles)
        return found.view(len(found) * problem.groups, *turned.shape[1:3])

    def part(self, problem: Problem, one: Tensor, shared: Tensor) -> Tensor:
        """Return the result of a forward or of the gradient of the input for some samples."""
        circles = self._circles(problem)
        forward = problem.kernel == "forward"
        image = _exact(one) if forward else _dilated(_exact(one), problem.stride)
        product = times(problem, _tiles(problem, image, circles), shared)
        tiles = [circle.count for circle in circles]
        per = (problem.filters if forward else problem.channels) // problem.groups
        shape = (problem.groups, len(one), *tiles, per)
        if is_depthwise(problem):
            shape = (len(one), problem.groups, per, *tiles)
        product = spectra(problem, product, (*shape, *_frequencies(circles)))
        sizes = problem.outputs if forward else problem.image
        ones = (1,) * len(circles)
        return _result(problem, product, circles, sizes, problem.stride if forward else ones)

    def add(self, problem: Problem, total: Tensor | None, dy: Tensor, x: Tensor) -> Tensor:
        """Add the spectra of the filters' gradients for some samples."""
        circles = self._circles(problem)
        outputs = _turned(problem, _dilated(_exact(dy), problem.stride), circles)
        outputs = matrices(problem, outputs, _lengths(circles))
        return summed(problem, total, outputs, _tiles(problem, _exact(x), circles))

    def finish(self, problem: Problem, total: Tensor) -> Tensor:
        """Return the gradients of which these are the spectra."""
        circles = self._circles(problem)
        rows = zip(circles, problem.window, problem.dilation, strict=True)
        ends = [slice(c.first, c.first + (k - 1) * d + 1, d) for c, k, d in rows]
        if _stages_win(problem, circles, 1.0):
            columns = total.view(-1, prod(problem.weight[:2]))
            return places(columns, circles, ends).view(problem.weight)
        shape = (*problem.weight[:2], *_frequencies(circles))
        return _back(spectra(problem, total, shape), circles, ends)


def _stages_win(problem: Problem, circles: Circles, share: float) -> bool:
    """Say whether filters are transformed by products of matrices, which take less than a share."""
    lengths = _lengths(circles)
    pays = rough.staged(lengths, problem.spans) < share * rough.fast(lengths)
    return pays and not is_depthwise(problem)


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
    tiles = images(problem, tiles)
    return matrices(problem, tiles, _lengths(circles))


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
    return images(problem, tiles.flip(_dims(problem)))


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
    if not is_depthwise(problem):
        found = found.permute(1, 0, 2 + dims, *range(2, 2 + dims), *range(3 + dims, 3 + 2 * dims))
    axes = [axis for at in range(dims) for axis in (3 + at, 3 + dims + at)]
    lengths = [found.shape[3 + at] * found.shape[3 + dims + at] for at in range(dims)]
    joined = found.permute(0, 1, 2, *axes).reshape(len(found), -1, *lengths)
    last: Any = tuple(
        slice(None) if one else slice(0, end, s)
        for (_, _, s), end, one in zip(rows, ends, single, strict=True)
    )
    return joined[(..., *last)]


# Products of spectra, and the order in memory in which they are fast.
#
# Where every channel of an output has one channel of the input, spectra are multiplied as they are:
#
#     depthwise   [N, channels, *tiles, *frequencies]
#
# Where it has several, there is a product of matrices for each frequency, and a library is fast at
# these when each lies in one piece. So the input of the transform is laid out in an order whose
# transpose is that:
#
#     together    [groups, N, *tiles, channels of a group, *places]        as it is transformed
#                 [frequencies, groups, N x tiles, channels of a group]    transposed as one matrix
#
# A transpose of one matrix is several times as fast as a permutation of many dimensions where these
# are powers of two.
#
# Source: Mathieu, Henaff and LeCun (2014), section 3, "transpose, then a product of matrices".

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


# Fourier transforms of filters as products of matrices, direction after direction.
#
# A fast transform takes every place of the circle, though a window fills few of them, and returns
# one filter after another, though products want one frequency after another. As a product with a
# matrix of sines and cosines, a direction takes only the places that there are, and the order is
# right:
#
#     [k1, k2 x filters]  ──> [T1, k2, filters]  ──> [T1, T2 / 2 + 1, filters]
#
#     and back, where only the places of the window are wanted:
#
#     [T1, T2 / 2 + 1, filters]  ──> [k1, T2 / 2 + 1, filters]  ──> [k1, k2, filters]
#
# It is more arithmetic, but at the speed of products of matrices and without a pass to transpose:
# for windows much smaller than their circles it takes a third of the time.
#
# Source: none; Lavin and Gray (2016) do the like for Winograd's transforms.


def spectrum(filters: Tensor, circles: Sequence[Circle]) -> Tensor:
    """Return the spectra of filters that begin where their circles do.

    Args:
        filters: [..., *places].
        circles: of all directions.

    Returns:
        [frequencies, filters], complex.
    """
    dims = len(circles)
    places = filters.shape[-dims:]
    columns = filters.reshape(-1, prod(places)).t().contiguous()
    lengths = [circle.length for circle in circles]
    waves = [
        _waves(torch.arange(size), torch.arange(k), length, -1, columns)
        for size, k, length in zip(frequencies(lengths), places, lengths, strict=True)
    ]
    return _staged(columns.to(waves[0].dtype), waves)


def places(spectra: Tensor, circles: Sequence[Circle], wanted: Sequence[slice]) -> Tensor:
    """Return some places of the filters of which these are the spectra.

    Args:
        spectra: [frequencies, filters], complex.
        circles: of all directions.
        wanted: places in each of them.

    Returns:
        [filters, places], real.
    """
    lengths = [circle.length for circle in circles]
    waves = []
    for size, ends, length in zip(frequencies(lengths), wanted, lengths, strict=True):
        rows = torch.arange(ends.start, ends.stop, ends.step)
        waves.append(_waves(rows, torch.arange(size), length, 1, spectra.real) / length)
    waves[-1][:, 1 : (lengths[-1] + 1) // 2] *= 2  # each stands for its conjugate, too
    return _staged(spectra, waves).real.t().contiguous()


def _waves(rows: Tensor, columns: Tensor, length: int, sign: int, like: Tensor) -> Tensor:
    """Return exp(sign 2 pi i rows columns / length) as a matrix."""
    turns = torch.outer(rows, columns).remainder(length).to(torch.float64)
    angles = turns * (sign * 2 * pi / length)
    found = torch.polar(torch.ones_like(angles), angles)
    return found.to(like.device, like.dtype.to_complex())


def _staged(tensor: Tensor, waves: Sequence[Tensor]) -> Tensor:
    """Multiply every dimension but the last, [*dimensions, columns], with its matrix."""
    columns, before = tensor.shape[-1], 1
    for wave in waves:
        size, old = wave.shape
        tensor = torch.bmm(wave.expand(before, size, old), tensor.view(before, old, -1))
        before *= size
    return tensor.view(before, columns)
