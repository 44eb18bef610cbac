"""Offloaded tensors of an optimizer's state, and their stand-ins.

A storage that was emptied (`resize_(0)`) is unsafe for a tensor that a user may read: most kernels
that read it end the process, and ``numpy()`` or a copy return arbitrary memory. So an offloaded
tensor is replaced in the optimizer's own dictionary by one on the meta device, of the same shape:
its print shows where it is, and a read of its values raises torch's error.

    here ──evict──> writing (the tensor stays until the copy is complete) ──> a stand-in
      ^                                                                         │
      └───────arrive──────── reading (the copy stays until then) <────call──────┘

So after any failure in between, every tensor is in the dictionary or complete in the store.
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
from anybatch.memory.stores import Store, require_space, space_of
from anybatch.offload.states.placeholder import (
    STATE,
    STORE_CLOSED,
    WRITTEN,
    Placeholder,
    State,
    compact,
    state_errors,
)


class StateMover:
    """Moves the state of parameters out and in.

    Args:
        make: returns a store, called at the first eviction.
        device: of the tensors; others are not offloaded.

    Attributes:
        out: bytes that were copied out since `begin`.
        back: bytes that were copied back.
        waited: seconds in which the step waited for either.
    """

    def __init__(self, make: Callable[[], Store], device: torch.device) -> None:
        self._make, self._device = make, device
        self._store: Store | None = None
        self._writer, self._reader = Copier(device), Copier(device)
        self._placeholders: dict[int, Placeholder] = {}
        self._leaving: deque[Placeholder] = deque()
        self._keys = 0
        self.begin()

    def begin(self) -> None:
        """Count from nothing again."""
        self.out = self.back = 0
        self.waited = 0.0

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that have left, or are being read."""
        return sum(one.size for one in self._placeholders.values())

    def size(self, state: State) -> int:
        """Return the bytes of a state that move."""
        placeholders = (self._of(value) for value in state.values())
        moving = sum(one.size for one in placeholders if one is not None)
        return moving + sum(int(v.nbytes) for v in state.values() if self._moves(v))

    def evict(self, state: State) -> list[Placeholder]:
        """Begin to copy a state out; its tensors remain until `settle` finds complete copies."""
        found = []
        for name, value in state.items():
            if not self._moves(value):
                continue
            self._keys += 1
            source = compact(value)
            placeholder = Placeholder(state, name, self._keys, source.stride())
            with state_errors("written to"):
                work = self._opened().writing(placeholder.key, source.untyped_storage())
            placeholder.job = self._writer.start(work)
            self.out += placeholder.size
            self._leaving.append(placeholder)
            found.append(placeholder)
        return found

    def settle(self, *, wait: int = 0) -> None:
        """Replace the tensors with complete copies by stand-ins.

        Args:
            wait: for so many of those under way, the first ones first. Default 0.

        Raises:
            StoreError: a copy has failed; its tensor is where it was.
        """
        while self._leaving and (wait > 0 or _done(self._leaving[0])):
            placeholder, wait = self._leaving[0], wait - 1
            job = placeholder.job
            assert job is not None
            try:
                with state_errors("written to"):
                    self._wait(self._writer, job)
            except BaseException:
                if job.done:
                    self._forget(self._leaving.popleft())
                raise
            self._leaving.popleft()
            self._gone(placeholder)

    def call(self, state: State) -> None:
        """Prefetch the offloaded tensors of a state."""
        for value in state.values():
            placeholder = self._of(value)
            if placeholder is not None and placeholder.job is None:
                placeholder.tensor = placeholder.empty()
                with state_errors("read from"):
                    work = self._opened().reading(
                        placeholder.key, placeholder.tensor.untyped_storage()
                    )
                placeholder.job = self._reader.start(work)

    def arrive(self, state: State) -> None:
        """Have all of a state here."""
        self.call(state)
        for name, value in list(state.items()):
            placeholder = self._of(value)
            if placeholder is None:
                continue
            assert placeholder.job is not None
            with state_errors("read from"):
                self._wait(self._reader, placeholder.job)
            assert placeholder.tensor is not None
            state[name] = placeholder.tensor
            self.back += placeholder.size
            del self._placeholders[id(value)]
            self._forget(placeholder)

    def copied(self, state: State) -> State:
        """Return a state with all of it in memory; the offloaded tensors remain offloaded."""
        found = dict(state)
        for name, value in state.items():
            placeholder = self._of(value)
            if placeholder is not None:
                tensor = placeholder.empty()
                with state_errors("read from"):
                    self._opened().reading(placeholder.key, tensor.untyped_storage())()
                found[name] = tensor
        return found

    def check(self, states: Iterable[State]) -> None:
        """Require that the stand-ins of offloaded tensors are in place and unchanged.

        Entries that were replaced or removed are dropped.

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
                    raise StoreError(STORE_CLOSED)
        for key in self._placeholders.keys() - found:
            self._forget(self._placeholders.pop(key))

    def require_space(self, size: int) -> None:
        """Require capacity for so many bytes in the store, where it can be checked in advance.

        Raises:
            StoreError: it has not.
        """
        if size == 0:
            return
        with state_errors("opened"):
            space = space_of(self._opened())
        require_space(size, space, of=STATE)

    def rest(self) -> None:
        """Finish all queued copies, and end the threads; tensors with failed copies remain."""
        try:
            self._writer.close()
        finally:
            self._reader.close()
        while self._leaving:
            placeholder = self._leaving.popleft()
            if placeholder.job is not None and placeholder.job.error is None:
                self._gone(placeholder)
            else:
                self._forget(placeholder)
        for placeholder in self._placeholders.values():  # called, and not wanted any more
            placeholder.job = placeholder.tensor = None

    def close(self) -> None:
        """End the threads, and close the store; its contents are lost."""
        try:
            self.rest()
        finally:
            self._placeholders.clear()
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

    def _of(self, value: Any) -> Placeholder | None:
        """Return the offloaded tensor behind a stand-in; None for other values."""
        found = self._placeholders.get(id(value))
        return found if found is not None and found.stand_in is value else None

    def _gone(self, placeholder: Placeholder) -> None:
        """Replace a copied tensor by its stand-in, unless it was changed during the copy."""
        tensor = placeholder.tensor
        placeholder.job = placeholder.tensor = None
        if tensor is not None and self._unchanged(placeholder, tensor):
            self._placeholders[id(placeholder.stand_in)] = placeholder
            placeholder.state[placeholder.name] = placeholder.stand_in
        else:
            self._forget(placeholder)

    @staticmethod
    def _unchanged(placeholder: Placeholder, tensor: Tensor) -> bool:
        return (
            placeholder.state.get(placeholder.name) is tensor
            and tensor._version == placeholder.version
        )

    def _forget(self, placeholder: Placeholder) -> None:
        placeholder.job = placeholder.tensor = None
        if self._store is not None:
            self._store.drop(placeholder.key)

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


def _done(placeholder: Placeholder) -> bool:
    return placeholder.job is not None and placeholder.job.done
