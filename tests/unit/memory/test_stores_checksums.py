from __future__ import annotations

import os
import random

import pytest
import torch

from anybatch.errors import StoreError
from anybatch.memory.stores import (
    CHECKSUM_BLOCK,
    FileStore,
    HostStore,
    Store,
    checksums,
    require_same,
)


@pytest.mark.parametrize("size", [1, 5, CHECKSUM_BLOCK - 1, CHECKSUM_BLOCK, 2 * CHECKSUM_BLOCK + 3])
def test_any_bit_that_changes_is_found_and_its_block_named(size: int) -> None:
    rng = random.Random(size)
    data = bytearray(rng.randbytes(size))
    sums = checksums(memoryview(data))
    require_same(memoryview(data), sums, "here")
    for at in {0, size - 1, rng.randrange(size)}:
        data[at] ^= 1 << rng.randrange(8)
        begin = at // CHECKSUM_BLOCK * CHECKSUM_BLOCK
        match = (
            f"the bytes from {begin} to {min(begin + CHECKSUM_BLOCK, size)} have changed in here"
        )
        with pytest.raises(StoreError, match=match):
            require_same(memoryview(data), sums, "here")
        data = bytearray(data)
        sums = checksums(memoryview(data))


def test_nothing_has_no_sums() -> None:
    assert checksums(memoryview(b"")) == ()
    require_same(memoryview(b""), (), "here")


@pytest.mark.parametrize("direct", [False, True])
def test_a_file_is_checked_on_request(direct: bool) -> None:
    data, out = torch.arange(9000) % 7, torch.zeros(9000, dtype=torch.long)
    for check in (False, True):
        store = FileStore(direct=direct, check=check)
        store.writing("a", data.view(torch.uint8).untyped_storage())()
        _flip(store._file, 70001)
        if not check:
            store.reading("a", out.view(torch.uint8).untyped_storage())()
            assert not torch.equal(out, data)  # what nobody sees
        else:
            with pytest.raises(StoreError, match="have changed in the spill file"):
                store.reading("a", out.view(torch.uint8).untyped_storage())()
        store.writing("a", data.view(torch.uint8).untyped_storage())()
        store.reading("a", out.view(torch.uint8).untyped_storage())()
        assert torch.equal(out, data)
        store.close()


def _flip(file: int, at: int) -> None:
    """Change a bit of a file through another descriptor."""
    other = os.open(f"/proc/self/fd/{file}", os.O_RDWR)
    was = os.pread(other, 1, at)
    os.pwrite(other, bytes([was[0] ^ 8]), at)
    os.close(other)


def test_host_memory_is_checked_on_request() -> None:
    data, out = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    store = HostStore(check=True)
    store.writing("a", data.untyped_storage())()
    store.reading("a", out.untyped_storage())()
    assert torch.equal(out, data)
    store._held["a"][0][50] += 1
    with pytest.raises(StoreError, match="have changed in host memory"):
        store.reading("a", out.untyped_storage())()
    plain: Store = HostStore()
    plain.writing("a", data.untyped_storage())()
    plain.reading("a", out.untyped_storage())()
    assert torch.equal(out, data)
