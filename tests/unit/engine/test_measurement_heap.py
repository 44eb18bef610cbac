from __future__ import annotations

import ctypes

import pytest
import torch

from anybatch.engine.measurement import LiveBytes, in_use

MIB = 1 << 20


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library is not glibc"
)
@pytest.mark.parametrize("size", [MIB // 8, 16 * MIB])
def test_what_torch_allocates_is_in_use_until_it_is_freed(size: int) -> None:
    """A block of the heap, and one that is mapped by itself."""
    before = in_use()
    there = torch.empty(size, dtype=torch.uint8)
    during = in_use()
    del there
    assert 0.9 * size <= during - before <= 1.1 * size  # other threads free and allocate, too
    assert in_use() - before < size // 8


def test_the_most_bytes_are_those_beyond_the_start() -> None:
    counts = iter([5, 7, 9, 6])
    live = LiveBytes(lambda: next(counts))
    assert live.most == 0
    live()
    live()
    live()
    assert live.most == 4
