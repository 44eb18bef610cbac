"""Optimizer step in parts, one after another, with the state of the other parts offloaded.

part 1    read   step   write
part 2           read   step   write
part 3                  read   step   write       at most so many bytes of state in memory
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, optim

from anybatch.core import optimizers
from anybatch.core.optimizers import allocated, state_bound
from anybatch.core.units import show_bytes
from anybatch.errors import BudgetError, StoreError
from anybatch.memory.pager import BACK, OUT, Copies, MemoryPage
from anybatch.memory.stores import Store


def step_in_parts(
    optimizer: optim.Optimizer,
    inner: Callable[[Any], Any],
    mover: StateMover,
    resident_bytes: int,
    *,
    paged: bool = False,
) -> tuple[int, int]:
    """Step every parameter that has a gradient; all state is offloaded before and after.

    Args:
        optimizer: whose step it is.
        inner: the step itself, without hooks.
        mover: has its state.
        resident_bytes: bytes of state that may be in memory at a time.
        paged: parameters and gradients pass through as much other memory. Default False.

    Returns:
        ``(parts, bytes)``: how many there were, and the most bytes that were in memory at a time.

    Raises:
        BudgetError: the state of a single parameter needs more; nothing has changed.
        StoreError: there is no space for the state, and nothing has changed; or a write or a read
            has failed, and the parts before it are stepped.
    """
    send_all(optimizer, mover)
    mover.reset()
    size_of = partial(_size, optimizer, mover)
    parts = parts_of(optimizer, partial(widest, size_of) if paged else size_of, resident_bytes)
    mover.require_space(mover.offloaded_bytes + sum(part.size for part in parts))
    every = optimizer.param_groups
    through = _Through(optimizer, mover, resident_bytes)
    try:
        for part, coming in zip(parts, [*parts[1:], None], strict=True):
            through.bring(part, coming)
            optimizer.param_groups = part.groups(every)
            inner(optimizer)
            through.send(part)
        mover.settle(wait=sum(len(tensors) for _, tensors in through.leaving))
    finally:
        optimizer.param_groups = every
        mover.rest()
    return len(parts), through.most


def send_all(optimizer: optim.Optimizer, mover: StateMover) -> None:
    """Evict all resident state.

    Raises:
        StoreError: something was written to in its absence, or cannot be written.
    """
    mover.check(optimizer.state.values())
    here = sum(mover.size(state) for state in optimizer.state.values()) - mover.offloaded_bytes
    if here == 0:
        return
    mover.require_space(mover.offloaded_bytes + here)
    try:
        for state in optimizer.state.values():
            mover.settle(wait=len(mover.evict(state)))
    finally:
        mover.rest()


class _Through:
    """Resident parts of the state, and their prefetch and eviction.

    Attributes:
        most: bytes that were in memory at a time.
        leaving: bytes of each part that is being written, and its tensors.
    """

    def __init__(self, optimizer: optim.Optimizer, mover: StateMover, resident_bytes: int) -> None:
        self._optimizer, self._mover, self._resident_bytes = optimizer, mover, resident_bytes
        self.leaving: deque[tuple[int, list[Placeholder]]] = deque()
        self._ahead: StepPart | None = None
        self._held = self.most = 0

    def bring(self, part: StepPart, coming: StepPart | None) -> None:
        """Have the state of a part here, and that of the next one on its way."""
        if self._ahead is not part:
            while self._held + part.size > self._resident_bytes and self.leaving:
                self._mover.settle(wait=1)
                self._release()
            self._call(part)
        self._mover.settle()
        self._release()
        if coming is not None and self._held + coming.size <= self._resident_bytes:
            self._call(coming)
            self._ahead = coming
        for state in self._states(part):
            self._mover.arrive(state)

    def send(self, part: StepPart) -> None:
        """Evict the state of a part."""
        placeholders = [
            placeholder for state in self._states(part) for placeholder in self._mover.evict(state)
        ]
        self.leaving.append((part.size, placeholders))

    def _call(self, part: StepPart) -> None:
        self._held += part.size
        self.most = max(self.most, self._held)
        for state in self._states(part):
            self._mover.prefetch(state)

    def _release(self) -> None:
        while self.leaving and all(placeholder.job is None for placeholder in self.leaving[0][1]):
            self._held -= self.leaving.popleft()[0]

    def _states(self, part: StepPart) -> list[dict[Any, Any]]:
        held = self._optimizer.state
        return [held[p] for _, p in part.members if p in held]


def _size(
    optimizer: optim.Optimizer, mover: StateMover, group: dict[str, Any], parameter: Tensor
) -> int:
    """Return the bytes of a parameter's state, or a bound before it is made."""
    made = mover.size(optimizer.state[parameter]) if parameter in optimizer.state else 0
    return made or state_bound(optimizer, group, parameter)


