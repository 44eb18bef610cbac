"""The most bytes of indivisible storages that fit within a limit.

Lanes that are offloaded while they run hold, before each kernel, no more than a limit. But a
storage is either resident or offloaded, so the resident bytes are a sum of sizes. If all of them
are large the sum is below the limit by up to one storage, and a plan that counts the limit itself
predicts more than is ever held. The possible sums are found as in the subset-sum problem, on the
bits of an integer:

    sizes 4, 4, 4    limit 10     sums 0 4 8 12         8
    sizes 4, 4, 3    limit 10     sums 0 3 4 7 8 11     8

Small storages fill any gap and need no sums.

No torch here: sizes are data. Source: Bellman, Dynamic Programming (1957), for the sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from math import gcd

LEAST = 256
"""Storages of less than the limit over this are small: they fill gaps together."""

WIDEST = 2**20
"""Sums that are distinguished; with more, the limit itself is used."""


def filled(sizes: Mapping[int, int], limit: int) -> int:
    """Return the largest sum of storages that is no more than `limit`.

    Args:
        sizes: bytes of a storage -> how many of them there are at most.
        limit: bytes, at least 0.

    Returns:
        Bytes; of many different sizes perhaps the limit, never less than can be there.
    """
    if sum(size * count for size, count in sizes.items()) <= limit:
        return sum(size * count for size, count in sizes.items())
    large = {size: count for size, count in sizes.items() if limit < LEAST * size}
    small = sum(size * count for size, count in sizes.items() if size not in large)
    unit = reduce(gcd, large, 0)
    if unit == 0 or limit // unit > WIDEST:
        return limit
    units = limit // unit
    reached, within = 1, (1 << (units + 1)) - 1
    for size, count in large.items():
        reached = _also(reached, size // unit, min(count, limit // size), within)
    return min(limit, (reached.bit_length() - 1) * unit + small)


def _also(reached: int, size: int, count: int, within: int) -> int:
    """Return the sums that can be reached with up to `count` more of `size`, as bits."""
    chunk = 1
    while count > 0:  # 1, 2, 4 ... of them, and what is left
        some = min(chunk, count)
        reached = (reached | reached << (some * size)) & within
        count, chunk = count - some, 2 * chunk
    return reached
