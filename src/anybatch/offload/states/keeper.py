"""Offloaded tensors of an optimizer's state, and their stand-ins.

A storage that was emptied (`resize_(0)`) is no place for what a person may look at: most kernels
that read it end the process, and ``numpy()`` or a copy return whatever lies there. So a tensor that
has left is replaced in the optimizer's own dictionary by one on the meta device, of the same shape:
it says where it is when printed, and whoever wants a value of it gets torch's error.

    here ──leave──> writing (the tensor stays until the copy is whole) ──> away (a stand-in)
      ^                                                                      │
      └───────arrive─────── reading (the copy stays until then) <────call────┘

So whatever fails in between, every tensor is in the dictionary or whole in the store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from anybatch.core import optimizers
from anybatch.errors import StoreError
from anybatch.memory.copier import Copier, Job
from anybatch.memory.stores import Store, require_room, room_of
from anybatch.offload.states.away import GIVEN_UP, STATE, WRITTEN, Away, State, told, whole


class Keeper:
    """Moves the state of parameters out and in.

    Args:
        make: returns a store, when something leaves for the first time.
        device: of the tensors; others stay.

    Attributes:
        out: bytes that were copied out since `begin`.
        back: bytes that were copied back.
        waited: seconds in which the step waited for either.
    """

    def __init__(self, make: Callable[[], Store], device: torch.device) -> None:
        self._make, self._device = make, device
        self._store: Store | None = None
        self._writer, self._reader = Copier(device), Copier(device)
        self._away: dict[int, Away] = {}
        self._leaving: deque[Away] = deque()
        self._keys = 0
        self.begin()

    def begin(self) -> None:
        """Count from nothing again."""
        self.out = self.back = 0
        self.waited = 0.0

    @property
    def away(self) -> int:
        """Bytes that have left, or are being read."""
        return sum(one.size for one in self._away.values())

    def size(self, state: State) -> int:
        """Return the bytes of a state that move."""
        known = (self._of(value) for value in state.values())
        moving = sum(one.size for one in known if one is not None)
        return moving + sum(int(v.nbytes) for v in state.values() if self._moves(v))

    def leave(self, state: State) -> list[Away]:
        """Begin to copy a state out; its tensors remain until `settle` finds complete copies."""
        found = []
        for name, value in state.items():
            if not self._moves(value):
                continue
            self._keys += 1
            alone = whole(value)
            away = Away(state, name, self._keys, alone.stride())
            with told("written to"):
                work = self._opened().writing(away.key, alone.untyped_storage())
            away.job = self._writer.start(work)
            self.out += away.size
            self._leaving.append(away)
            found.append(away)
        return found

    def settle(self, *, wait: int = 0) -> None:
        """Replace the tensors with complete copies by stand-ins.

        Args:
            wait: for so many of those under way, the first ones first. Default 0.

        Raises:
            StoreError: a copy has failed; its tensor is where it was.
        """
        while self._leaving and (wait > 0 or _done(self._leaving[0])):
            away, wait = self._leaving[0], wait - 1
            job = away.job
            assert job is not None
            try:
                with told("written to"):
                    self._wait(self._writer, job)
            except BaseException:
                if job.done:
                    self._forget(self._leaving.popleft())
                raise
            self._leaving.popleft()
            self._gone(away)

    def call(self, state: State) -> None:
        """Prefetch the offloaded tensors of a state."""
        for value in state.values():
            away = self._of(value)
            if away is not None and away.job is None:
                away.tensor = away.empty()
                with told("read from"):
                    work = self._opened().reading(away.key, away.tensor.untyped_storage())
                away.job = self._reader.start(work)

    def arrive(self, state: State) -> None:
        """Have all of a state here."""
        self.call(state)
        for name, value in list(state.items()):
            away = self._of(value)
            if away is None:
                continue
            assert away.job is not None
            with told("read from"):
                self._wait(self._reader, away.job)
            assert away.tensor is not None
            state[name] = away.tensor
            self.back += away.size
            del self._away[id(value)]
            self._forget(away)

    def copied(self, state: State) -> State:
        """Return a state with all of it in memory; the offloaded tensors remain offloaded."""
        found = dict(state)
        for name, value in state.items():
            away = self._of(value)
            if away is not None:
                tensor = away.empty()
                with told("read from"):
                    self._opened().reading(away.key, tensor.untyped_storage())()
                found[name] = tensor
        return found

    def check(self, states: Iterable[State]) -> None:
        """Require that the stand-ins of offloaded tensors are in place and unchanged.

        What was replaced or removed is forgotten.

        Raises:
            StoreError: a stand-in was written to, or one stands there whose store is closed.
        """
        found = set()
        for state in states:
            for value in state.values():
                if self._of(value) is not None:
                    found.add(id(value))
                    if value._version:
                        raise StoreError(WRITTEN)
                elif isinstance(value, Tensor) and value.is_meta:
                    raise StoreError(GIVEN_UP)
        for key in self._away.keys() - found:
            self._forget(self._away.pop(key))

    def require_room(self, size: int) -> None:
        """Require capacity for so many bytes in the store, where it can be checked in advance.

        Raises:
            StoreError: it has not.
        """
        if size == 0:
            return
        with told("opened"):
            room = room_of(self._opened())
        require_room(size, room, of=STATE)

    def rest(self) -> None:
        """Finish all queued copies, and end the threads; tensors with failed copies remain."""
        try:
            self._writer.close()
        finally:
            self._reader.close()
        while self._leaving:
            away = self._leaving.popleft()
            if away.job is not None and away.job.error is None:
                self._gone(away)
            else:
                self._forget(away)
        for away in self._away.values():  # called, and not wanted any more
            away.job = away.tensor = None

    def close(self) -> None:
        """End the threads, and close the store; its contents are lost."""
        try:
            self.rest()
        finally:
            self._away.clear()
            store, self._store = self._store, None
            if store is not None:
                store.close()

    def _moves(self, value: Any) -> bool:
        """Return whether a value of a state is a tensor that may be offloaded."""
        return (
            isinstance(value, Tensor)
            and value.device.type == self._device.type
            and value.layout == torch.strided
            and int(value.nbytes) >= optimizers.SMALL
        )

    def _of(self, value: Any) -> Away | None:
        """Return the offloaded tensor behind a stand-in; None for other values."""
        found = self._away.get(id(value))
        return found if found is not None and found.stand_in is value else None

    def _gone(self, away: Away) -> None:
        """Replace a copied tensor by its stand-in, unless it was changed during the copy."""
        tensor = away.tensor
        away.job = away.tensor = None
        if tensor is not None and self._unchanged(away, tensor):
            self._away[id(away.stand_in)] = away
            away.state[away.name] = away.stand_in
        else:
            self._forget(away)

    @staticmethod
    def _unchanged(away: Away, tensor: Tensor) -> bool:
        return away.state.get(away.name) is tensor and tensor._version == away.version

    def _forget(self, away: Away) -> None:
        away.job = away.tensor = None
        if self._store is not None:
            self._store.drop(away.key)

    def _opened(self) -> Store:
        if self._store is None:
            self._store = self._make()
        return self._store

    def _wait(self, copier: Copier, job: Job) -> None:
        start = perf_counter()
        try:
            copier.wait(job)
        finally:
            self.waited += perf_counter() - start
            if job.done:
                job.work = None  # with the storage that it holds


def _done(away: Away) -> bool:
    return away.job is not None and away.job.done
