"""Optimizer step in parts, one after another, with the state of the other parts offloaded.

part 1    read   step   write
part 2           read   step   write
part 3                  read   step   write       at most so many bytes of state in memory
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, optim

from anybatch.core.optimizers import state_bound
from anybatch.offload.states.parts import StepPart, parts_of, widest
from anybatch.offload.states.placeholder import Placeholder
from anybatch.offload.states.state_mover import StateMover


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
    mover.begin()
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
        mover.settle(wait=through.under_way)
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
    """

    def __init__(self, optimizer: optim.Optimizer, mover: StateMover, resident_bytes: int) -> None:
        self._optimizer, self._mover, self._resident_bytes = optimizer, mover, resident_bytes
        self._leaving: deque[tuple[int, list[Placeholder]]] = deque()
        self._ahead: StepPart | None = None
        self._held = self.most = 0

    @property
    def under_way(self) -> int:
        """Tensors that are being written."""
        return sum(len(placeholders) for _, placeholders in self._leaving)

    def bring(self, part: StepPart, coming: StepPart | None) -> None:
        """Have the state of a part here, and that of the next one on its way."""
        if self._ahead is not part:
            while self._held + part.size > self._resident_bytes and self._leaving:
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
        self._leaving.append((part.size, placeholders))

    def _call(self, part: StepPart) -> None:
        self._held += part.size
        self.most = max(self.most, self._held)
        for state in self._states(part):
            self._mover.call(state)

    def _release(self) -> None:
        while self._leaving and all(placeholder.job is None for placeholder in self._leaving[0][1]):
            self._held -= self._leaving.popleft()[0]

    def _states(self, part: StepPart) -> list[dict[Any, Any]]:
        held = self._optimizer.state
        return [held[p] for _, p in part.members if p in held]


def _size(
    optimizer: optim.Optimizer, mover: StateMover, group: dict[str, Any], parameter: Tensor
) -> int:
    """Return the bytes of a parameter's state, or a bound before it is made."""
    made = mover.size(optimizer.state[parameter]) if parameter in optimizer.state else 0
    return made or state_bound(optimizer, group, parameter)
