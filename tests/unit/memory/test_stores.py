from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.unit.core.made_up import modules

from anybatch.errors import StoreError
from anybatch.memory import stores
from anybatch.memory.stores import BLOCK, BOUNCE, FileStore, HostStore, StagedStore

__all__ = ["modules"]


@pytest.mark.parametrize("way", ["host", "file"])
def test_what_was_written_to_a_store_is_read_back(way: str, tmp_path: Path) -> None:
    store = HostStore() if way == "host" else FileStore(tmp_path)
    data = {size: torch.randint(256, (size,), dtype=torch.uint8) for size in (1, 4096, 100_001)}
    for size, one in data.items():
        store.writing(size, one.untyped_storage())()
    store.drop(4096)
    store.writing("again", data[4096].flip(0).untyped_storage())()
    for key, want in {1: data[1], 100_001: data[100_001], "again": data[4096].flip(0)}.items():
        out = torch.zeros_like(want)
        store.reading(key, out.untyped_storage())()
        assert torch.equal(out, want)
    store.drop("never")
    store.close()


def test_a_spill_file_has_no_name_and_uses_its_space_again(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    assert list(tmp_path.iterdir()) == []
    one = torch.ones(5000, dtype=torch.uint8)
    for number in range(20):
        store.writing(number, one.untyped_storage())()
        store.drop(number)
    assert os.fstat(store._file).st_size == 5000
    store.close()
    store.close()


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        FileStore(tmp_path / "nowhere")


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("class_", [FileStore, StagedStore])
def test_a_file_gives_back_what_was_written(
    tmp_path: Path, class_: type[FileStore], direct: bool
) -> None:
    """By way of staging memory too, which is how bytes of a GPU come there."""
    store = class_(tmp_path, direct=direct)
    sizes = (1, 7, BLOCK - 1, BLOCK, BLOCK + 1, BOUNCE, BOUNCE + 3)
    data = [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]
    for round_ in range(2):
        for key, one in enumerate(data):
            store.writing(key, one.untyped_storage())()
        for key, one in enumerate(data):
            out = torch.empty_like(one)
            store.reading(key, out.untyped_storage())()
            assert torch.equal(out, one)
            store.drop(key)
        if round_ == 0:
            left = store.space()
    assert abs(store.space() - left) <= store._end  # places are used again
    assert list(tmp_path.iterdir()) == []
    store.close()
    store.close()


def test_a_file_system_without_direct_access_uses_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "past_the_cache", lambda _: None)
    store = FileStore(tmp_path, direct=True)
    store.writing("a", torch.ones(5, dtype=torch.uint8).untyped_storage())()
    out = torch.zeros(5, dtype=torch.uint8)
    store.reading("a", out.untyped_storage())()
    assert out.tolist() == [1] * 5


def test_a_store_without_references_is_closed(tmp_path: Path) -> None:
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
    store.writing(0, data.untyped_storage())()
    out = torch.empty_like(data)
    store.reading(0, out.untyped_storage())()
    assert torch.equal(out, data)
    monkeypatch.setattr(os, "pwrite", lambda f, view, at: 0)
    with pytest.raises(OSError, match="the spill file takes 100 of 200 bytes"):
        store.writing(1, data.untyped_storage())()
    monkeypatch.setattr(os, "preadv", lambda f, views, at: 0)
    with pytest.raises(OSError, match="the spill file ends at 0 of 100 bytes"):
        store.reading(0, out.untyped_storage())()


def test_staged_bytes_that_have_changed_are_an_error(tmp_path: Path) -> None:
    store, data = StagedStore(tmp_path, check=True), torch.arange(9000) % 251
    retained = data.to(torch.uint8)
    store.writing("a", retained.untyped_storage())()
    out = torch.empty_like(retained)
    store.reading("a", out.untyped_storage())()
    assert torch.equal(out, retained)
    os.pwrite(store._file, bytes(BLOCK), 0)
    with pytest.raises(StoreError, match="the spill file"):
        store.reading("a", out.untyped_storage())()


def test_the_space_of_a_file_is_its_own_and_what_is_left(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    before = store.space()
    store.writing(1, torch.ones(1 << 20, dtype=torch.uint8).untyped_storage())()
    assert before < 1 << 60
    assert store.space() > 1 << 20
    store.close()
    store.close()


@pytest.mark.parametrize("device_type", ["xpu", "mps", "hpu"])
def test_a_file_is_never_made_of_memory_that_is_not_the_hosts(
    modules: dict[str, SimpleNamespace], device_type: str, tmp_path: Path
) -> None:
    del modules
    device = torch.device(device_type)
    store, there = FileStore(), SimpleNamespace(device=device, nbytes=lambda: 8)
    for begin in (store.writing, store.reading):
        with pytest.raises(
            StoreError, match=f"memory of the host, and the storage is on {device_type}"
        ):
            begin(0, there)
    store.close()
