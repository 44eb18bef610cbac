"""Checksums of offloaded bytes, for debugging.

A disk, a driver or another program may change tensors in a store. torch would compute with it, and
the gradients would look like any others. A file system with checksums of its own is seldom at hand;
so a sum of every block is recorded in memory when it is offloaded, and compared when it returns:

    leaves    block 0 | block 1 | block 2        sums kept: s0 s1 s2
    returns   block 0 | block 1*| block 2        s1 differs: an error, and no gradient

CRC-32 finds every error of up to 32 bits in a row, and misses one in 2^32 of the others; it is the
fastest sum in Python's library that finds as much.
"""

from __future__ import annotations

import zlib

from anybatch.core.units import show_bytes
from anybatch.errors import StoreError

BLOCK = 4 << 20
"""Bytes that share a sum."""

Sums = tuple[int, ...]


def checksums(memory: memoryview) -> Sums:
    """Return the sum of each block of bytes."""
    return tuple(zlib.crc32(memory[at : at + BLOCK]) for at in range(0, len(memory), BLOCK))


def require_same(memory: memoryview, sums: Sums, where: str) -> None:
    """Require that bytes that have returned have the sums that they left with.

    Args:
        memory: the returned bytes.
        sums: of the offloaded bytes.
        where: it was meanwhile, in words.

    Raises:
        StoreError: a block differs.
    """
    for number, (found, wanted) in enumerate(zip(checksums(memory), sums, strict=True)):
        if found != wanted:
            begin, end = number * BLOCK, min((number + 1) * BLOCK, len(memory))
            raise StoreError(
                "an offloaded tensor must return unchanged, and of a tensor of "
                f"{show_bytes(len(memory))} the bytes from {begin} to {end} have changed in "
                f"{where}: a failing disk, another program or a write to .data has changed it, so "
                "name another folder (store=) or find the cause; the gradients of this step are "
                "not complete, so set them to zero before the next"
            )
