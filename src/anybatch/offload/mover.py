"""Mover of saved storages between the device and a store, with readable error messages.

A thread writes and another reads, so that both directions are used at once; a storage needed
immediately is copied in the thread that needs it. Only that thread allocates and frees memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch

from anybatch.core import accelerator
from anybatch.errors import StoreError
from anybatch.memory.copier import Copier, Job
from anybatch.memory.stores import SENT, Store, empty, require_space, space_of, store_errors
from anybatch.offload.saved import Saved


class Mover:
    """Storages on their way.

    Args:
        make: returns a store, called at the first eviction.
        device: of the storages.

    Attributes:
        out: bytes that were copied out since `begin`.
        back: bytes that were copied back.
        waited: seconds of waiting for either.
        rates: bytes and seconds of the copies out, and of those back, that nothing else hid.
        ended: names and last copies of storages that are not needed any more.
    """

    def __init__(self, make: Callable[[], Store], device: torch.device) -> None:
        self._make, self._device = make, device
        self._store: Store | None = None
        self._writer, self._reader = Copier(device), Copier(device)
        self.ended: deque[tuple[int, Job | None]] = deque()
        self._jobs: list[Job] = []
        self._keys = 0
        self.out = self.back = 0
        self.waited = 0.0
        self.rates = [[0, 0.0], [0, 0.0]]

    def begin(self) -> None:
        """Count from nothing again."""
        self.out = self.back = 0
        self.waited = 0.0

    def ready(self) -> None:
        """Begin the threads that copy, while there is memory for them."""
        self._writer.begin()
        self._reader.begin()

    def key(self) -> int:
        """Return a name that nothing in the store has had."""
        self._keys += 1
        return self._keys

    def send(self, saved: Saved) -> None:
        """Begin a copy; the memory is held until `free`."""
        if saved.copied:
            return
        with _store_errors("written to"):
            work = self._opened().writing(saved.key, saved.storage)
        saved.copied = True
        saved.out = self._writer.start(work)
        self._jobs.append(saved.out)
        self.out += saved.size

    def renew(self, saved: Saved, storage: Any) -> None:
        """Copy an already copied storage again as it is now, and evict it if it was evicted."""
        if not saved.copied:
            return
        resident = saved.storage
        self.ended.append((saved.key, saved.out))
        saved.key, saved.out, saved.copied, saved.storage = self.key(), None, False, storage
        if resident is None:
            self.send_now(saved)
        else:
            self.send(saved)

    def free(self, saved: Saved) -> None:
        """Give up the memory, once the copy has ended."""
        self.arrived(saved)
        if saved.out is not None:
            with _store_errors("written to"):
                self._wait(self._writer, saved.out)
            saved.out.work = None
            saved.out = None
        assert saved.copied
        saved.storage = None
        self.settle()

    def call(self, saved: Saved) -> None:
        """Begin a return, where the storage is not in memory."""
        if (storage := saved.here()) is not None:
            saved.storage = storage
            return
        saved.holds(empty(saved.size, saved.device))
        with _store_errors("read from"):
            saved.back = self._reader.start(self._reading(saved, saved.storage))
        self._jobs.append(saved.back)
        self.back += saved.size

    def arrived(self, saved: Saved) -> None:
        """Wait for a return that is under way."""
        if saved.back is not None:
            with _store_errors("read from"):
                self._wait(self._reader, saved.back)
            saved.back.work = None
            saved.back = None

    def send_now(self, saved: Saved) -> None:
        """Copy out, and give up the memory."""
        if not saved.copied:
            self.settle()
            start = perf_counter()
            with _store_errors("written to"):
                self._opened().writing(saved.key, saved.storage)()
            saved.copied = True
            self._clocked(0, saved.size, perf_counter() - start)
            self.out += saved.size
        self.free(saved)

    def call_now(self, saved: Saved) -> None:
        """Copy back."""
        storage, start = empty(saved.size, saved.device), perf_counter()
        with _store_errors("read from"):
            self._reading(saved, storage)()
        self._clocked(1, saved.size, perf_counter() - start)
        self.back += saved.size
        saved.holds(storage)

    def fetch(self, saved: Saved) -> Any:
        """Return a private copy of an offloaded storage."""
        storage = empty(saved.size, saved.device)
        with _store_errors("read from"):
            self._reading(saved, storage)()
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

    def require_space(self, size: int) -> None:
        """Require capacity for so many bytes in the store, where it can be checked in advance.

        Raises:
            StoreError: it has not.
        """
        if size == 0:
            return
        with _store_errors("opened"):
            space = space_of(self._opened())
        require_space(
            size, space, of=SENT, otherwise="name another folder (store=), or give more memory="
        )

    def rest(self) -> None:
        """Finish all queued copies, and end the threads."""
        try:
            self._writer.close()
        finally:
            self._reader.close()
        for job in self._jobs:
            job.work = None
        self._jobs.clear()
        self.settle()

    def close(self) -> None:
        """End the threads, and close the store; its contents are lost."""
        try:
            self.rest()
        finally:
            store, self._store = self._store, None
            if store is not None:
                store.close()

    def _reading(self, saved: Saved, storage: Any) -> Callable[[], None]:
        if self._store is None:
            raise gone()
        try:
            return self._store.reading(saved.key, storage)
        except KeyError:  # of a store that was closed
            raise gone() from None

    def _opened(self) -> Store:
        if self._store is None:
            self._store = self._make()
        return self._store

    def _clocked(self, way: int, size: int, seconds: float) -> None:
        self.waited += seconds
        self.rates[way][0] += size
        self.rates[way][1] += seconds

    def _wait(self, copier: Copier, job: Job) -> None:
        if not job.done:
            start = perf_counter()
            copier.wait(job)
            self.waited += perf_counter() - start
        copier.wait(job)


def gone() -> StoreError:
    """Return the error for a tensor in a store that is closed."""
    return StoreError(
        "a saved tensor must be in its store, and the step that saved it has failed, or its store "
        "was closed: run forward again"
    )


_store_errors = partial(
    store_errors,
    of=SENT,
    then="the gradients of this step are not complete, so set them to zero before the next",
)
"""Explain an error of the system for a saved tensor."""
