"""Pager: pages of bytes that are on the device, in a store, or on their way; their copies, a table.

`Copies` moves pages of any owner, with a thread for each way, and has the one wait for a copy.
Device memory is given up in one place, `Copies.empty`, and only with a complete copy; a step that
has failed drops its saved tensors. `Pager` adds the table of pages, and has the one loop that
evicts. Memory counts from when it is allocated until it is freed, so a storage that is being copied
is resident. Owners give the order of next use, in which pages are evicted and prefetched:

    lanes         `anybatch.memory.lane_pager`      as the first lane has used them in a segment
    parameters    `anybatch.offloading.parameters`  as the step before has used them
    saved tensors `anybatch.offloading.mover`       as the course of a recorded step has them
    states        `anybatch.offloading.state_mover` in parts, as the optimizer steps

    RESIDENT ─evict─> EVICTING ─copied─> OFFLOADED ─fetch─> PREFETCHING ─copied─> RESIDENT
      ^                   │ used             └────────────────used─────────────────^
      └───────────────────┘
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import torch

from anybatch.core import accelerator, threads
from anybatch.core.optimizers import rounded
from anybatch.core.transaction import uninterrupted
from anybatch.errors import StoreError
from anybatch.memory.meter import Meter
from anybatch.memory.stores import FileStore, Store, require_space

OUT, BACK = range(2)
"""The two ways of a copy: from the device to the store, and back."""

WORDS = ("written to", "read from")


class MemoryPage:
    """Bytes of one owner that move together.

    Attributes:
        key: its name in the store.
        size: bytes that it takes on the device.
        has_copy: a copy of its bytes is in the store, or on its way there.
        job: the copy that was started last, until its end was noticed.
    """

    __slots__ = ("has_copy", "job", "key", "size")

    def __init__(self, key: int, size: int) -> None:
        self.key, self.size, self.has_copy = key, size, False
        self.job: Job | None = None

    @property
    def restorable(self) -> bool:
        """Return whether its bytes are complete elsewhere."""
        return self.has_copy and self.job is None

    def let_go(self) -> None:
        """Give up the device memory; only `Copies.empty` calls this."""
        raise NotImplementedError


class Copies:
    """Copies between a device and a store, which is opened at the first of them.

    A thread writes and another reads, so that both directions are used at once. Only the thread
    that needs them allocates and frees memory.

    Attributes:
        of: contents of the store, in words; without them errors of the system are as they are.
        then: consequence of an error, in words.
        otherwise: other remedy than free space, in words.
        bytes: numbers of bytes that were copied out and back since `reset`.
        waited: seconds of waiting for either.
    """

    of = then = ""
    otherwise = "or name another folder (store=)"

    def __init__(
        self, make: Callable[[], Store], device: torch.device, *, ordered: bool = False
    ) -> None:
        self._make, self._device = make, device
        self._store: Store | None = None
        self._keys = 0
        writer = Copier(device)
        self._copiers = writer, writer if ordered else Copier(device)
        self.reset()

    def reset(self) -> None:
        """Count from nothing again."""
        self.bytes = [0, 0]
        self.waited = 0.0

    @property
    def moved(self) -> int:
        """Bytes that were copied out and back."""
        return sum(self.bytes)

    def key(self) -> int:
        """Return a name that nothing in the store has had."""
        self._keys += 1
        return self._keys

    def ready(self) -> None:
        """Start the threads that copy, while there is memory for them."""
        for copier in self._copiers:
            copier.begin()

    def start(self, way: int, page: MemoryPage, storage: Any) -> Job:
        """Begin to copy a page out of a storage, or back into it, after all earlier copies."""
        job = self._copiers[way].start(self._work(way, page, storage))
        job.way = way
        page.job, page.has_copy = job, True
        self.bytes[way] += page.size
        return job

    def copy(self, way: int, page: MemoryPage, storage: Any) -> None:
        """Copy now, in this thread."""
        with self.errors(WORDS[way]):
            self._work(way, page, storage)()
        page.has_copy = True

    def finish(self, page: MemoryPage) -> None:
        """Wait for the copy of a page that is under way, and let go of the storage that it holds.

        After a copy that failed the page is not restorable, until its owner has dropped it.
        """
        if page.job is not None:
            self.join(page.job)
            page.job = None

    def join(self, job: Job) -> None:
        """Wait for the end of a copy, and let go of the storage that it holds."""
        start = perf_counter()
        try:
            with self.errors(WORDS[job.way]):
                self._copiers[job.way].wait(job)
        finally:
            self.waited += perf_counter() - start
            if job.done:
                job.work = None

    def empty(self, page: MemoryPage) -> None:
        """Give up the device memory of a page, the only place where that is done.

        Its bytes must be complete elsewhere.
        """
        assert page.restorable
        page.let_go()

    def drop(self, page: MemoryPage) -> None:
        """Drop the copy of a page, if there is one."""
        if page.has_copy and self._store is not None:
            self._store.drop(page.key)
        page.has_copy = False

    def require_space(self, size: int) -> None:
        """Require capacity for so many bytes in the store, where it can be checked in advance."""
        if size:
            with self.errors("opened"):
                store = self._opened()
                space = store.space() if isinstance(store, FileStore) else None
            require_space(size, space, of=self.of, otherwise=self.otherwise)

    @contextmanager
    def errors(self, action: str) -> Iterator[None]:
        """Explain an error of the system in the body; the store could not be `action`."""
        try:
            yield
        except OSError as error:
            if isinstance(error, StoreError) or not self.of:
                raise
            raise StoreError(
                f"{self.of} must be stored, and its store could not be {action} ({error}): free "
                f"space there, or name another folder (store=); {self.then}"
            ) from error

    def rest(self) -> None:
        """Finish all queued copies, and end the threads."""
        writer, reader = self._copiers
        try:
            writer.close()
        finally:
            reader.close()

    def close(self) -> None:
        """End the threads, and close the store; its contents are lost."""
        try:
            self.rest()
        finally:
            store, self._store = self._store, None
            if store is not None:
                store.close()

    def _work(self, way: int, page: MemoryPage, storage: Any) -> Callable[[], None]:
        with self.errors(WORDS[way]):
            store = self._opened()
            return (store.writing, store.reading)[way](page.key, storage)

    def _opened(self) -> Store:
        if self._store is None:
            self._store = self._make()
        return self._store


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
        way: OUT or BACK.
    """

    __slots__ = ("after", "done", "error", "way", "work")

    def __init__(self, work: Callable[[], None], after: Any) -> None:
        self.work: Callable[[], None] | None = work
        self.after, self.way = after, OUT
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
                self._thread = threads.start_task(self._run, small=self._there.host)

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


