"""A step happens whole or not at all (Law 5).

torch has no transaction: an exception in the middle of an accumulation loop leaves half a gradient,
moved running statistics and drawn random numbers behind. Here the state is noted before the step,
and put back when the step fails, for whatever reason, Ctrl-C included. Nothing that was there is
written to before the end: gradients that existed are set aside, buffers are copied.

    noted ──> body ──> delivered          (the last part cannot be interrupted)
        └──── failed ──> put back         (nor can this)
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import _pop_mode

from anybatch.errors import NotExactError
from anybatch.modules import Modules
from anybatch.rng import Dice


@dataclass(frozen=True)
class BufferState:
    """One buffer at one moment: where it is, which tensor it was, and its values."""

    module: nn.Module
    name: str
    path: str
    tensor: Tensor
    version: int
    values: Tensor

    def written(self) -> bool:
        """Say whether torch noticed a write, or another tensor took its place.

        It costs nothing, and it misses batch_norm, whose kernel moves the running statistics
        without telling autograd.
        """
        now = self.module._buffers.get(self.name)
        return now is not self.tensor or now._version != self.version

    def moved(self) -> bool:
        """Say whether its values are others than they were."""
        now = self.module._buffers.get(self.name)
        return now is None or not torch.equal(now, self.values)

    def put_back(self) -> None:
        """Make the buffer the tensor it was, with the values it had."""
        self.module._buffers[self.name] = self.tensor
        with torch.no_grad():
            self.tensor.copy_(self.values)


def note_buffers(modules: Modules) -> list[BufferState]:
    """Return the state of every buffer of `modules`, its values copied."""
    return [
        BufferState(
            owner,
            name,
            f"{path}.{name}" if path else name,
            tensor,
            tensor._version,
            tensor.detach().clone(),
        )
        for path, owner in modules
        for name, tensor in owner._buffers.items()
        if tensor is not None
    ]


class Before:
    """The state before a step: gradients, buffers, dice, and torch's modes; open until it ends.

    The modes are here because an interrupt may come at the first instruction of an ``__exit__``,
    and what that was to undo is then still on.
    """

    def __init__(self, modules: Modules, parameters: Iterable[Tensor]) -> None:
        self.gradients: list[tuple[Tensor, Tensor | None]] = [(p, p.grad) for p in parameters]
        self.buffers = note_buffers(modules)
        self.dice = Dice.now()
        self.grad_mode = torch.is_grad_enabled()
        self.modes = _len_torch_function_stack()
        self.open = True

    def put_back(self) -> None:
        """Make all of it as it was."""
        self.open = False
        torch.set_grad_enabled(self.grad_mode)
        while _len_torch_function_stack() > self.modes:
            _pop_mode()  # type: ignore[no-untyped-call]
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        for buffer in self.buffers:
            buffer.put_back()
        self.dice.put_back()


@contextmanager
def whole_or_nothing(before: Before, deliver: Callable[[], None]) -> Iterator[None]:
    """Run the body, then `deliver`; when anything is raised before that is done, undo it all.

    Args:
        before: the state to put back.
        deliver: the last part of the step, which writes to what was there. It must not fail; an
            interrupt during it is held back until it is done.
    """
    try:
        yield
        with uninterrupted():
            deliver()
            before.open = False
    except BaseException:
        if before.open:
            with uninterrupted():
                before.put_back()
        raise


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C while the body runs, and let it through afterwards.

    Only the main thread gets KeyboardInterrupt, and only a Python handler can be held back.
    """
    handler = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or not callable(handler):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])


@contextmanager
def no_optimizer_step(before: Before) -> Iterator[None]:
    """Refuse an optimizer that steps inside the body, before it changes a parameter.

    Args:
        before: the step; once it is over the hook means nothing, even if it should still be there.

    Raises:
        NotExactError: from a gradient hook that steps an optimizer.
    """

    def refuse(optimizer: Any, *_: Any) -> None:
        if before.open:
            raise NotExactError(
                "parameters must not change before the whole batch is done, and "
                f"{type(optimizer).__name__}.step() was called inside engine.backward, most "
                "likely by a gradient hook: remove the hook and step after engine.backward"
            )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
