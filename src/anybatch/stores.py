"""Where bytes wait that have left the device: memory of the host, or a file of nobody else's."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Hashable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor


class Store(Protocol):
    """Keeps bytes by a key."""

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
    """An unlinked file: gone with the process, however that ends, and read by its owner alone.

    Space that was dropped is used again, first fit by size.

    Args:
        folder: where the file is; None (default) is the system's folder for temporary files.

    Raises:
        OSError: the folder cannot be written to, or is full.
    """

    def __init__(self, folder: Path | None = None) -> None:
        descriptor, path = tempfile.mkstemp(prefix="anybatch-", dir=folder)
        Path(path).unlink()
        self._file = descriptor
        self._places: dict[Hashable, tuple[int, int]] = {}
        self._free: dict[int, list[int]] = {}
        self._end = 0

    def put(self, key: Hashable, data: Tensor) -> None:
        """Write a copy."""
        size = data.numel()
        free = self._free.get(size)
        begin = free.pop() if free else self._end
        self._places[key] = begin, size
        self._end = max(self._end, begin + size)
        host = data.cpu()
        view, done = _memory(host), 0
        while done < size:
            done += os.pwrite(self._file, view[done:], begin + done)

    def get(self, key: Hashable, out: Tensor) -> None:
        """Read into `out`."""
        begin, size = self._places[key]
        host = out if out.device.type == "cpu" else torch.empty_like(out, device="cpu")
        view, done = _memory(host), 0
        while done < size:
            read = os.preadv(self._file, [view[done:]], begin + done)
            if read == 0:
                raise OSError(f"the spill file ends at {begin + done} of {begin + size} bytes")
            done += read
        if host is not out:
            out.copy_(host)

    def drop(self, key: Hashable) -> None:
        """Make its place free."""
        place = self._places.pop(key, None)
        if place is not None:
            self._free.setdefault(place[1], []).append(place[0])

    def close(self) -> None:
        """Close the file, with which it is gone."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _memory(host: Tensor) -> memoryview:
    """Return the bytes of a flat tensor. What ``Tensor.numpy`` was called on cannot be resized."""
    return memoryview((ctypes.c_char * host.numel()).from_address(host.data_ptr())).cast("B")


def store_on(device: torch.device) -> Store:
    """Return where bytes of a device go: host memory from CUDA, a file from the host's own."""
    return HostStore() if device.type == "cuda" else FileStore()
