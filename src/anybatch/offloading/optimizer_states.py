"""`anybatch.offload_states`: training state that is resident only while it is used.

AdamW has two tensors for every parameter, and reads them once a step. Between two steps they are in
host memory or in a file, and during a step they pass through memory a few at a time. Parameters and
gradients can do the same. The user's loop does not change.

    forward, backward    no state in memory; parameters and gradients as kernels ask for them
    optimizer.step()     a part of it, the part before on its way out, the part behind on its way in

Source: Hayakawa and Narihira, Out-of-core training, section 3: all variables are scheduled. Of
today's programs ZeRO-Infinity (DeepSpeed) does the same over many GPUs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from types import MethodType, TracebackType
from typing import Any, Self

import torch
from torch import nn, optim

from anybatch.core.optimizers import (
    RESIDENT,
    bare,
    device_of,
    inner_step,
    refuse_scaled,
    state_bound,
)
from anybatch.core.transaction import uninterrupted
from anybatch.core.units import parse_bytes
from anybatch.errors import NotExactError
from anybatch.memory.spill import maker
from anybatch.memory.stores import Store
from anybatch.offloading.parameters import PagedModel
from anybatch.offloading.state_mover import AT_A_TIME, StateMover, send_all, step_in_parts

RESIDENT_BYTES = 64 << 20
"""Bytes of state that are in memory at a time by default."""


@dataclass(frozen=True)
class StatesReport:
    """Report of one step of an optimizer with offloaded state.

    Attributes:
        parts: number of parts of the step.
        offloaded_bytes: bytes of state that are offloaded after it.
        most_bytes: the most bytes of state resident at a time; in the first step a bound.
        out_bytes: bytes that were offloaded.
        back_bytes: bytes that were read back.
        waited: seconds in which the step waited for copies.
    """

    parts: int
    offloaded_bytes: int
    most_bytes: int
    out_bytes: int
    back_bytes: int
    waited: float


class OffloadedStates:
    """Result of `offload_states`: an optimizer's state, offloaded until `back` or `close`.

    Args:
        optimizer: owner of the state.
        resident_bytes: bytes of the state that may be resident at a time.
        make: returns a store.
        device: device of the state.
        paged: the model whose parameters and gradients are offloaded too, or None.

    Attributes:
        last: report of the last step; None before the first.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        resident_bytes: int,
        make: Callable[[], Store],
        device: torch.device,
        paged: PagedModel | None,
    ) -> None:
        self._memory = resident_bytes
        self.last: StatesReport | None = None
        self._optimizer, self._mover = optimizer, StateMover(make, device)
        self._open, self._paged = True, paged
        self._entered = False
        with uninterrupted():
            self._seams = Seams(optimizer, self._step, self._snapshot, self._send, resident_bytes)
            try:
                send_all(optimizer, self._mover)
            except BaseException:
                self.back()
                raise

    @property
    def memory(self) -> int:
        """Bytes of state that may be resident at a time; with a model, of parameters, too."""
        return self._memory

    @memory.setter
    def memory(self, resident_bytes: int) -> None:
        self._memory = resident_bytes
        self._seams.resident_bytes = resident_bytes
        if self.entered and self._paged is not None:
            self._paged.pages.squeeze(resident_bytes)

    @property
    def paged(self) -> bool:
        """Return whether parameters and gradients are offloaded, too."""
        return self._paged is not None

    @property
    def entered(self) -> bool:
        """Return whether parameters and gradients are offloaded now, inside ``with states:``."""
        return self._entered

    def __enter__(self) -> Self:
        if self._paged is not None and self._open and not self._entered:
            with uninterrupted():
                self._paged.enter()
                self._entered = True
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.back()

    def back(self) -> None:
        """Make all state resident, and restore the optimizer as it was without `offload_states`.

        Raises:
            StoreError: the state cannot be read; the part that was not read is still offloaded.
        """
        states = self._optimizer.state.values()
        with uninterrupted(once=True):
            if self._open:
                self._mover.check(states)
                try:
                    for state in states:
                        self._mover.arrive(state)
                finally:
                    self._mover.rest()
            self.close()

    def close(self) -> None:
        """Give up the file or the host memory, and the optimizer's state that is in it.

        If state was offloaded, the optimizer needs a new one before it can step or be saved.
        Parameters and gradients are made resident.
        """
        with uninterrupted():
            if not self._open:
                return
            self._open = False
            if self._paged is not None and self._entered:
                self._entered = False
                self._paged.exit()
            lost = self._mover.offloaded_bytes
            self._mover.close()
            if not lost:
                self._seams.remove()

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        """Run one step of the optimizer, and return the result of its closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        optimizer, mover = self._optimizer, self._mover
        inner = inner_step(optimizer)
        if not self._open:
            mover.check(optimizer.state.values())
            inner(optimizer)
            return loss
        with uninterrupted(once=True), self._shared_memory() as (resident_bytes, paged):
            parts, most = step_in_parts(optimizer, inner, mover, resident_bytes, paged=paged)
        out, back = mover.bytes
        self.last = StatesReport(parts, mover.offloaded_bytes, most, out, back, mover.waited)
        return loss

    @contextmanager
    def _shared_memory(self) -> Iterator[tuple[int, bool]]:
        """Share the memory between the optimizer's state and the parameters for the body."""
        if self._paged is None or not self._entered:
            yield self.memory, False
            return
        pages = self._paged.pages
        pages.squeeze(self.memory // 2)
        try:
            yield self.memory // 2, True
        finally:
            pages.limit = self.memory
            self._paged.register_new()
            pages.ended()

    def _snapshot(self) -> dict[Any, Any]:
        """Return the state with all tensors in memory; the offloaded ones remain offloaded."""
        state = self._optimizer.state
        self._mover.check(state.values())
        return {parameter: self._mover.copied(one) for parameter, one in state.items()}

    def _send(self) -> None:
        """Offload a newly loaded state."""
        if self._open:
            send_all(self._optimizer, self._mover)


def offload_states(
    optimizer: optim.Optimizer,
    *,
    model: nn.Module | None = None,
    memory: float | str | None = None,
    store: str | PathLike[str] | None = None,
) -> OffloadedStates:
    """Keep the state of an optimizer offloaded, except for the part that its step is using.

    ``optimizer.step()`` is called as before, and gives the same parameters and the same state bit
    for bit. It becomes several steps of a few parameters each; meanwhile the state of the next
    parameters is read, and that of the last ones is written. Hooks, closures, learning rate
    schedules and `torch.amp.GradScaler` see one step. ``state_dict()``, copies and pickles of the
    optimizer have real tensors, all in memory; ``load_state_dict()`` takes them.

    In ``optimizer.state`` an offloaded tensor is a tensor on the meta device: it has a shape, and
    code that reads its values gets torch's error. Tensors below a block of the file (4 KiB) are
    always resident.

    With `model` its parameters and gradients are offloaded too, inside ``with states:``, which then
    encloses the entire training. There every kernel of this thread is intercepted, and the tensors
    that it reads are paged in before; others are read ahead and written behind, in the order of the
    step before. Tied weights, weights used outside their module, recomputation and gradient
    clipping work as without it, and all bits are the same. Inside, no other thread may read a
    parameter (its memory is not there), a tensor whose address is read (``numpy()``, pickling)
    becomes resident, and compiled code runs eagerly. Outside, everything is resident.

    Args:
        optimizer: one of torch's that update each parameter by itself (AdamW, Adam, SGD, RMSprop,
            Adagrad and so on). Its state, if there is any, is offloaded at once.
        model: its parameters and gradients are offloaded too. Default None: they are resident.
        memory: the most bytes of state resident at a time, such as "256MiB"; with `model`, of
            parameters, gradients and state together, where results of a running kernel (a new
            gradient, an update's own tensors) do not count yet. Default None: 64 MiB, or three
            times the state of the largest parameter if that is more; with `model` twice that.
        store: place of the state: "host" memory (pinned), a "file" in the system's folder for
            temporary files, or a folder for that file. Default None: "host" from CUDA, "file" on
            the CPU. The file has no name, and disappears with the process.

    Returns:
        An object with ``back()``, which makes everything resident again, as exiting
        ``with states:`` does, and ``close()``, which drops the offloaded state of the optimizer.

    Raises:
        NotExactError: the step of this optimizer cannot be divided into parts; its ``step`` was
            replaced; its parameters are on several devices.
        BudgetError: in a step: the state of a single parameter is more than `memory` (half of it
            with `model`), or a kernel reads more parameters and gradients at once.
        StoreError: the store is full, or a write or a read has failed; in a step, the parameters of
            earlier parts are then updated, and no state is lost. Tensors that cannot be read at
            the end of ``with`` are NaN.
        ValueError: `memory` or `store` is not valid here.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with anybatch.offload_states(optimizer, model=model, memory="1GiB"):
        ...     for x, y in loader:
        ...         optimizer.zero_grad()
        ...         loss_fn(model(x), y).backward()
        ...         optimizer.step()

    Source: Hayakawa and Narihira, Out-of-core training, section 3.
    """
    refuse_scaled(optimizer)
    optimizer = bare(optimizer)
    inner_step(optimizer)
    device = device_of(optimizer)
    resident_bytes = default_resident(optimizer) if memory is None else parse_bytes(memory)
    resident_bytes *= 2 if model is not None and memory is None else 1
    make = maker(store, device)
    paged = None if model is None else PagedModel(model, resident_bytes, make)
    return OffloadedStates(optimizer, resident_bytes, make, device, paged)


def default_resident(optimizer: optim.Optimizer) -> int:
    """Return the default budget in bytes for the state that is resident at a time."""
    bounds = (state_bound(optimizer, g, p) for g in optimizer.param_groups for p in g["params"])
    return max(RESIDENT_BYTES, AT_A_TIME * max(bounds))


# Replaced methods of an optimizer that hide its offloaded state from callers.
#
#     optimizer.step()          goes in parts; hooks, closures and schedules see one step
#     optimizer.state_dict()    has real tensors, read for it; so have copies and pickles
#     load_state_dict()         what was loaded leaves
#
# A method of the instance stands before that of its class; a schedule does the same.

BY_SCHEDULE = "_wrapped_by_lr_sched"
"""Mark of a step that torch's schedules have wrapped."""


class Seams:
    """Methods replaced on an optimizer, until `remove`.

    Args:
        optimizer: whose.
        step: takes the place of its step; is given the closure.
        snapshot: returns its state with real tensors.
        loaded: is called when another state was loaded.
        resident_bytes: bytes of state that are in memory at a time; read by the planner.

    Raises:
        NotExactError: its step was replaced already.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        step: Callable[[Any], Any],
        snapshot: Callable[[], dict[Any, Any]],
        loaded: Callable[[], None],
        resident_bytes: int,
    ) -> None:
        self._optimizer = optimizer
        self._before = vars(optimizer).get("step")
        _refuse_replaced(optimizer, self._before)
        self._step = _method(optimizer, step, scheduled=self._before is not None)
        self.resident_bytes = resident_bytes

        def state() -> dict[str, Any]:
            return {**type(optimizer).__getstate__(optimizer), "state": _keyed(snapshot())}

        def begin(_: Any) -> None:
            self._state = optimizer.state
            optimizer.state = _keyed(snapshot())

        def end(_: Any, __: Any) -> None:
            optimizer.state = self._state

        def load(_: Any) -> None:
            loaded()

        self._handles = [
            optimizer.register_state_dict_pre_hook(begin),
            optimizer.register_state_dict_post_hook(end),
            optimizer.register_load_state_dict_post_hook(load),
        ]
        vars(optimizer).update(step=self._step, __getstate__=state)

    @property
    def resident_bytes(self) -> int:
        """Bytes of state that are in memory at a time."""
        found: int = getattr(self._step.__func__, RESIDENT)
        return found

    @resident_bytes.setter
    def resident_bytes(self, resident_bytes: int) -> None:
        setattr(self._step.__func__, RESIDENT, resident_bytes)

    def remove(self) -> None:
        """Make the optimizer as it was; a schedule that has wrapped the step keeps it."""
        own = vars(self._optimizer)
        for handle in self._handles:
            handle.remove()
        own.pop("__getstate__", None)
        if own.get("step") is self._step:
            del own["step"]
            if self._before is not None:
                own["step"] = self._before


def _method(optimizer: optim.Optimizer, step: Callable[[Any], Any], *, scheduled: bool) -> Any:
    """Return a step that fires the optimizer's hooks once, bound to it."""

    def in_parts(self: Any, closure: Any = None) -> Any:
        self._opt_called = True  # what a schedule that came before would have noted
        return step(closure)

    hooked: Any = optim.Optimizer.profile_hook_step(in_parts)
    hooked.hooked = True
    if scheduled:
        setattr(hooked, BY_SCHEDULE, True)
    return MethodType(hooked, optimizer)


def _keyed(state: dict[Any, Any]) -> defaultdict[Any, Any]:
    return defaultdict(dict, state)


def _refuse_replaced(optimizer: optim.Optimizer, step: Any) -> None:
    scheduled = hasattr(step, BY_SCHEDULE) and step.__wrapped__ is type(optimizer).step
    if step is not None and not scheduled:
        raise NotExactError(
            "step() must be the optimizer's own, or a schedule's of torch, and this one's was "
            f"replaced by {getattr(step, '__qualname__', type(step).__qualname__)}: call "
            "offload_states() before any other wrapper, and once for each optimizer"
        )
