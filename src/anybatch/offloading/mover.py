"""Mover of saved storages between the device and a store, with readable error messages.

A storage needed immediately is copied in the thread that needs it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from math import gcd, prod
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from anybatch.core import accelerator
from anybatch.errors import NotExactError, StoreError
from anybatch.memory.fakes import uncached
from anybatch.memory.pager import BACK, OUT, Copies, Job, MemoryPage
from anybatch.memory.stores import SENT, Store, new_storage


class Mover(Copies):
    """Storages on their way.

    Attributes:
        rates: bytes and seconds of the copies out, and of those back, that nothing else hid.
        ended: names and last copies of storages that are not needed any more.
    """

    of, otherwise = SENT, "name another folder (store=), or give more memory="
    then = "the gradients of this step are not complete, so set them to zero before the next"

    def __init__(self, make: Callable[[], Store], device: torch.device) -> None:
        super().__init__(make, device)
        self.ended: deque[tuple[int, Job | None]] = deque()
        self._jobs: list[Job] = []
        self.rates = [[0, 0.0], [0, 0.0]]

    def start(self, way: int, page: MemoryPage, storage: Any) -> Job:
        """Begin a copy; its storage is freed in this thread, after `rest` at the latest."""
        self._jobs.append(super().start(way, page, storage))
        return self._jobs[-1]

    def send(self, saved: Saved) -> None:
        """Begin a copy; the memory is held until `free`."""
        if not saved.has_copy:
            self.start(OUT, saved, saved.storage)

    def renew(self, saved: Saved, storage: Any) -> None:
        """Copy an already copied storage again as it is now, and evict it if it was evicted."""
        if not saved.has_copy:
            return
        self.arrived(saved)
        resident = saved.storage
        self.ended.append((saved.key, saved.job))
        saved.key, saved.job, saved.has_copy, saved.storage = self.key(), None, False, storage
        if resident is None:
            self.send_now(saved)
        else:
            self.send(saved)

    def free(self, saved: Saved) -> None:
        """Give up the memory, once the copy has ended."""
        self.finish(saved)
        self.empty(saved)
        self.settle()

    def prefetch(self, saved: Saved) -> None:
        """Begin a return, where the storage is not in memory."""
        if (storage := saved.here()) is not None:
            saved.storage = storage
            return
        storage = new_storage(saved.size, saved.device)
        self.start(BACK, saved, storage)
        saved.holds(storage)  # an interrupt before has it read again

    def arrived(self, saved: Saved) -> None:
        """Wait for a return that is under way."""
        if saved.job is not None and saved.job.way == BACK:
            self.finish(saved)

    def send_now(self, saved: Saved) -> None:
        """Copy out, and give up the memory."""
        if not saved.has_copy:
            self.settle()
            self._clocked(OUT, saved, saved.storage)
        self.free(saved)

    def fetch_now(self, saved: Saved) -> None:
        """Copy back."""
        storage = new_storage(saved.size, saved.device)
        self._clocked(BACK, saved, storage)
        saved.holds(storage)

    def fetch(self, saved: Saved) -> Any:
        """Return a private copy of an offloaded storage."""
        storage = new_storage(saved.size, saved.device)
        self.copy(BACK, saved, storage)
        return storage

    def now(self) -> float:
        """Return the time in seconds when all that was begun on the device has ended."""
        accelerator.of(self._device).synchronise(self._device)
        return perf_counter()

    def settle(self) -> None:
        """Free the copies in the store that no saved tensor needs."""
        for _ in range(len(self.ended)):
            key, job = self.ended.popleft()
            if job is not None and not job.done:
                self.ended.append((key, job))
                continue
            if job is not None:
                job.work = None  # with the storage that it holds
            if self._store is not None:
                self._store.drop(key)

    def rest(self) -> None:
        """Finish all queued copies, and end the threads."""
        super().rest()
        for job in self._jobs:
            job.work = None
        self._jobs.clear()
        self.settle()

    def _work(self, way: int, page: MemoryPage, storage: Any) -> Callable[[], None]:
        if way == BACK and self._store is None:
            raise gone()
        try:
            return super()._work(way, page, storage)
        except KeyError:  # of a store that was closed
            raise gone() from None

    def _clocked(self, way: int, saved: Saved, storage: Any) -> None:
        """Copy now, and count its bytes and seconds."""
        start = perf_counter()
        self.copy(way, saved, storage)
        seconds = perf_counter() - start
        self.bytes[way] += saved.size
        self.waited += seconds
        self.rates[way][0] += saved.size
        self.rates[way][1] += seconds


def gone() -> StoreError:
    """Return the error for a tensor in a store that is closed."""
    return StoreError(
        "a saved tensor must be in its store, and the step that saved it has failed, or its store "
        "was closed: run forward again"
    )


# Handle that autograd holds in place of a saved tensor, on a storage that may be offloaded.
#
# Many saved tensors share a storage: the output of a ReLU is saved by it and by the layer after it,
# a transposed view with its base. The storage moves once, and every handle describes its part.
#
#     handle ┐
#     handle ├──> saved storage ──> here, or a copy in the store
#     handle ┘    (dies with its last handle)
#
# torch has no check for writes in place where hooks are set. Here a handle holds a tensor without
# memory that shares the count of writes with the saved one, so a later write is found even when the
# memory was reused long ago.
#
# Not all that share a storage share that count: the parts of ``unsafe_chunk`` have one each, and
# torch's own GRU and LSTM cells write to one part while another is saved. So the storage knows the
# counts that it was saved under, and one more makes its copy anew.

SMALL = 64 << 10
"""Bytes below which a storage is not offloaded: moving it costs more than it frees."""


class Saved(MemoryPage):
    """One storage that autograd holds.

    Attributes:
        number: in the order in which storages are saved first in a step.
        counts: counters of writes under which it was saved, each by a probe, with its value then.
        storage: it, where it is held here; None where nothing here holds it.
        weak_storage: a weak reference on it, wherever it is held.
        recipe: how to make it again; None where it is moved.
        mark: place of the fingerprint of what a recipe is to make; None where it is moved.
    """

    __slots__ = (
        "__weakref__", "counts", "device", "ended", "mark", "number", "recipe", "storage",
        "weak_storage",
    )  # fmt: skip

    def __init__(
        self, number: int, key: int, tensor: Tensor, ended: deque[tuple[int, Job | None]]
    ) -> None:
        storage = tensor.untyped_storage()
        super().__init__(key, storage.nbytes())
        self.number, self.device, self.ended = number, tensor.device, ended
        self.counts: list[tuple[Tensor, int]] = [(probe(tensor), tensor._version)]
        self.storage: Any = storage
        self.weak_storage: Any = weakref.ref(storage)
        self.recipe: Any = None
        self.mark: int | None = None

    def __del__(self) -> None:
        if getattr(self, "has_copy", False):  # an interrupt may leave it half made
            self.ended.append((self.key, self.job))

    @property
    def restorable(self) -> bool:
        """Return whether a copy is complete, or a recipe makes it again."""
        return self.recipe is not None or super().restorable

    def let_go(self) -> None:
        """Drop the reference on the storage."""
        self.storage = None

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


class Fingerprints:
    """Fingerprints of the storages that a step drops, to compare those that are made again."""

    def __init__(self, count: int, device: torch.device) -> None:
        with _disable_current_modes():  # which would count them
            self._marks = torch.zeros(count, dtype=torch.int64, device=device)
            self._differs = torch.zeros((), dtype=torch.bool, device=device)
        self._count = 0

    def take(self, storage: Any) -> int:
        """Store the fingerprint of a storage, and return its place."""
        with _disable_current_modes():
            self._marks[self._count] = fingerprint(storage)
        self._count += 1
        return self._count - 1

    def compare(self, storage: Any, place: int) -> None:
        """Compare a storage with the one at a place."""
        with _disable_current_modes():
            self._differs |= fingerprint(storage) != self._marks[place]

    def differ(self) -> bool:
        """Say whether any was another one; a device is waited for."""
        with _disable_current_modes():
            return bool(self._differs)


def fingerprint(storage: Any) -> Tensor:
    """Return the sum of a storage's words, which other contents are most unlikely to have."""
    with _disable_current_modes(), torch.no_grad():
        bytes_ = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        end = len(bytes_) // 8 * 8
        words = bytes_[:end].view(torch.int64).sum()
        return words if end == len(bytes_) else words + bytes_[end:].sum()


def same(one: Any, other: Any) -> bool:
    """Say whether two storages are the same bit for bit, in pieces."""
    device, piece = one.device, 1 << 20
    a, b = (torch.empty(0, dtype=torch.uint8, device=device).set_(s) for s in (one, other))
    pieces = range(0, len(a), piece)
    return len(a) == len(b) and all(torch.equal(a[k : k + piece], b[k : k + piece]) for k in pieces)
