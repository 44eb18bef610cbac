"""Stores of offloaded bytes: memory of the host, or a private file."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from anybatch.core.accelerator import of
from anybatch.core.undo import uninterrupted
from anybatch.core.units import show_bytes
from anybatch.errors import StoreError
from anybatch.memory.checksums import Sums, checksums, require_same
from anybatch.memory.nameless import left_for, nameless, read_at, write_at

BLOCK = 4096
"""Bytes to which places, sizes and memory are aligned past the page cache."""

BOUNCE = 4 << 20
"""Bytes that go past the page cache at once."""


class Store(Protocol):
    """Keeps bytes by a key.

    The functions returned by `writing` and `reading` copy, in any thread; all else is done at once.
    """

    def writing(self, key: Hashable, storage: Any) -> Callable[[], None]:
        """Return a function that stores a copy of a storage."""

    def reading(self, key: Hashable, storage: Any) -> Callable[[], None]:
        """Return a function that fills a storage from its stored copy."""

    def put(self, key: Hashable, data: Tensor) -> None:
        """Keep a copy of a flat uint8 tensor."""

    def get(self, key: Hashable, out: Tensor) -> None:
        """Fill a flat uint8 tensor from its stored copy."""

    def drop(self, key: Hashable) -> None:
        """Drop a stored copy, if there is one."""

    def close(self) -> None:
        """Forget everything."""


@contextmanager
def store_errors(what: str, *, of: str, then: str) -> Iterator[None]:
    """Explain an error of the system that the body raises.

    Args:
        what: the failed action on the store, such as "written to".
        of: its contents, in words.
        then: the consequence, in words.

    Raises:
        StoreError: in place of an error of the system's.
    """
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(
            f"{of} must be stored, and its store could not be {what} ({error}): free space there, "
            f"or name another folder (store=); {then}"
        ) from error


def require_space(
    size: int,
    space: int | None,
    *,
    of: str,
    folder: str = "the folder of the spill file",
    otherwise: str = "or name another folder (store=)",
) -> None:
    """Check that a store has capacity, before anything is sent there.

    Args:
        size: bytes that it will be sent.
        space: bytes that it can hold; None where that cannot be determined.
        of: the sent tensors, in words.
        folder: of its file, in words.
        otherwise: another remedy than freeing space there.

    Raises:
        StoreError: it has not.
    """
    if space is not None and space < size:
        raise StoreError(
            f"{of} must fit in its store, and that is {show_bytes(size)}, and {folder} has "
            f"{show_bytes(space)} left: free space there, {otherwise}"
        )


def space_of(store: Store) -> int | None:
    """Return the bytes that a store can hold; None where that cannot be determined."""
    return store.space() if isinstance(store, FileStore) else None


class HostStore:
    """Host memory, page-locked where that makes copies from the device faster.

    Args:
        check: compare checksums of returned tensors with those at offloading. Default False.
    """

    def __init__(self, *, check: bool = False) -> None:
        self._check = check
        self._held: dict[Hashable, tuple[Tensor, Sums | None]] = {}

    def writing(self, key: Hashable, storage: Any) -> Callable[[], None]:
        """Return a function that stores a copy of a storage."""
        return partial(self.put, key, _flat(storage))

    def reading(self, key: Hashable, storage: Any) -> Callable[[], None]:
        """Return a function that fills a storage from its stored copy."""
        return partial(self.get, key, _flat(storage))

    def put(self, key: Hashable, data: Tensor) -> None:
        """Keep a copy."""
        host = torch.empty(data.shape, dtype=torch.uint8, pin_memory=of(data.device).facts.pins)
        host.copy_(data)
        self._held[key] = host, checksums(_memory(host.untyped_storage())) if self._check else None

    def get(self, key: Hashable, out: Tensor) -> None:
        """Fill `out`."""
        host, sums = self._held[key]
        if sums is not None:
            require_same(_memory(host.untyped_storage()), sums, "host memory")
        out.copy_(host)

    def drop(self, key: Hashable) -> None:
        """Forget a copy."""
        self._held.pop(key, None)

    def close(self) -> None:
        """Forget all copies."""
        self._held.clear()


@dataclass(slots=True)
class _Place:
    """Where in the file a copy is, and, where that is checked, its checksums once it is there."""

    begin: int
    size: int
    sums: Sums | None = None


class FileStore:
    """An unlinked file for storages of the host, gone with the process, however that ends.

    Only its owner reads it. Freed space is reused, first fit by size.

    Args:
        folder: where the file is; None (default) is the system's folder for temporary files.
        direct: past the page cache, which would fill the memory that this is to spare; where the
            system can. Each thread has a buffer of `BOUNCE` bytes for it. Default False.
        check: compare checksums of returned tensors with those at offloading. Default False.

    Raises:
        OSError: the folder cannot be written to, or is full.
    """

    def __init__(
        self, folder: Path | None = None, *, direct: bool = False, check: bool = False
    ) -> None:
        with uninterrupted():  # or the file would keep its name, or stay open
            self._file, past = nameless(folder, direct=direct)
            self._closing = weakref.finalize(self, os.close, self._file)
        self._folder = folder
        self._buffers = threading.local() if past else None
        self._block = BLOCK if past else 1
        self._check = check
        self._places: dict[Hashable, _Place] = {}
        self._free: dict[int, list[int]] = {}
        self._end = 0

    def put(self, key: Hashable, data: Tensor) -> None:
        """Write a copy."""
        self.writing(key, data.untyped_storage())()

    def get(self, key: Hashable, out: Tensor) -> None:
        """Read into `out`."""
        self.reading(key, out.untyped_storage())()

    def writing(self, key: Hashable, storage: Any) -> Callable[[], None]:
        """Return a function that writes a copy of a storage."""
        self._require(storage)
        size = storage.nbytes()
        nbytes = self._in_blocks(size)
        free = self._free.get(nbytes)
        begin = free.pop() if free else self._end
        place = self._places[key] = _Place(begin, size)
        self._end = max(self._end, begin + nbytes)
        return partial(self._write, storage, place)

    def reading(self, key: Hashable, storage: Any) -> Callable[[], None]:
        """Return a function that reads a stored copy into a storage."""
        self._require(storage)
        return partial(self._read, storage, self._places[key])

    def _require(self, storage: Any) -> None:
        if not of(storage.device).host:  # its pointer means nothing here
            raise StoreError(
                f"a FileStore stores memory of the host, and the storage is on {storage.device}: "
                "use StagedStore, or HostStore"
            )

    def _write(self, storage: Any, place: _Place) -> None:
        if self._check:
            place.sums = checksums(_memory(storage))
        if self._buffers is None:
            self._put_all(_memory(storage), place.begin)
            return
        address, buffer = storage.data_ptr(), self._buffer()
        for at, part in _parts(place.size):
            ctypes.memmove(_address(buffer), address + at, part)
            self._put_all(buffer[: self._in_blocks(part)], place.begin + at)

    def _read(self, storage: Any, place: _Place) -> None:
        if self._buffers is None:
            self._get_all(_memory(storage), place.begin)
        else:
            address, buffer = storage.data_ptr(), self._buffer()
            for at, part in _parts(place.size):
                self._get_all(buffer[: self._in_blocks(part)], place.begin + at)
                ctypes.memmove(address + at, _address(buffer), part)
        if place.sums is not None:
            require_same(_memory(storage), place.sums, "the spill file")

    def _put_all(self, view: memoryview, begin: int) -> None:
        done = 0
        while done < len(view):
            put = write_at(self._file, view[done:], begin + done)
            if put == 0:
                raise OSError(f"the spill file takes {begin + done} of {begin + len(view)} bytes")
            done += put

    def _get_all(self, view: memoryview, begin: int) -> None:
        done = 0
        while done < len(view):
            got = read_at(self._file, view[done:], begin + done)
            done += got
            if got == 0 or (done < len(view) and done % self._block):  # what is left is no block
                raise OSError(f"the spill file ends at {begin + done} of {begin + len(view)} bytes")

    def _in_blocks(self, size: int) -> int:
        """Return the bytes of the blocks that hold so many."""
        return -(-size // self._block) * self._block

    def _buffer(self) -> memoryview:
        """Return aligned memory of this thread's own."""
        found: memoryview | None = getattr(self._buffers, "memory", None)
        if found is None:
            found = memoryview(mmap.mmap(-1, BOUNCE))
            self._buffers.memory = found  # type: ignore[union-attr]
        return found

    def drop(self, key: Hashable) -> None:
        """Make its place free."""
        place = self._places.pop(key, None)
        if place is not None:
            self._free.setdefault(self._in_blocks(place.size), []).append(place.begin)

    def close(self) -> None:
        """Close the file, with which it is gone."""
        self._file = -1
        self._closing()

    def space(self) -> int:
        """Return the bytes that it can hold: those of the file, and those left in its folder."""
        return self._end + left_for(self._file, self._folder)


