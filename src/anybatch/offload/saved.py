"""Handle that autograd holds in place of a saved tensor, on a storage that may be offloaded.

Many saved tensors share a storage: the output of a ReLU is saved by it and by the layer after it, a
transposed view with its base. The storage moves once, and every handle describes its part.

    handle ┐
    handle ├──> saved storage ──> here, or a copy in the store
    handle ┘    (dies with its last handle)

torch has no check for writes in place where hooks are set. Here a handle holds a tensor without
memory that shares the count of writes with the saved one, so a later write is found even when the
memory was reused long ago.

Not all that share a storage share that count: the parts of ``unsafe_chunk`` have one each, and
torch's own GRU and LSTM cells write to one part while another is saved. So the storage knows the
counts that it was saved under, and one more makes its copy anew.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import nullcontext
from math import gcd, prod
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from anybatch.errors import NotExactError
from anybatch.memory.copier import Job
from anybatch.memory.fakes import uncached

SMALL = 64 << 10
"""Bytes below which a storage is not offloaded: moving it costs more than it frees."""


class Saved:
    """One storage that autograd holds.

    Attributes:
        number: in the order in which storages are saved first in a step.
        key: its name in the store.
        size: bytes.
        counts: counters of writes under which it was saved, each by a probe, with its value then.
        storage: it, where it is held here; None where nothing here holds it.
        weak_storage: a weak reference on it, wherever it is held.
        copied: a copy is in the store, or on its way there.
        out: that copy, until its end was noticed.
        back: a return that is under way, or None.
        recipe: how to make it again; None where it is moved.
    """

    __slots__ = (
        "__weakref__", "back", "copied", "counts", "device", "ended", "key", "number", "out",
        "recipe", "size", "storage", "weak_storage",
    )  # fmt: skip

    def __init__(
        self, number: int, key: int, tensor: Tensor, ended: deque[tuple[int, Job | None]]
    ) -> None:
        storage = tensor.untyped_storage()
        self.number, self.key, self.size = number, key, storage.nbytes()
        self.device, self.ended = tensor.device, ended
        self.counts: list[tuple[Tensor, int]] = [(probe(tensor), tensor._version)]
        self.storage: Any = storage
        self.weak_storage: Any = weakref.ref(storage)
        self.copied = False
        self.out: Job | None = None
        self.back: Job | None = None
        self.recipe: Any = None

    def __del__(self) -> None:
        if getattr(self, "copied", False):  # an interrupt may leave it half made
            self.ended.append((self.key, self.out))

    def holds(self, storage: Any) -> None:
        """Replace its storage with another resident one."""
        self.storage, self.weak_storage = storage, weakref.ref(storage)

    def unchanged(self, tensor: Tensor) -> bool | None:
        """Say whether a tensor's count of writes stands as it did; None where it is a new one."""
        for counted, version in self.counts:
            if one_count(counted, tensor):
                return version == tensor._version
        return None

    def here(self) -> Any:
        """Return the storage if it is still in memory, by any reference; else None."""
        return self.storage if self.storage is not None else self.weak_storage()


