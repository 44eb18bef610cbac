"""Optimizer step in parts, one after another, with the state of the other parts offloaded.

part 1    read   step   write
part 2           read   step   write
part 3                  read   step   write       at most `room` bytes of state in memory
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, optim

from anybatch.core.optimizers import state_bound
from anybatch.offload.states.away import Away
from anybatch.offload.states.keeper import Keeper
from anybatch.offload.states.parts import Part, parts_of, widest


def step_in_parts(
    optimizer: optim.Optimizer,
    inner: Callable[[Any], Any],
    keeper: Keeper,
    room: int,
    *,
    paged: bool = False,
) -> tuple[int, int]:
    """Step every parameter that has a gradient; all state is offloaded before and after.

    Args:
        optimizer: whose step it is.
        inner: the step itself, without hooks.
        keeper: has its state.
        room: bytes of state that may be in memory at a time.
        paged: parameters and gradients pass through as much memory beside it. Default False.

    Returns:
        ``(parts, bytes)``: how many there were, and the most bytes that were in memory at a time.

    Raises:
        BudgetError: the state of a single parameter needs more; nothing has changed.
        StoreError: there is no room for the state, and nothing has changed; or a write or a read
            has failed, and the parts before it are stepped.
    """
    send_all(optimizer, keeper)
    keeper.begin()
    size_of = partial(_size, optimizer, keeper)
    parts = parts_of(optimizer, partial(widest, size_of) if paged else size_of, room)
    keeper.require_room(keeper.away + sum(part.size for part in parts))
    every = optimizer.param_groups
    through = _Through(optimizer, keeper, room)
    try:
        for part, coming in zip(parts, [*parts[1:], None], strict=True):
            through.bring(part, coming)
            optimizer.param_groups = part.groups(every)
            inner(optimizer)
            through.send(part)
        keeper.settle(wait=through.under_way)
    finally:
        optimizer.param_groups = every
        keeper.rest()
    return len(parts), through.most


def send_all(optimizer: optim.Optimizer, keeper: Keeper) -> None:
    """Evict all resident state.

    Raises:
        StoreError: something was written to in its absence, or cannot be written.
    """
    keeper.check(optimizer.state.values())
    here = sum(keeper.size(state) for state in optimizer.state.values()) - keeper.away
    if here == 0:
        return
    keeper.require_room(keeper.away + here)
    try:
        for state in optimizer.state.values():
            keeper.settle(wait=len(keeper.leave(state)))
    finally:
        keeper.rest()


class _Through:
    """Resident parts of the state, and their prefetch and eviction.

    Attributes:
        most: bytes that were in memory at a time.
    """

    def __init__(self, optimizer: optim.Optimizer, keeper: Keeper, room: int) -> None:
        self._optimizer, self._keeper, self._room = optimizer, keeper, room
        self._leaving: deque[tuple[int, list[Away]]] = deque()
        self._ahead: Part | None = None
        self._held = self.most = 0

    @property
    def under_way(self) -> int:
        """Tensors that are being written."""
        return sum(len(aways) for _, aways in self._leaving)

    def bring(self, part: Part, coming: Part | None) -> None:
        """Have the state of a part here, and that of the next one on its way."""
        if self._ahead is not part:
            while self._held + part.size > self._room and self._leaving:
                self._keeper.settle(wait=1)
                self._release()
            self._call(part)
        self._keeper.settle()
        self._release()
        if coming is not None and self._held + coming.size <= self._room:
            self._call(coming)
            self._ahead = coming
        for state in self._states(part):
            self._keeper.arrive(state)

    def send(self, part: Part) -> None:
        """Evict the state of a part."""
        aways = [away for state in self._states(part) for away in self._keeper.leave(state)]
        self._leaving.append((part.size, aways))

    def _call(self, part: Part) -> None:
        self._held += part.size
        self.most = max(self.most, self._held)
        for state in self._states(part):
            self._keeper.call(state)

    def _release(self) -> None:
        while self._leaving and all(away.job is None for away in self._leaving[0][1]):
            self._held -= self._leaving.popleft()[0]

    def _states(self, part: Part) -> list[dict[Any, Any]]:
        held = self._optimizer.state
        return [held[p] for _, p in part.members if p in held]


def _size(
    optimizer: optim.Optimizer, keeper: Keeper, group: dict[str, Any], parameter: Tensor
) -> int:
    """Return the bytes of a parameter's state, or a bound before it is made."""
    made = keeper.size(optimizer.state[parameter]) if parameter in optimizer.state else 0
    return made or state_bound(optimizer, group, parameter)
