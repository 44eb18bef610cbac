"""Where bytes wait that have left the device: memory of the host, or a file of nobody else's."""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor


class Store(Protocol):
    """Keeps bytes by a key.

    What `writing` and `reading` return does the copy, in whatever thread; all else is done at once.
    """

    def writing(self, key: Hashable, storage: Any) -> Callable[[], None]:
        """Return what keeps a copy of a storage."""

    def reading(self, key: Hashable, storage: Any) -> Callable[[], None]:
        """Return what fills a storage with what was kept."""

    def put(self, key: Hashable, data: Tensor) -> None:
        """Keep a copy of a flat uint8 tensor."""

    def get(self, key: Hashable, out: Tensor) -> None:
        """Fill a flat uint8 tensor with what was kept."""

    def drop(self, key: Hashable) -> None:
        """Forget what was kept, if anything was."""

    def close(self) -> None:
        """Forget everything."""


class HostStore:
    """Host memory, page-locked where that makes copies from CUDA faster."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Tensor] = {}

    def writing(self, key: Hashable, storage: Any) -> Callable[[], None]:
        """Return what keeps a copy."""
        return partial(self.put, key, _flat(storage))

    def reading(self, key: Hashable, storage: Any) -> Callable[[], None]:
        """Return what fills a storage."""
        return partial(self.get, key, _flat(storage))

    def put(self, key: Hashable, data: Tensor) -> None:
        """Keep a copy."""
        host = torch.empty(data.shape, dtype=torch.uint8, pin_memory=data.is_cuda)
        self._kept[key] = host.copy_(data)

    def get(self, key: Hashable, out: Tensor) -> None:
        """Fill `out`."""
        out.copy_(self._kept[key])

    def drop(self, key: Hashable) -> None:
        """Forget a copy."""
        self._kept.pop(key, None)

    def close(self) -> None:
        """Forget all copies."""
        self._kept.clear()


class FileStore:
    """An unlinked file for storages of the host, gone with the process, however that ends.

    It is read by its owner alone. Space that was dropped is used again, first fit by size.

    Args:
        folder: where the file is; None (default) is the system's folder for temporary files.

    Raises:
        OSError: the folder cannot be written to, or is full.
    """

    def __init__(self, folder: Path | None = None) -> None:
        descriptor, path = tempfile.mkstemp(prefix="anybatch-", dir=folder)
        Path(path).unlink()
        self._file = descriptor
        self._closing = weakref.finalize(self, os.close, descriptor)
        self._places: dict[Hashable, tuple[int, int]] = {}
        self._free: dict[int, list[int]] = {}
        self._end = 0

    def put(self, key: Hashable, data: Tensor) -> None:
        """Write a copy."""
        self.writing(key, data.untyped_storage())()

    def get(self, key: Hashable, out: Tensor) -> None:
        """Read into `out`."""
        self.reading(key, out.untyped_storage())()

    def writing(self, key: Hashable, storage: Any) -> Callable[[], None]:
        """Return what writes a copy."""
        size = storage.nbytes()
        free = self._free.get(size)
        begin = free.pop() if free else self._end
        self._places[key] = begin, size
        self._end = max(self._end, begin + size)
        return partial(self._write, storage, begin)

    def reading(self, key: Hashable, storage: Any) -> Callable[[], None]:
        """Return what reads into a storage."""
        return partial(self._read, storage, *self._places[key])

    def _write(self, storage: Any, begin: int) -> None:
        view, done = _memory(storage), 0
        while done < len(view):
            done += os.pwrite(self._file, view[done:], begin + done)

    def _read(self, storage: Any, begin: int, size: int) -> None:
        view, done = _memory(storage), 0
        while done < size:
            read = os.preadv(self._file, [view[done:]], begin + done)
            if read == 0:
                raise OSError(f"the spill file ends at {begin + done} of {begin + size} bytes")
            done += read

    def drop(self, key: Hashable) -> None:
        """Make its place free."""
        place = self._places.pop(key, None)
        if place is not None:
            self._free.setdefault(place[1], []).append(place[0])

    def close(self) -> None:
        """Close the file, with which it is gone."""
        self._file = -1
        self._closing()

    def room(self) -> int:
        """Return the bytes that it can keep: those of the file, and what its folder has left."""
        left = os.statvfs(self._file)
        return self._end + left.f_bavail * left.f_frsize


def _memory(storage: Any) -> memoryview:
    """Return the bytes of a storage on the host, which may be resized when this is gone."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def _flat(storage: Any) -> Tensor:
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def store_on(device: torch.device) -> Store:
    """Return where bytes of a device go: host memory from CUDA, a file from the host's own."""
    return HostStore() if device.type == "cuda" else FileStore()
