"""Convolutions by the fast Fourier transform, for windows that are large or long.

A product of spectra is a convolution around a circle. In each direction the circle has no more
places than an image and the zeros at one of its ends, because those at the other end are the same
places:

    circle    0 0 | x x x x x x | (0 0)          H + p places, and on to the next good length
              the left padding is met again behind the right end

so all three kernels are right without room for a whole window more. Strides are taken from the
result, or put between the outputs as zeros; dilation puts zeros into the window.

torch's own kernels on the CPU take time in proportion to the window; this takes none for it. It
needs the spectra of all operands, which is much for many samples at a time and little for a few
(`anybatch.conv.divide`).

Conjugates are computed at once: under a dispatch mode nobody below autograd resolves one that
`Tensor.conj` has only marked.

Source: Mathieu, Henaff and LeCun, Fast training of convolutional networks through FFTs (2014), to
which u-cuDNN's FFT algorithms go back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from anybatch.conv.problem import Problem, Sizes


def fft(problem: Problem, one: Tensor, other: Tensor) -> Tensor:
    """Compute a kernel.

    Args:
        problem: which.
        one: its first operand.
        other: its second operand.

    Returns:
        What the kernel computes; sums are of float32 where the operands are of half precision.
    """
    if one.dtype in (torch.float16, torch.bfloat16):
        return fft(problem, one.float(), other.float())
    around = circle(problem)
    if problem.kernel == "forward":
        product = _forward(problem, _image(problem, one, around), _window(problem, other, around))
        return _back(product, around, [slice(0, (o - 1) * s + 1, s) for o, s in _strided(problem)])
    if problem.kernel == "data":
        product = _data(problem, _output(problem, one, around), _window(problem, other, around))
        ends = zip(problem.padding, problem.image, strict=True)
        return _back(product, around, [slice(p, p + h) for p, h in ends])
    product = _filter(problem, _output(problem, one, around), _image(problem, other, around))
    holes = zip(problem.spans, problem.dilation, strict=True)
    return _back(product, around, [slice(0, k, d) for k, d in holes])


def circle(problem: Problem) -> Sizes:
    """Return how many places there are in each direction: all operands have to fit, too."""
    rows = zip(problem.image, problem.padding, problem.spans, _strided(problem), strict=True)
    return tuple(good_length(max(h + p, k, (o - 1) * s + 1)) for h, p, k, (o, s) in rows)


def good_length(least: int) -> int:
    """Return the least even number, `least` or more, that has no prime factor above 7.

    Example:
        >>> good_length(71)
        72
    """
    length = least + least % 2
    while not _smooth(length):
        length += 2
    return max(length, 2)


def _smooth(number: int) -> bool:
    for prime in (2, 3, 5, 7):
        while number > 1 and number % prime == 0:
            number //= prime
    return number == 1


def _strided(problem: Problem) -> list[tuple[int, int]]:
    return list(zip(problem.outputs, problem.stride, strict=True))


def _dims(around: Sizes) -> list[int]:
    return list(range(-len(around), 0))


def _spectrum(tensor: Tensor, around: Sizes, begins: Sequence[int]) -> Tensor:
    """Return the spectrum of a tensor that begins at some place of the circle."""
    sizes = tensor.shape[-len(around) :]
    ends = [(b, length - b - h) for b, h, length in zip(begins, sizes, around, strict=True)]
    padded = F.pad(tensor, [end for pair in reversed(ends) for end in pair])
    found: Tensor = torch.fft.rfftn(padded, dim=_dims(around))
    return found


def _image(problem: Problem, x: Tensor, around: Sizes) -> Tensor:
    return _spectrum(x, around, problem.padding)


def _window(problem: Problem, w: Tensor, around: Sizes) -> Tensor:
    return _spectrum(_apart(w, problem.dilation), around, [0] * len(around))


def _output(problem: Problem, dy: Tensor, around: Sizes) -> Tensor:
    return _spectrum(_apart(dy, problem.stride), around, [0] * len(around))


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


def _back(product: Tensor, around: Sizes, places: list[slice]) -> Tensor:
    """Return the places of the circle that are wanted, of a spectrum."""
    found: Tensor = torch.fft.irfftn(product, s=around, dim=_dims(around))
    inner: Any = (..., *places)
    return found[inner]


def _grouped(problem: Problem, spectrum: Tensor) -> Tensor:
    """Return [N, groups, channels of one, frequencies]."""
    return spectrum.reshape(len(spectrum), problem.groups, -1, spectrum[0, 0].numel())


def _filters(problem: Problem, spectrum: Tensor) -> Tensor:
    """Return [groups, filters of one, channels of one, frequencies]."""
    per = problem.filters // problem.groups
    return spectrum.reshape(problem.groups, per, spectrum.shape[1], -1)


def _forward(problem: Problem, x: Tensor, w: Tensor) -> Tensor:
    """Y[n, g, f] = sum over c of X[n, g, c] conj(W[g, f, c])."""
    images, windows = _grouped(problem, x), _filters(problem, w).conj_physical()
    if problem.channels == problem.groups:
        found = images * windows.squeeze(2)
    else:
        found = torch.einsum("ngck,gfck->ngfk", images, windows)
    return found.reshape(len(x), problem.filters, *x.shape[2:])


def _data(problem: Problem, dy: Tensor, w: Tensor) -> Tensor:
    """DX[n, g, c] = sum over f of DY[n, g, f] W[g, f, c]."""
    outputs, windows = _grouped(problem, dy), _filters(problem, w)
    if problem.channels == problem.groups == problem.filters:
        found = outputs * windows.squeeze(2)
    else:
        found = torch.einsum("ngfk,gfck->ngck", outputs, windows)
    return found.reshape(len(dy), problem.channels, *dy.shape[2:])


def _filter(problem: Problem, dy: Tensor, x: Tensor) -> Tensor:
    """DW[g, f, c] = sum over n of X[n, g, c] conj(DY[n, g, f])."""
    outputs, images = _grouped(problem, dy).conj_physical(), _grouped(problem, x)
    if problem.channels == problem.groups:
        found = outputs[0] * images[0]
        for number in range(1, len(outputs)):
            found.addcmul_(outputs[number], images[number])
    else:
        found = torch.einsum("ngck,ngfk->gfck", images, outputs)
    return found.reshape(*problem.weight[:2], *dy.shape[2:])
