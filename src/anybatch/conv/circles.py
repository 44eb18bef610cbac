"""Circles on which windows are multiplied with images: one for all, or many small ones.

A product of spectra is a convolution around a circle. In each direction a circle may hold a whole
image; it needs no more places than the image and the zeros at one of its ends, because those at the
other end are the same places:

    full      x x x x x x | 0 0             H + p places, and on to the next good length

Where the image is much larger than the window, it is cut into tiles instead. Neighbours overlap by
the window, and outputs on the seam of a circle are discarded (overlap-save):

    tiles     [ x x x x x x ]               T places, of which T - window + 1 are results
                      [ x x x x x x ]

Spectra of the window are then as small as a tile. The lengths of tiles are those for which a rough
model of transforms and products takes least.

Source: Stockham, High-speed convolution and correlation (1966), for sectioning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod

from anybatch.conv.problem import Problem, Sizes

WORTH = 1.5
"""Multiple of the cost of one circle, by the model, beyond which tiles are not considered."""

SAMPLES = 8
"""Among which the model shares the transform of the filters."""

LEAST = 8
"""Places of the smallest tile."""


@dataclass(frozen=True)
class Circle:
    """How one direction is cut.

    Attributes:
        length: T, places of a circle.
        count: of tiles; 1 for a full image.
        step: from one tile to the next.
        begin: zeros before the image; entries that are left out, where it is negative.
        first: place of the first result.
        span: places that the second operand has on the circle, of an output that is cut, too.
    """

    length: int
    count: int
    step: int
    begin: int
    first: int
    span: int


def full_circles(problem: Problem) -> tuple[Circle, ...]:
    """Return, for each direction, a circle that is large enough for all of it."""
    return tuple(_full_circle(problem, at) for at in range(len(problem.image)))


@cache
def tiled(problem: Problem) -> tuple[Circle, ...] | None:
    """Return the best circles of no more than half the places; None where there are none."""
    one = full_circles(problem)
    smaller = [cut for cut in product(*options(problem)) if 2 * _places(cut) <= _places(one)]
    best = min(smaller, key=lambda cut: _takes(problem, cut), default=one)
    worth = _takes(problem, best) <= WORTH * _takes(problem, one)
    return best if best != one and worth else None


def options(problem: Problem) -> list[list[Circle]]:
    """Return all ways to cut each direction, the uncut one first."""
    return [[circle, *_tiles(problem, at)] for at, circle in enumerate(full_circles(problem))]


@cache
def good_length(least: int) -> int:
    """Return the even length, `least` or more, of which a transform takes the shortest time.

    Example:
        >>> good_length(71), good_length(4351)
        (72, 4480)
    """
    lengths = (n for n in range(least + least % 2, 2 * least + 2, 2) if n and odds(n) is not None)
    return min(lengths, key=lambda n: n * (1.0 + rate(n)))


def _full_circle(problem: Problem, at: int) -> Circle:
    span, padding, outputs = _direction(problem, at)
    length = good_length(max(problem.image[at] + padding, span, outputs))
    if problem.kernel == "data":
        return Circle(length, 1, length, 0, padding, span)
    other = span if problem.kernel == "forward" else outputs
    begin = max(0, padding - other + 1)
    return Circle(length, 1, length, begin, begin - padding + other - 1, other)


def _tiles(problem: Problem, at: int) -> list[Circle]:
    """Return all ways in which a direction is cut into tiles."""
    span, padding, outputs = _direction(problem, at)
    results = problem.image[at] if problem.kernel == "data" else outputs
    begin = span - 1 - padding if problem.kernel == "data" else padding
    found, longest = [], _full_circle(problem, at).length
    lengths = sorted(odd << k for odd in (1, 3, 5) for k in range(1, longest.bit_length()))
    for length in lengths:
        if max(LEAST, span + 1) <= length < longest:
            step = length - span + 1
            other = step if problem.kernel == "filter" else span
            found.append(Circle(length, -(-results // step), step, begin, other - 1, other))
    return found


def _direction(problem: Problem, at: int) -> tuple[int, int, int]:
    """Return the span of the window, the padding, and the outputs were there no stride."""
    outputs = (problem.outputs[at] - 1) * problem.stride[at] + 1
    return problem.spans[at], problem.padding[at], outputs


def _places(circles: Sequence[Circle]) -> int:
    return prod(circle.length for circle in circles)


def _takes(problem: Problem, circles: Sequence[Circle]) -> float:
    """Return about how many nanoseconds a sample takes."""
    lengths, tiles = [c.length for c in circles], prod(c.count for c in circles)
    filters = problem.filters * problem.channels // problem.groups
    images, once = fast(lengths), min(fast(lengths), staged(lengths, problem.spans))
    products = filters * tiles * prod(frequencies(lengths))
    dense = problem.channels > problem.groups
    return (
        (problem.channels + problem.filters) * tiles * images
        + filters * once / SAMPLES
        + products * (COMPLEX / FLOPS if dense else WRITTEN)
    )


def cuts(size: Sizes, circles: Sequence[Circle]) -> list[tuple[int, int]]:
    """Return the zeros before and behind an image of some size that is to be cut."""
    ends = []
    for h, circle in zip(size, circles, strict=True):
        covered = (circle.count - 1) * circle.step + circle.length
        ends.append((circle.begin, covered - circle.begin - h))
    return ends


# Rough seconds of transforms and products, to select the circles worth measuring.
#
# Nanoseconds, on one thread; within a third of the measurements for lengths of 8 to 10 000. Only
# their order counts: the choice of an algorithm is by measured seconds (`anybatch.conv.measure`).

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
    """Return the cost of the transform of one window by products of matrices."""
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