class Handle:
    """Handle on one saved tensor: its part of a storage, and the data to detect writes to it."""

    __slots__ = (
        "__weakref__", "dtype", "offset", "probe", "saved", "shape", "stride", "version", "writer",
    )  # fmt: skip

    def __init__(self, saved: Saved, tensor: Tensor) -> None:
        self.saved, self.version = saved, tensor._version
        self.writer: str | None = None  # the kernel that has written to it, and did not count that
        self.dtype, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride()
        self.offset = tensor.storage_offset()
        self.probe = probe(tensor)

    def tensor(self, storage: Any) -> Tensor:
        """Return the saved tensor on a storage."""
        fake = storage.device.type == "meta"
        with uncached() if fake else nullcontext():
            empty = torch.empty(0, dtype=self.dtype, device=self.saved.device)
            return empty.set_(storage, self.offset, self.shape, self.stride)

    def current(self) -> bool:
        """Say whether nothing has written to it since."""
        return self.probe._version == self.version

    def check(self) -> None:
        """Require that nothing has written to it since."""
        if not self.current():
            raise written(self.dtype, self.shape, self.probe._version, self.version)
        if self.writer is not None:
            raise uncounted(self.writer)

    def overlaps(self, tensor: Tensor) -> bool:
        """Say whether a tensor on the same storage has a byte of it."""
        if not (tensor.numel() and prod(self.shape)):
            return False
        unit = gcd(self.dtype.itemsize, tensor.dtype.itemsize)
        parts = [
            (one.dtype.itemsize, offset, (*one.shape, one.dtype.itemsize // unit), stride)
            for one, offset, stride in (
                (self, self.offset, self.stride),
                (tensor, tensor.storage_offset(), tensor.stride()),
            )
        ]
        marks = np.zeros(self.saved.size // unit, dtype=np.bool_)
        ours, theirs = (
            as_strided(marks[offset * size // unit :], shape, (*(s * size // unit for s in by), 1))
            for size, offset, shape, by in parts
        )
        ours[...] = True
        return bool(theirs.any())


class Stays:
    """Saved tensor that is never offloaded; detached, to avoid a reference cycle with its graph."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = None if tensor.is_inference() else tensor._version

    def current(self) -> bool:
        """Say whether nothing has written to it since."""
        return self.version is None or self.tensor._version == self.version

    def unpack(self) -> Tensor:
        """Return it, if nothing has written to it since."""
        tensor = self.tensor
        if not self.current():
            assert self.version is not None
            raise written(tensor.dtype, tensor.shape, tensor._version, self.version)
        return tensor


def written(dtype: torch.dtype, shape: torch.Size, now: int, then: int) -> RuntimeError:
    """Return the error that autograd raises, in its words."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a tensor of {dtype} {list(shape)} is at version {now}; expected version "
        f"{then} instead: write to a copy of it, or after backward"
    )


def probe(tensor: Tensor) -> Tensor:
    """Return a tensor without memory that shares the count of writes with another."""
    found = tensor.detach()
    found.data = _nothing(tensor)
    return found


def one_count(counted: Tensor, tensor: Tensor) -> bool:
    """Say whether a write to one tensor counts as a write to the other.

    torch has no query for it, so the count is moved and restored.

    Args:
        counted: a `probe`.
        tensor: any tensor.
    """
    before, now = counted._version, tensor._version
    if before != now:
        return False
    torch.autograd.graph.increment_version(counted)
    try:
        return tensor._version != now
    finally:
        torch._C._autograd._unsafe_set_version_counter((counted,), (before,))


def uncounted(kernel: str) -> NotExactError:
    """Return the error for a write to a saved tensor that autograd does not know of."""
    return NotExactError(
        f"a tensor must not be written to after it was saved and offloaded, and {kernel} writes to "
        "one afterwards, which autograd does not count: use another layer (LeakyReLU or PReLU for "
        "RReLU), write to a copy instead of .data, or give memory for a step without offload"
    )


_NOTHING: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def _nothing(like: Tensor) -> Tensor:
    """Return a tensor without memory."""
    if type(like) is FakeTensor:
        return torch.empty(0, dtype=like.dtype, device=like.device)
    key = like.dtype, like.device
    found = _NOTHING.get(key)
    if found is None:
        found = _NOTHING[key] = torch.empty(0, dtype=like.dtype, device=like.device)
    return found


def same(one: Any, other: Any) -> bool:
    """Say whether two storages are the same bit for bit, in pieces."""
    device, piece = one.device, 1 << 20
    a, b = (torch.empty(0, dtype=torch.uint8, device=device).set_(s) for s in (one, other))
    pieces = range(0, len(a), piece)
    return len(a) == len(b) and all(torch.equal(a[k : k + piece], b[k : k + piece]) for k in pieces)