RESIDENT, EVICTING, OFFLOADED, PREFETCHING = range(4)


class Held(MemoryPage):
    """One storage of a lane, or of a parameter or gradient; its key is its address.

    Attributes:
        storage: a weak reference, which does not keep it alive.
        nbytes: bytes that it holds.
        lane: whose it is.
        number: of the storages that this lane has made.
        used: the segment in which it was used last.
        state: RESIDENT, EVICTING (being copied out), OFFLOADED or PREFETCHING (being copied in).
        used_while_leaving: it was used while it was copied out; until that has ended its memory
            exists, even if it is dropped, so it counts as waiting.
        pinned: it is never evicted: more than one lane has used it, or its address was read.
    """

    __slots__ = (
        "lane", "nbytes", "number", "pinned", "state", "storage", "used", "used_while_leaving",
    )  # fmt: skip

    def __init__(
        self, key: int, storage: Any, nbytes: int, lane: int, number: int, used: int
    ) -> None:
        super().__init__(key, nbytes)
        self.storage, self.nbytes, self.lane, self.number = storage, nbytes, lane, number
        self.used, self.state = used, RESIDENT
        self.pinned = self.used_while_leaving = False

    def let_go(self) -> None:
        """Resize the storage to nothing, where it still lives."""
        storage = self.storage()
        if storage is not None:
            storage.resize_(0)


