from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from anybatch import stores
from anybatch.stores import BLOCK, BOUNCE, FileStore


@pytest.mark.parametrize("direct", [False, True])
def test_a_file_gives_back_what_it_was_given(tmp_path: Path, direct: bool) -> None:
    store = FileStore(tmp_path, direct=direct)
    sizes = (1, 7, BLOCK - 1, BLOCK, BLOCK + 1, BOUNCE, BOUNCE + 3)
    data = [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]
    for round_ in range(2):
        for key, one in enumerate(data):
            store.put(key, one)
        for key, one in enumerate(data):
            out = torch.empty_like(one)
            store.get(key, out)
            assert torch.equal(out, one)
            store.drop(key)
        if round_ == 0:
            left = store.room()
    assert abs(store.room() - left) <= store._end  # places are used again
    assert list(tmp_path.iterdir()) == []
    store.close()
    store.close()


def test_a_file_system_without_direct_access_uses_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "_past_the_cache", lambda _: None)
    store = FileStore(tmp_path, direct=True)
    store.put("a", torch.ones(5, dtype=torch.uint8))
    out = torch.zeros(5, dtype=torch.uint8)
    store.get("a", out)
    assert out.tolist() == [1] * 5


def test_a_store_that_nobody_holds_is_closed(tmp_path: Path) -> None:
    store = FileStore(tmp_path, direct=True)
    descriptor = store._file
    os.fstat(descriptor)
    del store
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_what_is_written_in_part_is_written_on_and_an_end_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, data = FileStore(tmp_path), torch.arange(100, dtype=torch.uint8)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda f, view, at: real(f, view[:7], at))
    store.put(0, data)
    out = torch.empty_like(data)
    store.get(0, out)
    assert torch.equal(out, data)
    monkeypatch.setattr(os, "pwrite", lambda f, view, at: 0)
    with pytest.raises(OSError, match="the spill file takes 100 of 200 bytes"):
        store.put(1, data)
    monkeypatch.setattr(os, "preadv", lambda f, views, at: 0)
    with pytest.raises(OSError, match="the spill file ends at 0 of 100 bytes"):
        store.get(0, out)
