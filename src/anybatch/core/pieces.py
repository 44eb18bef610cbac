"""Comparison of tensors piece by piece, in few bytes beyond their own.

Outputs of a language model are larger than all else that a few rows hold. A difference of two such
tensors is one more of them, and a choice of some entries is three, for their places are int64. So
the largest difference is that of all pieces, of which one is there at a time:

    |a - b|       a piece of a ━━━━┃····┃····┃····        numbers so far: the largest difference,
                  a piece of b ━━━━┃····┃····┃····        the largest entry
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

import torch
from torch import Tensor

PARTS = 16
"""Pieces of a tensor, at least."""

LEAST = 1 << 12
"""Elements of a piece, of a tensor that has so many: fewer would save no page."""

MOST = 1 << 20
"""Elements of a piece at most: a kernel on more of them is no faster."""

Place = tuple[slice, ...]


def places(shape: Sequence[int], parts: int = PARTS) -> Iterator[Place]:
    """Yield the places of the pieces of a tensor of this shape; they cover it, and do not meet.

    Args:
        shape: of the tensor.
        parts: at least so many pieces, of a large tensor. Default `PARTS`.
    """
    count = prod(shape)
    if not count:
        return
    most = _most(count, parts)
    cut = next((d for d in range(len(shape)) if prod(shape[d + 1 :]) <= most), 0)
    each = max(1, most // prod(shape[cut + 1 :]))
    for before in product(*map(range, shape[:cut])):
        outer = tuple(slice(at, at + 1) for at in before)
        if cut == len(shape):
            yield outer
        for begin in range(0, shape[cut], each) if cut < len(shape) else ():
            yield (*outer, slice(begin, begin + each))


def _most(count: int, parts: int = PARTS) -> int:
    """Return the most elements of a piece of a tensor of `count`."""
    return min(MOST, max(LEAST, count // parts))


def difference(a: Tensor, b: Tensor, turned: int | None = None) -> tuple[float, float]:
    """Return the largest difference and the largest entry of `a`; only finite entries count.

    Args:
        a: a tensor.
        b: another of its shape.
        turned: the dimension along which `a` is in reverse order. Default None: it is not.
    """
    a, b = a.detach(), b.detach()
    found = _none(a), _none(a)  # they stay on the device until all pieces are done
    for place in places(b.shape):
        found = _largest(found, _part(a, place, turned), b[place])
    return float(found[0]), float(found[1])


def rehearse_difference(b: Tensor) -> None:
    """Allocate as `difference` does for two tensors like this one, by the same kernels."""
    if not b.numel():
        return
    piece = b.new_empty(min(b.numel(), _most(b.numel())))
    _largest((_none(b), _none(b)), piece, piece)


def _none(a: Tensor) -> Tensor:
    return torch.zeros((), dtype=a.dtype.to_real(), device=a.device)


def _largest(found: tuple[Tensor, Tensor], a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest difference and the largest entry so far, with two pieces more."""
    left_out = (a.isfinite() & b.isfinite()).logical_not_()
    distance = (a - b).abs().masked_fill_(left_out, 0).amax()
    entry = a.abs().masked_fill_(left_out, 0).amax()
    return torch.maximum(found[0], distance), torch.maximum(found[1], entry)


def equal(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors of one shape hold the same numbers."""
    if b.numel() <= MOST:
        return torch.equal(a, b)
    return all(torch.equal(a[place], b[place]) for place in places(b.shape, parts=1))


def _part(tensor: Tensor, place: Place, turned: int | None) -> Tensor:
    """Return the piece at a place, of a tensor in reverse order along a dimension."""
    if turned is None:
        return tensor[place]
    if turned >= len(place):
        return tensor[place].flip(turned)
    size, there = tensor.shape[turned], place[turned]
    mirrored = slice(max(size - there.stop, 0), size - there.start)
    return tensor[(*place[:turned], mirrored, *place[turned + 1 :])].flip(turned)
