"""Rough seconds of transforms and products, to select the circles worth measuring.

Nanoseconds, on one thread; within a third of the measurements for lengths of 8 to 10 000. Only
their order counts: the choice of an algorithm is by measured seconds (`anybatch.conv.costs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

PASSES = 2.5
"""Cost of a place in passes over memory besides its transform: padding, transposing, copying."""

WRITTEN = 1.2
"""That a complex number takes that a product of matrices writes."""

FLOPS = 60.0
"""Floating-point operations of a product of matrices in a nanosecond."""

COMPLEX = 8
"""Floating-point operations of a complex product and sum."""


def rate(length: int) -> float:
    """Return the cost of a place in a fast transform along one direction.

    Twos are cheap, and threes, fives and sevens cost alike.
    """
    odd = odds(length)
    assert odd is not None, length
    twos = (length & -length).bit_length() - 1
    return 0.5 + 0.07 * twos + 0.3 * odd


def odds(number: int) -> int | None:
    """Return how many factors are 3, 5 or 7; None where there are others above 2."""
    number >>= (number & -number).bit_length() - 1
    found = 0
    for prime in (3, 5, 7):
        while number % prime == 0:
            number //= prime
            found += 1
    return found if number == 1 else None


def fast(lengths: Sequence[int]) -> float:
    """Return the cost of the fast transform of one image on circles of these lengths."""
    return prod(lengths) * (PASSES + sum(rate(length) for length in lengths))


def staged(lengths: Sequence[int], spans: Sequence[int]) -> float:
    """Return the cost of the transform of one window by products of matrices.

    Args:
        lengths: of the circles.
        spans: of the window.
    """
    sizes, left = frequencies(lengths), list(spans)
    cost = 0.0
    for at, size in enumerate(sizes):
        work = COMPLEX * prod(left) * size
        left[at] = size
        cost += work / FLOPS + WRITTEN * prod(left)
    return cost


def frequencies(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return how many frequencies a real image has in each direction."""
    return (*lengths[:-1], lengths[-1] // 2 + 1)
