"""Replaced methods of an optimizer that hide its offloaded state from callers.

    optimizer.step()          goes in parts; hooks, closures and schedules see one step
    optimizer.state_dict()    has real tensors, read for it; so have copies and pickles
    load_state_dict()         what was loaded leaves

A method of the instance stands before that of its class; a schedule does the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import optim

from anybatch.core.optimizers import RESIDENT
from anybatch.errors import NotExactError

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