class Pager(Copies):
    """Storages that retain their owners while their memory is freed, and a count of these bytes.

    Attributes:
        all: by the address of the storage.
        numbered: by lane and number.
        movable: those of them that have memory and may be evicted.
        here: bytes of these.
        pinned: bytes of the others that live.
        going: those of them that are EVICTING.
        touched: those of them that were used in segment `since` or later.
        since: a segment.
    """

    def __init__(self, store: Store, device: torch.device, meters: Sequence[Meter]) -> None:
        super().__init__(lambda: store, device, ordered=True)
        self.all: dict[int, Held] = {}
        self.movable: dict[int, Held] = {}
        self.here = self.pinned = self.going = self.touched = self.since = 0
        self._store, self._meters = store, meters
        self.numbered: dict[tuple[int, int], Held] = {}
        self._dead: deque[int] = deque()
        self._moving: deque[tuple[Held, Job]] = deque()

    def register(
        self, key: int, storage: Any, size: int, lane: int, number: int, segment: int
    ) -> None:
        """Take in a storage that a lane has made."""
        died = weakref.ref(storage, lambda _: self._dead.append(key))
        held = self.all[key] = Held(key, died, size, lane, number, segment)
        held.size = rounded(size, self._device)
        self.numbered[lane, number] = held
        self._count(held)

    def settle(self) -> None:
        """Remove dead storages, and free the memory of those that were copied out."""
        while self.stirred():  # what a copy has held may die with it
            while self._dead:  # the garbage collector may come in the middle of anything
                self._bury(self._dead.popleft())
            while self._moving and self._moving[0][1].done:
                self._moved(*self._moving.popleft())

    def _bury(self, key: int) -> None:
        held = self.all.pop(key, None)
        if held is not None:
            self.numbered.pop((held.lane, held.number), None)
            self.pinned -= held.size if held.pinned else 0
            self._discount(held)
            self.forget_copy(held)

    def _moved(self, held: Held, job: Job) -> None:
        """Take in that a copy has ended; after one that failed, its bytes are where they were."""
        job.work = None  # with what it holds: here, where the bytes are counted
        if held.job is not job:
            return
        self._copied_out(held)
        try:
            self.finish(held)
        except BaseException:
            held.job = None
            if held.state == PREFETCHING:
                self._empty(held)
            else:
                self.bring_back(held)
                self.drop(held)
            raise
        if held.state == EVICTING:
            self._empty(held)
        elif held.state == PREFETCHING:
            held.state = RESIDENT

    def stirred(self) -> bool:
        """Say whether there is something to settle."""
        return bool(self._dead or (self._moving and self._moving[0][1].done))

    def touch(self, held: Held, segment: int) -> None:
        """Record the use of a storage in a segment, and make it resident."""
        if held.state == EVICTING and held.used < self.since:
            held.used_while_leaving = True
        if held.used < self.since and held.key in self.movable and not held.used_while_leaving:
            self.touched += held.size
        held.used = segment
        if held.state != RESIDENT:
            self.bring_back(held)

    def evict(self, held: Held) -> None:
        """Start to offload a storage; where a copy of it is stored, free its memory at once.

        It may be chosen while it is on its way out, and be offloaded by then.
        """
        storage = held.storage()
        if storage is None or held.state in (EVICTING, OFFLOADED):
            return
        self.bring_back(held)  # where a copy brings it
        if not storage.resizable():
            self.pin(held)
            return
        if storage.nbytes() != held.nbytes:
            self.forget_copy(held)
            self._discount(held)
            held.nbytes = storage.nbytes()
            held.size = rounded(held.nbytes, self._device)
            self._count(held)
        if held.restorable:
            self._empty(held)
            return
        if not held.has_copy:
            self.start(OUT, held, storage)
        assert held.job is not None
        held.state = EVICTING
        self.going += held.size
        self._moving.append((held, held.job))

    def shrink(
        self, count: Callable[[], int], order: Iterable[Held], wanted: int, limit: float
    ) -> None:
        """Evict in an order until `count` is to be `wanted` bytes; wait until it is `limit`."""
        if count() - self.going > wanted:
            for held in order:
                self.evict(held)
                if count() - self.going <= wanted:
                    break
        while count() > limit and self.wait():
            pass

    def wait(self) -> bool:
        """Wait for the first eviction in progress; return False where there is none."""
        if not self.going:
            return False
        try:
            self.join(self._moving[0][1])
        finally:
            self.settle()
        return True

    def prefetch(self, held: Held) -> None:
        """Begin to move a storage in."""
        storage = held.storage()
        if storage is None or held.state != OFFLOADED:
            return
        storage.resize_(held.nbytes)
        self._moving.append((held, self.start(BACK, held, storage)))
        held.state = PREFETCHING
        self._count(held)
        self._metered(storage)

    def bring_back(self, held: Held) -> None:
        """Make a storage be here now."""
        if held.state == EVICTING:
            held.state = RESIDENT
            self.going -= held.size
        elif held.state == PREFETCHING:
            self.finish(held)
            held.state = RESIDENT
        elif held.state == OFFLOADED:
            storage = held.storage()
            storage.resize_(held.nbytes)
            self._metered(storage)
            self.copy(BACK, held, storage)
            self.bytes[BACK] += held.size
            held.state = RESIDENT
            self._count(held)

    def forget_copy(self, held: Held) -> None:
        """Drop the copy of a storage that is written to, or has died."""
        try:
            self.finish(held)
        finally:
            held.job = None
            self._copied_out(held)
            self.drop(held)

    def pin(self, held: Held) -> None:
        """Exclude a resident storage from offloading; it is not counted, so no copy may hold it."""
        if held.pinned:
            return
        held.pinned = True
        self.pinned += held.size
        self.forget_copy(held)
        self._discount(held)

    def release(self, key: int) -> None:
        """Make a storage resident, and stop tracking it: another owner moves it from now on."""
        if key in self.all:
            self.bring_back(self.all[key])
            self._bury(key)

    def close(self) -> None:
        """Make all live storages resident, and stop tracking them; unreadable ones become NaN."""
        with ExitStack() as stack:
            for end in (super().close, self.movable.clear, self.all.clear):
                stack.callback(end)
            for held in reversed(self.all.values()):
                stack.callback(self._return, held)
            stack.callback(self._moving.clear)
            self.rest()

    def _return(self, held: Held) -> None:
        """Bring a storage back where it has no memory."""
        storage = held.storage()
        failed = held.job is not None and held.job.error is not None
        if storage is None or not (
            held.state == OFFLOADED or (held.state == PREFETCHING and failed)
        ):
            return
        storage.resize_(held.nbytes)
        try:
            self.copy(BACK, held, storage)
        except BaseException:
            storage.fill_(0xFF)  # in every dtype with a fraction
            raise

    def _empty(self, held: Held) -> None:
        """Give the memory of a storage back."""
        self._discount(held)
        held.state = OFFLOADED
        self.empty(held)
        if (storage := held.storage()) is not None:
            self._metered(storage)

    def _metered(self, storage: Any) -> None:
        for meter in self._meters:
            meter.resized(storage)

    def _copied_out(self, held: Held) -> None:
        """Record the end of a copy out: a storage used meanwhile counts as used."""
        if held.used_while_leaving and held.used >= self.since and held.key in self.movable:
            self.touched += held.size
        held.used_while_leaving = False

    def _count(self, held: Held) -> None:
        """Count a resident storage that may be offloaded."""
        self.movable[held.key] = held
        self.here += held.size
        if held.used >= self.since and not held.used_while_leaving:
            self.touched += held.size

    def _discount(self, held: Held) -> None:
        """Remove a storage from the count: offloaded, gone, or excluded from offloading."""
        if self.movable.pop(held.key, None) is not None:
            self.here -= held.size
            if held.used >= self.since and not held.used_while_leaving:
                self.touched -= held.size
            if held.state == EVICTING:
                self.going -= held.size
