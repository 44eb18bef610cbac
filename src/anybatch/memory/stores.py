"""Stores of offloaded bytes: memory of the host, or a private file."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from anybatch.core.accelerator import of
from anybatch.core.transaction import uninterrupted
from anybatch.core.units import show_bytes
from anybatch.errors import StoreError

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

    def drop(self, key: Hashable) -> None:
        """Drop a stored copy, if there is one."""

    def close(self) -> None:
        """Forget everything."""


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
    """
    if space is not None and space < size:
        raise StoreError(
            f"{of} must fit in its store, and that is {show_bytes(size)}, and {folder} has "
            f"{show_bytes(space)} left: free space there, {otherwise}"
        )


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
        return partial(self._put, key, _flat(storage))

    def reading(self, key: Hashable, storage: Any) -> Callable[[], None]:
        """Return a function that fills a storage from its stored copy."""
        return partial(self._get, self._held[key], _flat(storage))

    def _put(self, key: Hashable, data: Tensor) -> None:
        host = torch.empty(data.shape, dtype=torch.uint8, pin_memory=of(data.device).facts.pins)
        host.copy_(data)
        self._held[key] = host, checksums(_memory(host.untyped_storage())) if self._check else None

    def _get(self, held: tuple[Tensor, Sums | None], out: Tensor) -> None:
        host, sums = held
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
    """A file for storages of another device, by way of host memory, pinned where that helps."""

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


SENT = "an offloaded tensor"


def new_storage(size: int, device: torch.device) -> Any:
    """Return a new storage, made by a kernel so that meters count it."""
    return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()


# A file without a name: made, written and read at a place, on systems that know less than Linux.
#
# Linux can unlink an open file, read and write at an offset without moving a pointer that threads
# share, and bypass the page cache. Missing features of a system are replaced:
#
#     name        unlinked while open         Windows: deleted by the system when it is closed
#     at a place  pwrite, preadv              else one thread at a time: seek, then read or write
#     past cache  O_DIRECT                    else through the page cache
#     room        of the file                 Windows: of its folder
#
# Each is looked up when it is needed, so that a test can remove it.
#
# Source: the availability notes of Python's `os` and `tempfile`.

BY_FILE = os.name == "posix"
"""Whether the system reports the free space of an open file; else that of its folder is used."""

_SEEKING = threading.Lock()


def nameless(folder: Path | None, *, direct: bool) -> tuple[int, bool]:
    """Return a descriptor of a new private file, and whether it bypasses the page cache.

    Args:
        folder: where it is; None is `system_folder`.
        direct: past the page cache, where the system can.

    Raises:
        OSError: the folder cannot be written to.
    """
    goes_when_closed = getattr(os, "O_TEMPORARY", 0)
    descriptor, path = tempfile.mkstemp(prefix="anybatch-", dir=folder or system_folder())
    if goes_when_closed:  # an open file keeps its name there
        flags = os.O_RDWR | goes_when_closed | getattr(os, "O_BINARY", 0)
        os.close(descriptor)
        return os.open(path, flags), False
    try:
        past = past_the_cache(path) if direct else None
    finally:
        Path(path).unlink()
    if past is None:
        return descriptor, False
    os.close(descriptor)
    return past, True


MOUNTS = Path("/proc/mounts")
"""The mounted file systems, where the system lists them (Linux): device, folder, type ..."""

OF_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files are memory: what moves there frees none."""

ON_DISK = Path("/var/tmp")
"""The system's folder for temporary files that outlive a restart, so it is on a disk."""


def system_folder() -> Path:
    """Return the system's folder for temporary files, or `ON_DISK` where that one is memory."""
    folder = Path(tempfile.gettempdir())
    if not in_memory(folder):
        return folder
    if os.access(ON_DISK, os.W_OK | os.X_OK) and not in_memory(ON_DISK):
        return ON_DISK
    raise StoreError(
        f"a file for offloaded tensors must be on a disk, and {folder} is memory itself: name a "
        "folder on a disk, by anybatch.plan(spill=...) or by the variable TMPDIR"
    )


def in_memory(folder: Path) -> bool:
    """Return whether the file system of a folder is memory; False where that is unknown."""
    try:
        rows = [line.split() for line in MOUNTS.read_text().splitlines()]
    except OSError:
        return False
    place, file_systems = folder.resolve(), dict[Path, str]()
    for _, at, file_system, *_ in (row for row in rows if len(row) > 2):
        mount = Path(at.replace("\\040", " "))  # a space is written as an octal number
        if place.is_relative_to(mount):
            file_systems[mount] = file_system  # the last one in a place covers the others
    innermost = max(file_systems, key=lambda mount: len(mount.parts), default=None)
    return innermost is not None and file_systems[innermost] in OF_MEMORY


def past_the_cache(path: str) -> int | None:
    """Return a descriptor that does not use the page cache, None where the system has none."""
    flag = getattr(os, "O_DIRECT", 0)
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | flag) if flag else None
    except OSError:  # a file system without it
        return None


def write_at(descriptor: int, view: memoryview, begin: int) -> int:
    """Write bytes from `begin` on, and return the number that was written."""
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, view, begin)
    with _SEEKING:
        os.lseek(descriptor, begin, os.SEEK_SET)
        return os.write(descriptor, view)


def read_at(descriptor: int, view: memoryview, begin: int) -> int:
    """Fill with the bytes from `begin` on, and return their number."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], begin)
    with _SEEKING:
        os.lseek(descriptor, begin, os.SEEK_SET)
        came = os.read(descriptor, len(view))
    view[: len(came)] = came
    return len(came)


def left_for(descriptor: int, folder: Path | None) -> int:
    """Return the bytes that the file system of a file has left."""
    return shutil.disk_usage(descriptor if BY_FILE else folder or system_folder()).free


# Checksums of offloaded bytes, for debugging.
#
# A disk, a driver or another program may change tensors in a store. torch would compute with it,
# and the gradients would look like any others. A file system with checksums of its own is seldom at
# hand; so a sum of every block is recorded in memory when it is offloaded, and compared when it
# returns:
#
#     leaves    block 0 | block 1 | block 2        sums kept: s0 s1 s2
#     returns   block 0 | block 1*| block 2        s1 differs: an error, and no gradient
#
# CRC-32 finds every error of up to 32 bits in a row, and misses one in 2^32 of the others; it is
# the fastest sum in Python's library that finds as much.

CHECKSUM_BLOCK = 4 << 20
"""Bytes that share a sum."""

Sums = tuple[int, ...]


def checksums(memory: memoryview) -> Sums:
    """Return the sum of each block of bytes."""
    return tuple(
        zlib.crc32(memory[at : at + CHECKSUM_BLOCK]) for at in range(0, len(memory), CHECKSUM_BLOCK)
    )


def require_same(memory: memoryview, sums: Sums, where: str) -> None:
    """Require that bytes that have returned have the sums that they left with.

    Args:
        memory: the returned bytes.
        sums: of the offloaded bytes.
        where: it was meanwhile, in words.
    """
    for number, (found, wanted) in enumerate(zip(checksums(memory), sums, strict=True)):
        if found != wanted:
            begin, end = number * CHECKSUM_BLOCK, min((number + 1) * CHECKSUM_BLOCK, len(memory))
            raise StoreError(
                "an offloaded tensor must return unchanged, and of a tensor of "
                f"{show_bytes(len(memory))} the bytes from {begin} to {end} have changed in "
                f"{where}: a failing disk, another program or a write to .data has changed it, so "
                "name another folder (store=) or find the cause; the gradients of this step are "
                "not complete, so set them to zero before the next"
            )