# An optimizer's step in parts: the parameters of a part, and the bytes of their state.
#
# The parts go through memory one behind the other, so that three of them fit at a time:
#
#     part i-1 is written back │ part i is stepped │ part i+1 is read

AT_A_TIME = 3
"""Parts that are in memory while one is stepped: it, the one before it and the one behind it."""


@dataclass(frozen=True)
class StepPart:
    """Parameters that are stepped together.

    Attributes:
        members: ``(number of the group, parameter)``, in the order of the groups.
        size: bytes of their state, or a bound where it is not made yet.
    """

    members: tuple[tuple[int, Tensor], ...]
    size: int

    def groups(self, every: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the groups of an optimizer with only the parameters of this part."""
        found: dict[int, list[Tensor]] = {}
        for number, parameter in self.members:
            found.setdefault(number, []).append(parameter)
        return [{**every[number], "params": params} for number, params in found.items()]


def cut(sizes: Sequence[int], limit: int) -> list[range]:
    """Return consecutive parts of at most `limit` bytes each; a larger item is its own part.

    Args:
        sizes: of the items, in bytes.
        limit: bytes.

    Example:
        >>> cut([4, 4, 9, 1], 8)
        [range(0, 2), range(2, 3), range(3, 4)]
    """
    found, first, total = [], 0, 0
    for index, size in enumerate(sizes):
        if index > first and total + size > limit:
            found.append(range(first, index))
            first, total = index, 0
        total += size
    return [*found, range(first, len(sizes))] if sizes else []


def widest(
    size_of: Callable[[dict[str, Any], Tensor], int], group: dict[str, Any], parameter: Tensor
) -> int:
    """Return the bytes of a parameter's state, or of itself and its gradient if they are more."""
    gradient = allocated(parameter.grad) if parameter.grad is not None else 0
    return max(size_of(group, parameter), allocated(parameter) + gradient)


def parts_of(
    optimizer: optim.Optimizer,
    size_of: Callable[[dict[str, Any], Tensor], int],
    resident_bytes: int,
) -> list[StepPart]:
    """Return the parts of an optimizer's step; parameters without a gradient are in none.

    Args:
        optimizer: whose step it is.
        size_of: group and parameter -> bytes of its state.
        resident_bytes: bytes of state that may be in memory at a time.
    """
    members, sizes = [], []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.grad is not None:
                members.append((number, parameter))
                sizes.append(size_of(group, parameter))
    if max(sizes, default=0) > resident_bytes:
        shape = list(members[sizes.index(max(sizes))][1].shape)
        raise BudgetError(
            "the state of a parameter must fit in memory during its update, and that of one of "
            f"shape {shape} needs {show_bytes(max(sizes))}, and {show_bytes(resident_bytes)} is "
            f'there: give memory="{-(-max(sizes) // 1024)}KiB" or more',
            needed=max(sizes),
            budget=resident_bytes,
        )
    ranges = cut(sizes, resident_bytes // AT_A_TIME)
    return [StepPart(tuple(members[i] for i in one), sum(sizes[i] for i in one)) for one in ranges]


# Offloaded tensors of an optimizer's state, and their stand-ins.
#
# A storage that was emptied (`resize_(0)`) is unsafe for a tensor that a user may read: most
# kernels that read it end the process, and ``numpy()`` or a copy return arbitrary memory. So an
# offloaded tensor is replaced in the optimizer's own dictionary by one on the meta device, of the
# same shape: its print shows where it is, and a read of its values raises torch's error.
#
#     here ──evict──> writing (the tensor stays until the copy is complete) ──> a stand-in
#       ^                                                                         │
#       └───────arrive──────── reading (the copy stays until then) <────call──────┘
#
# So after any failure in between, every tensor is in the dictionary or complete in the store.


class StateMover(Copies):
    """Moves the state of parameters out and in; tensors elsewhere are not offloaded."""

    of, then = "an optimizer's state", "state that was not stored is still in memory"

    def __init__(self, make: Callable[[], Store], device: torch.device) -> None:
        super().__init__(make, device)
        self._placeholders: dict[int, Placeholder] = {}
        self._leaving: deque[Placeholder] = deque()

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
            source = compact(value)
            placeholder = Placeholder(state, name, self.key(), source.stride())
            self.start(OUT, placeholder, source.untyped_storage())
            self._leaving.append(placeholder)
            found.append(placeholder)
        return found

    def settle(self, *, wait: int = 0) -> None:
        """Replace the tensors with complete copies by stand-ins.

        Args:
            wait: for so many of those under way, the first ones first. Default 0.
        """
        while self._leaving:
            placeholder, job = self._leaving[0], self._leaving[0].job
            if wait <= 0 and (job is None or not job.done):
                return
            wait -= 1
            try:
                self.finish(placeholder)
            except BaseException:
                if job is not None and job.done:
                    self._forget(self._leaving.popleft())
                raise
            self._leaving.popleft()
            self._gone(placeholder)

    def prefetch(self, state: State) -> None:
        """Prefetch the offloaded tensors of a state."""
        for value in state.values():
            placeholder = self._of(value)
            if placeholder is not None and placeholder.job is None:
                placeholder.tensor = placeholder.empty()
                self.start(BACK, placeholder, placeholder.tensor.untyped_storage())

    def arrive(self, state: State) -> None:
        """Have all of a state here."""
        self.prefetch(state)
        for name, value in list(state.items()):
            placeholder = self._of(value)
            if placeholder is None:
                continue
            self.finish(placeholder)
            assert placeholder.tensor is not None
            state[name] = placeholder.tensor
            del self._placeholders[id(value)]
            self._forget(placeholder)

    def copied(self, state: State) -> State:
        """Return a state with all of it in memory; the offloaded tensors remain offloaded."""
        found = dict(state)
        for name, value in state.items():
            placeholder = self._of(value)
            if placeholder is not None:
                tensor = placeholder.empty()
                self.copy(BACK, placeholder, tensor.untyped_storage())
                found[name] = tensor
        return found

    def check(self, states: Iterable[State]) -> None:
        """Require that the stand-ins of offloaded tensors are in place and unchanged.

        Entries that were replaced or removed are dropped.
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

    def rest(self) -> None:
        """Finish all queued copies, and end the threads; tensors with failed copies remain."""
        super().rest()
        while self._leaving:
            placeholder = self._leaving.popleft()
            if placeholder.job is not None and placeholder.job.error is None:
                self._gone(placeholder)
            else:
                self._forget(placeholder)
        for placeholder in self._placeholders.values():  # called, and not wanted any more
            placeholder.job = None
            self.empty(placeholder)

    def close(self) -> None:
        """End the threads, and close the store; its contents are lost."""
        try:
            super().close()
        finally:
            self._placeholders.clear()

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
        tensor, placeholder.job = placeholder.tensor, None
        stands = placeholder.state.get(placeholder.name) is tensor
        if tensor is not None and stands and tensor._version == placeholder.version:
            self._placeholders[id(placeholder.stand_in)] = placeholder
            self.empty(placeholder)
        else:
            self._forget(placeholder)

    def _forget(self, placeholder: Placeholder) -> None:
        placeholder.job = placeholder.tensor = None
        self.drop(placeholder)


# Offloaded tensor of an optimizer's state, its stand-in, and the errors where it is missing.

WRITTEN = (
    "an optimizer's state must not be written to while it is offloaded, and the placeholder of a "
    "part of it was: the write is lost. Write between back() and a new offload_states(), or "
    "replace the tensor by another"
)
STORE_CLOSED = (
    "an optimizer's state must be resident or in its store, and the store was closed: load a "
    "state with optimizer.load_state_dict(), or call back() instead of close() to keep it"
)

State = dict[Any, Any]
"""An optimizer's state of one parameter: name -> tensor or number."""


class Placeholder(MemoryPage):
    """Offloaded tensor, or one on its way, and the meta tensor in its place.

    Attributes:
        state: where it stands.
        name: under this name.
        stand_in: a tensor of the same shape on the meta device.
        tensor: it, while it is written or read; else None.
        version: its count of writes when its eviction began.
    """

    __slots__ = ("device", "name", "stand_in", "state", "tensor", "version")

    def __init__(self, state: State, name: Any, key: int, stride: tuple[int, ...]) -> None:
        tensor: Tensor = state[name]
        super().__init__(key, tensor.nbytes)
        self.state, self.name = state, name
        self.device, self.version = tensor.device, tensor._version
        self.stand_in = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device="meta")
        self.tensor: Tensor | None = tensor

    def let_go(self) -> None:
        """Replace the tensor by its stand-in in the optimizer's dictionary."""
        if self.tensor is not None and self.state.get(self.name) is self.tensor:
            self.state[self.name] = self.stand_in
        self.tensor = None

    def empty(self) -> Tensor:
        """Return an empty tensor like it, made by a kernel that dispatch modes can count."""
        like = self.stand_in
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self.device)


def compact(tensor: Tensor) -> Tensor:
    """Return a tensor, or a copy where its storage holds more than it."""
    exact = tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.storage_offset() == 0
    return tensor if exact else tensor.clone()
