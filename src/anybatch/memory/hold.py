"""Storages of waiting lanes: resident, offloaded, or being copied.

Copies are made by a thread while a lane computes (`anybatch.memory.copier`). Memory counts from
when it is taken until it is given back, so what is on its way is here. `anybatch.memory.pager`
decides what goes.

    HERE ──send──> LEAVING ──copied──> AWAY ──call──> COMING ──copied──> HERE
      ^                │ used              └────────────used─────────────^
      └────────────────┘
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from anybatch.core.rounding import rounded
from anybatch.memory.copier import Copier, Job
from anybatch.memory.meter import Meter
from anybatch.memory.stores import Store

HERE, LEAVING, AWAY, COMING = range(4)


class Held:
    """One storage of a lane.

    Attributes:
        storage: a weak reference; it is not kept alive here.
        size: bytes that its memory takes.
        nbytes: bytes that it holds.
        lane: whose it is.
        number: of the storages that this lane has made.
        used: the turn in which it was used last.
        state: HERE, LEAVING (being copied out), AWAY (without memory), COMING (being copied in).
        kept: a copy of its bytes is in the store, or on its way there.
        leaves: it was used while it was copied out; until that has ended, whoever lets go of it,
            its memory is there, so it counts with what waits.
        stays: it does not leave: more than one lane has used it, or its address is known.
        job: the copy that was started last, until it is known to have ended.
    """

    __slots__ = (
        *("job", "kept", "lane", "leaves", "nbytes", "number", "size", "state", "stays"),
        *("storage", "used"),
    )

    def __init__(self, storage: Any, nbytes: int, lane: int, number: int, used: int) -> None:
        self.storage, self.nbytes, self.lane, self.number = storage, nbytes, lane, number
        self.size = nbytes
        self.used, self.state = used, HERE
        self.kept = self.stays = self.leaves = False
        self.job: Job | None = None


class Hold:
    """Mover of storages out and in, with a count of the resident bytes that may be offloaded.

    Args:
        store: where they go.
        device: of the storages.
        meters: count what is here.

    Attributes:
        all: by the address of the storage.
        movable: those of them that have memory and may leave.
        here: bytes of these.
        going: those of them that are LEAVING.
        touched: those of them that were used in turn `since` or later.
        since: a turn.
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

    def add(self, key: int, storage: Any, size: int, lane: int, number: int, turn: int) -> None:
        """Take in a storage that a lane has made."""
        held = Held(weakref.ref(storage, partial(self._died, key)), size, lane, number, turn)
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
            if held.state == LEAVING:
                self._empty(key, held)
            elif held.state == COMING:
                held.state = HERE

    def stirred(self) -> bool:
        """Say whether there is something to settle."""
        return bool(self._dead or (self._moving and self._moving[0][2].done))

    def touch(self, key: int, held: Held, turn: int) -> None:
        """Record the use of a storage in a step phase, and make it resident."""
        if held.state == LEAVING and held.used < self.since:
            held.leaves = True
        if held.used < self.since and key in self.movable and not held.leaves:
            self.touched += held.size
        held.used = turn
        if held.state != HERE:
            self.bring_back(key, held)

    def send_away(self, key: int, held: Held) -> None:
        """Start to offload a storage; where a copy of it is stored, free its memory at once.

        Whoever has chosen it while it was on its way out may come when it is away.
        """
        storage = held.storage()
        if storage is None or held.state in (LEAVING, AWAY):
            return
        self._come(held)
        if not storage.resizable():
            self.stay(key, held)
            return
        if storage.nbytes() != held.nbytes:
            self.forget_copy(key, held)
            self._discount(key, held)
            held.nbytes = storage.nbytes()
            held.size = self.rounded(held.nbytes)
            self._count(key, held)
        if held.kept and held.job is None:
            self._empty(key, held)
            return
        if not held.kept:
            held.job = self._copier.start(self._store.writing(key, storage))
            held.kept = True
            self.moved += held.size
        assert held.job is not None
        held.state = LEAVING
        self.going += held.size
        self._moving.append((key, held, held.job))

    def wait(self) -> bool:
        """Wait for the first of those on their way; return False where none is leaving."""
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
        if storage is None or held.state != AWAY:
            return
        storage.resize_(held.nbytes)
        held.job = self._copier.start(self._store.reading(key, storage))
        held.state = COMING
        self._moving.append((key, held, held.job))
        self.moved += held.size
        self._count(key, held)
        self._metered(storage)

    def bring_back(self, key: int, held: Held) -> None:
        """Make a storage be here now."""
        if held.state == LEAVING:
            held.state = HERE
            self.going -= held.size
        elif held.state == COMING:
            self._come(held)
        elif held.state == AWAY:
            storage = held.storage()
            storage.resize_(held.nbytes)
            self._metered(storage)
            self._store.reading(key, storage)()
            self.moved += held.size
            held.state = HERE
            if not held.stays:
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

    def stay(self, key: int, held: Held) -> None:
        """Exclude a resident storage from offloading; it is not counted, so no copy may hold it."""
        held.stays = True
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
        if storage is None or not (held.state == AWAY or (held.state == COMING and failed)):
            return
        storage.resize_(held.nbytes)
        try:
            self._store.reading(key, storage)()
        except Exception:
            storage.fill_(0xFF)  # in every dtype with a fraction
            raise

    def _failed(self, key: int, held: Held) -> None:
        """Handle a failed copy: a storage going out is resident, one coming in is offloaded."""
        if held.state == COMING:
            self._empty(key, held)
        elif held.state == LEAVING:
            held.state = HERE
            self.going -= held.size
            self._drop(key, held)
        else:
            self._drop(key, held)

    def _drop(self, key: int, held: Held) -> None:
        if held.kept:
            self._store.drop(key)
            held.kept = False

    def _empty(self, key: int, held: Held) -> None:
        """Give the memory of a storage back."""
        storage = held.storage()
        self._discount(key, held)
        held.state = AWAY
        if storage is not None:
            storage.resize_(0)
            self._metered(storage)

    def _metered(self, storage: Any) -> None:
        for meter in self._meters:
            meter.resized(storage)

    def _come(self, held: Held) -> None:
        """Wait for a storage that is being copied in."""
        if held.state == COMING:
            assert held.job is not None
            self._copier.wait(held.job)
            held.job.work = None
            held.job, held.state = None, HERE

    def _free(self, key: int, held: Held) -> None:
        """Record the end of a copy out: a storage used meanwhile counts as used."""
        if held.leaves and held.used >= self.since and key in self.movable:
            self.touched += held.size
        held.leaves = False

    def _died(self, key: int, _watch: Any) -> None:
        self._dead.append(key)

    def _count(self, key: int, held: Held) -> None:
        """Count a resident storage that may be offloaded."""
        self.movable[key] = held
        self.here += held.size
        if held.used >= self.since and not held.leaves:
            self.touched += held.size

    def _discount(self, key: int, held: Held) -> None:
        """Remove a storage from the count: offloaded, gone, or excluded from offloading."""
        if self.movable.pop(key, None) is not None:
            self.here -= held.size
            if held.used >= self.since and not held.leaves:
                self.touched -= held.size
            if held.state == LEAVING:
                self.going -= held.size