def _parts(size: int) -> Iterator[tuple[int, int]]:
    """Yield beginning and bytes of the parts that fit in a buffer."""
    for at in range(0, size, BOUNCE):
        yield at, min(BOUNCE, size - at)


def _address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _memory(storage: Any) -> memoryview:
    """Return the bytes of a storage on the host, which may be resized when this is gone."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def _flat(storage: Any) -> Tensor:
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class StagedStore(FileStore):
    """A file for storages of another device, by way of host memory, page-locked where that helps.

    Args:
        folder: as of `FileStore`.
        direct: as there.
        check: as there.
    """

    def __init__(
        self, folder: Path | None = None, *, direct: bool = False, check: bool = False
    ) -> None:
        super().__init__(folder, direct=direct, check=check)
        self._stages = threading.local()

    def _require(self, storage: Any) -> None:
        """Take any: bytes are copied to the host first."""

    def _write(self, storage: Any, place: _Place) -> None:
        flat, (host, view) = _flat(storage), self._stage(storage.device)
        with _unseen():
            if self._check:
                place.sums = checksums(_memory(flat.cpu().untyped_storage()))
            for at, part in _parts(place.size):
                host[:part].copy_(flat[at : at + part])
                self._put_all(view[: self._in_blocks(part)], place.begin + at)

    def _read(self, storage: Any, place: _Place) -> None:
        flat, (host, view) = _flat(storage), self._stage(storage.device)
        with _unseen():
            for at, part in _parts(place.size):
                self._get_all(view[: self._in_blocks(part)], place.begin + at)
                flat[at : at + part].copy_(host[:part])
            if place.sums is not None:
                require_same(_memory(flat.cpu().untyped_storage()), place.sums, "the spill file")

    def _stage(self, device: torch.device) -> tuple[Tensor, memoryview]:
        """Return host memory of this thread's own, as a tensor and as bytes; it begins a block."""
        found: tuple[Tensor, memoryview] | None = getattr(self._stages, "memory", None)
        if found is None:
            with _unseen():
                pinned = of(device).facts.pins
                buffer = torch.empty(BOUNCE + BLOCK, dtype=torch.uint8, pin_memory=pinned)
                host = buffer[-buffer.data_ptr() % BLOCK :][:BOUNCE]
            view = memoryview((ctypes.c_char * BOUNCE).from_address(host.data_ptr())).cast("B")
            found = self._stages.memory = host, view
        return found


@contextmanager
def _unseen() -> Iterator[None]:
    """Let no mode see the kernels of the body: they are copies of bytes."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def store_on(device: torch.device, destination: str | None = None) -> Store:
    """Return where bytes of a device go: host memory from a GPU, a file from the host's own.

    Args:
        device: that is left.
        destination: "host", "file", or the folder of the file; None (default) is the nearest store.
    """
    folder = None if destination in (None, "host", "file") else Path(str(destination))
    if of(device).host:
        return FileStore(folder)
    return HostStore() if destination in (None, "host") else StagedStore(folder)


SENT = "an offloaded tensor"


def empty(size: int, device: torch.device) -> Any:
    """Return a new storage, made by a kernel so that meters count it."""
    return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
