"""Storages of waiting lanes: resident, offloaded, or being copied.

Copies are made by a thread while a lane computes. Memory counts from
when it is allocated until it is freed, so a storage that is being copied is resident.
`anybatch.memory.pager` decides what is evicted.

    RESIDENT ─evict─> EVICTING ─copied─> OFFLOADED ─call─> PREFETCHING ─copied─> RESIDENT
      ^                   │ used             └────────────────used─────────────────^
      └───────────────────┘
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from anybatch.core import accelerator, threads
from anybatch.core.optimizers import rounded
from anybatch.core.transaction import uninterrupted
from anybatch.memory.meter import Meter
from anybatch.memory.stores import Store

RESIDENT, EVICTING, OFFLOADED, PREFETCHING = range(4)


class Held:
    """One storage of a lane.

    Attributes:
        storage: a weak reference, which does not keep it alive.
        size: bytes that its memory takes.
        nbytes: bytes that it holds.
        lane: whose it is.
        number: of the storages that this lane has made.
        used: the segment in which it was used last.
        state: RESIDENT, EVICTING (being copied out), OFFLOADED or PREFETCHING (being copied in).
        has_copy: a copy of its bytes is in the store, or on its way there.
        used_while_leaving: it was used while it was copied out; until that has ended its memory
            exists, even if it is dropped, so it counts as waiting.
        pinned: it is never evicted: more than one lane has used it, or its address was read.
        job: the copy that was started last, until its end was noticed.
    """

    __slots__ = (
        *("has_copy", "job", "lane", "nbytes", "number", "pinned", "size", "state", "storage"),
        *("used", "used_while_leaving"),
    )

    def __init__(self, storage: Any, nbytes: int, lane: int, number: int, used: int) -> None:
        self.storage, self.nbytes, self.lane, self.number = storage, nbytes, lane, number
        self.size = nbytes
        self.used, self.state = used, RESIDENT
        self.has_copy = self.pinned = self.used_while_leaving = False
        self.job: Job | None = None


class Hold:
    """Mover of storages out and in, with a count of the resident bytes that may be offloaded.

    Attributes:
        all: by the address of the storage.
        movable: those of them that have memory and may be evicted.
        here: bytes of these.
        going: those of them that are EVICTING.
        touched: those of them that were used in segment `since` or later.
        since: a segment.
        moved: bytes that were copied out and in.
    """

    def __init__(self, store: Store, device: torch.device, meters: Sequence[Meter]) -> None:
        self.all: dict[int, Held] = {}
        self.movable: dict[int, Held] = {}
        self.here = self.going = self.touched = self.since = self.moved = 0
        self._store, self._meters, self._copier = store, meters, Copier(device)
        self._device = device
        self._numbered: dict[tuple[int, int], int] = {}
        self._dead: deque[int] = deque()
        self._moving: deque[tuple[int, Held, Job]] = deque()

    @property
    def waiting(self) -> int:
        """Bytes of those here that were not touched."""
        return self.here - self.touched

    def add(self, key: int, storage: Any, size: int, lane: int, number: int, segment: int) -> None:
        """Take in a storage that a lane has made."""
        held = Held(weakref.ref(storage, partial(self._died, key)), size, lane, number, segment)
        held.size = self.rounded(size)
        self.all[key] = held
        self._numbered[lane, number] = key
        self._count(key, held)

    def rounded(self, nbytes: int) -> int:
        """Return the bytes that memory for `nbytes` takes on the device."""
        return rounded(nbytes, self._device)

    def ready(self) -> None:
        """Start the copier, while there is memory for it."""
        self._copier.begin()

    def find(self, lane: int, number: int) -> tuple[int, Held] | None:
        """Return a lane's storage of this number and its key, where it still lives."""
        key = self._numbered.get((lane, number))
        held = self.all.get(key) if key is not None else None
        if key is None or held is None or (held.lane, held.number) != (lane, number):
            return None
        return key, held

    def settle(self) -> None:
        """Remove dead storages, and free the memory of those that were copied out."""
        while self.stirred():  # what a copy has held may die with it
            while self._dead:  # the garbage collector may come in the middle of anything
                self._bury(self._dead.popleft())
            while self._moving and self._moving[0][2].done:
                self._moved(*self._moving.popleft())

    def _bury(self, key: int) -> None:
        held = self.all.pop(key, None)
        if held is not None:
            self._numbered.pop((held.lane, held.number), None)
            self._discount(key, held)
            self.forget_copy(key, held)

    def _moved(self, key: int, held: Held, job: Job) -> None:
        """Take in that a copy has ended."""
        job.work = None  # with what it holds: here, where the bytes are counted
        if held.job is job:
            held.job = None
            self._free(key, held)
            if job.error is not None:
                self._failed(key, held)
            self._copier.wait(job)
            if held.state == EVICTING:
                self._empty(key, held)
            elif held.state == PREFETCHING:
                held.state = RESIDENT

    def stirred(self) -> bool:
        """Say whether there is something to settle."""
        return bool(self._dead or (self._moving and self._moving[0][2].done))

    def touch(self, key: int, held: Held, segment: int) -> None:
        """Record the use of a storage in a segment, and make it resident."""
        if held.state == EVICTING and held.used < self.since:
            held.used_while_leaving = True
        if held.used < self.since and key in self.movable and not held.used_while_leaving:
            self.touched += held.size
        held.used = segment
        if held.state != RESIDENT:
            self.bring_back(key, held)

    def evict(self, key: int, held: Held) -> None:
        """Start to offload a storage; where a copy of it is stored, free its memory at once.

        It may be chosen while it is on its way out, and be offloaded by then.
        """
        storage = held.storage()
        if storage is None or held.state in (EVICTING, OFFLOADED):
            return
        self._await_copy_in(held)
        if not storage.resizable():
            self.pin(key, held)
            return
        if storage.nbytes() != held.nbytes:
            self.forget_copy(key, held)
            self._discount(key, held)
            held.nbytes = storage.nbytes()
            held.size = self.rounded(held.nbytes)
            self._count(key, held)
        if held.has_copy and held.job is None:
            self._empty(key, held)
            return
        if not held.has_copy:
            held.job = self._copier.start(self._store.writing(key, storage))
            held.has_copy = True
            self.moved += held.size
        assert held.job is not None
        held.state = EVICTING
        self.going += held.size
        self._moving.append((key, held, held.job))

    def wait(self) -> bool:
        """Wait for the first eviction in progress; return False where there is none."""
        if not self.going:
            return False
        try:
            self._copier.wait(self._moving[0][2])
        finally:
            self.settle()
        return True

    def call(self, key: int, held: Held) -> None:
        """Begin to move a storage in."""
        storage = held.storage()
        if storage is None or held.state != OFFLOADED:
            return
        storage.resize_(held.nbytes)
        held.job = self._copier.start(self._store.reading(key, storage))
        held.state = PREFETCHING
        self._moving.append((key, held, held.job))
        self.moved += held.size
        self._count(key, held)
        self._metered(storage)

    def bring_back(self, key: int, held: Held) -> None:
        """Make a storage be here now."""
        if held.state == EVICTING:
            held.state = RESIDENT
            self.going -= held.size
        elif held.state == PREFETCHING:
            self._await_copy_in(held)
        elif held.state == OFFLOADED:
            storage = held.storage()
            storage.resize_(held.nbytes)
            self._metered(storage)
            self._store.reading(key, storage)()
            self.moved += held.size
            held.state = RESIDENT
            if not held.pinned:
                self._count(key, held)

    def forget_copy(self, key: int, held: Held) -> None:
        """Drop the copy of a storage that is written to, or has died."""
        if held.job is not None:
            job, held.job = held.job, None
            try:
                self._copier.wait(job)
            finally:
                job.work = None
                self._free(key, held)
                self._drop(key, held)
        self._drop(key, held)

    def pin(self, key: int, held: Held) -> None:
        """Exclude a resident storage from offloading; it is not counted, so no copy may hold it."""
        held.pinned = True
        self.forget_copy(key, held)
        self._discount(key, held)

    def give_up(self, key: int) -> None:
        """Make a storage resident, and stop tracking it: another owner moves it from now on."""
        held = self.all.get(key)
        if held is not None:
            self.bring_back(key, held)
            self.forget_copy(key, held)
            self._discount(key, held)
            del self.all[key]
            self._numbered.pop((held.lane, held.number), None)

    def close(self) -> None:
        """Make all live storages resident, and stop tracking them; unreadable ones become NaN."""
        error: BaseException | None = None
        try:
            self._copier.close()
            self._moving.clear()
            for key, held in list(self.all.items()):
                try:
                    self._return(key, held)
                except Exception as failure:
                    error = error or failure
            if error is not None:
                raise error
        finally:
            self.all.clear()
            self.movable.clear()
            self._store.close()

    def _return(self, key: int, held: Held) -> None:
        """Bring a storage back where it has no memory."""
        storage = held.storage()
        failed = held.job is not None and held.job.error is not None
        if storage is None or not (
            held.state == OFFLOADED or (held.state == PREFETCHING and failed)
        ):
            return
        storage.resize_(held.nbytes)
        try:
            self._store.reading(key, storage)()
        except Exception:
            storage.fill_(0xFF)  # in every dtype with a fraction
            raise

    def _failed(self, key: int, held: Held) -> None:
        """Handle a failed copy: a storage going out is resident, one coming in is offloaded."""
        if held.state == PREFETCHING:
            self._empty(key, held)
        elif held.state == EVICTING:
            held.state = RESIDENT
            self.going -= held.size
            self._drop(key, held)
        else:
            self._drop(key, held)

    def _drop(self, key: int, held: Held) -> None:
        if held.has_copy:
            self._store.drop(key)
            held.has_copy = False

    def _empty(self, key: int, held: Held) -> None:
        """Give the memory of a storage back."""
        storage = held.storage()
        self._discount(key, held)
        held.state = OFFLOADED
        if storage is not None:
            storage.resize_(0)
            self._metered(storage)

    def _metered(self, storage: Any) -> None:
        for meter in self._meters:
            meter.resized(storage)

    def _await_copy_in(self, held: Held) -> None:
        """Wait for a storage that is being copied in."""
        if held.state == PREFETCHING:
            assert held.job is not None
            self._copier.wait(held.job)
            held.job.work = None
            held.job, held.state = None, RESIDENT

    def _free(self, key: int, held: Held) -> None:
        """Record the end of a copy out: a storage used meanwhile counts as used."""
        if held.used_while_leaving and held.used >= self.since and key in self.movable:
            self.touched += held.size
        held.used_while_leaving = False

    def _died(self, key: int, _watch: Any) -> None:
        self._dead.append(key)

    def _count(self, key: int, held: Held) -> None:
        """Count a resident storage that may be offloaded."""
        self.movable[key] = held
        self.here += held.size
        if held.used >= self.since and not held.used_while_leaving:
            self.touched += held.size

    def _discount(self, key: int, held: Held) -> None:
        """Remove a storage from the count: offloaded, gone, or excluded from offloading."""
        if self.movable.pop(key, None) is not None:
            self.here -= held.size
            if held.used >= self.since and not held.used_while_leaving:
                self.touched -= held.size
            if held.state == EVICTING:
                self.going -= held.size


# A thread that copies while the lane with the token computes.
#
# A copy to a file or from it waits for the kernel of the system, not for Python: the thread
# releases the interpreter lock meanwhile. Jobs are done in the order in which they were started, so
# a block is written before it is read back. Where the device has streams they run on one of their
# own, which waits for all earlier kernels.
#
#     lane with the token:  kernels of lane 1 ....... kernels of lane 2 ....... kernels of lane 3
#     this thread:          lane 0 goes, lane 2 comes │ lane 1 goes, lane 3 comes


class Job:
    """A copy on its way.

    Attributes:
        work: the function that copies; removed by the caller when it has ended.
        done: it has ended.
        error: the exception that it raised, or None.
    """

    __slots__ = ("after", "done", "error", "work")

    def __init__(self, work: Callable[[], None], after: Any) -> None:
        self.work: Callable[[], None] | None = work
        self.after = after
        self.done = False
        self.error: BaseException | None = None


class Copier:
    """Does jobs in order, in a thread of the pool from the first of them on, or before.

    Where no thread can be started, the caller does the job.
    """

    def __init__(self, device: torch.device) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._done = threading.Condition()
        self._thread: threads.Task | None = None
        self._device, self._there = device, accelerator.of(device)
        self._stream: Any = None

    def begin(self) -> None:
        """Have the thread, where it is not there yet, while there is memory for it."""
        if self._thread is None:
            with uninterrupted(), suppress(MemoryError, RuntimeError):
                self._thread = threads.start_task(self._run)

    def start(self, work: Callable[[], None]) -> Job:
        """Have it done when all earlier jobs are."""
        after = None
        if self._there.streams:
            after = self._there.current_stream(self._device).record_event()
            if self._stream is None:
                self._stream = self._there.stream(self._device)
        job = Job(work, after)
        self.begin()
        if self._thread is None:
            self._do(job)
        else:
            self._jobs.put(job)
        return job

    def wait(self, job: Job) -> None:
        """Return when it has ended."""
        if not job.done:
            with self._done:
                self._done.wait_for(lambda: job.done)
        if job.error is not None:
            raise job.error

    def close(self) -> None:
        """Return when all jobs have ended, and the thread waits for others."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.wait()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            self._do(job)
            del job

    def _do(self, job: Job) -> None:
        try:
            assert job.work is not None
            with nullcontext() if self._stream is None else self._there.on(self._stream):
                if job.after is not None:
                    self._stream.wait_event(job.after)
                job.work()
                if self._stream is not None:
                    self._stream.synchronize()
        except BaseException as error:
            job.error = error
        with self._done:
            job.done = True
            self._done.notify_all()


class StoreCopies:
    """Copies between a device and a store, which is opened at the first of them.

    Attributes:
        out: bytes that were copied out since `begin`.
        back: bytes that were copied back.
        waited: seconds of waiting for either.
    """

    def __init__(self, make: Callable[[], Store], device: torch.device) -> None:
        self._make, self._device = make, device
        self._store: Store | None = None
        self._writer, self._reader = Copier(device), Copier(device)
        self.begin()

    def begin(self) -> None:
        """Count from nothing again."""
        self.out = self.back = 0
        self.waited = 0.0

    def rest(self) -> None:
        """Finish all queued copies, and end the threads."""
        try:
            self._writer.close()
        finally:
            self._reader.close()

    def close(self) -> None:
        """End the threads, and close the store; its contents are lost."""
        try:
            self.rest()
        finally:
            store, self._store = self._store, None
            if store is not None:
                store.close()

    def _opened(self) -> Store:
        if self._store is None:
            self._store = self._make()
        return self._store
