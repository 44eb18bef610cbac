"""The modes of a thread, for threads that compute in its name.

Grad mode, autocast, inference mode, function and dispatch modes, saved-tensor hooks and context
variables belong to the thread that entered them. A lane that did not enter them too would compute
in float32 under the user's autocast, on the wrong device, or without the meter.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
)
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

from anybatch.core import accelerators
from anybatch.core.accelerator import Accelerator
from anybatch.memory.meter import Meter


@dataclass(frozen=True)
class Surroundings:
    """The modes that a thread is in at one moment."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    functions: tuple[Any, ...]
    dispatches: tuple[Any, ...]
    hooks: tuple[Any, ...]
    variables: contextvars.Context
    streams: tuple[tuple[Accelerator, Any], ...]

    @classmethod
    def now(cls) -> Surroundings:
        """Return those of this thread."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return cls(
            grad=torch.is_grad_enabled(),
            autocast=tuple(
                (type_, torch.is_autocast_enabled(type_), torch.get_autocast_dtype(type_))
                for type_ in accelerators.autocast_types()
            ),
            cache=torch.is_autocast_cache_enabled(),
            functions=tuple(_get_current_function_mode_stack()),  # type: ignore[no-untyped-call]
            dispatches=tuple(_get_current_dispatch_mode_stack()),
            hooks=tuple(top) if top else (),
            variables=contextvars.copy_context(),
            streams=tuple(accelerators.streams()),
        )

    @contextmanager
    def entered(self, paging: Any = None) -> Iterator[None]:
        """Enter them, in this thread, for the body; backward runs in this thread.

        Args:
            paging: a dispatch mode below all of the user's, whose kernels it must intercept, and
                above the meter. Default None.
        """
        for variable, value in self.variables.items():
            variable.set(value)
        with ExitStack() as stack:
            for there, stream in self.streams:
                stack.enter_context(there.on(stream))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            for type_, enabled, dtype in self.autocast:
                if enabled:
                    stack.enter_context(
                        torch.autocast(type_, dtype=dtype, enabled=True, cache_enabled=self.cache)
                    )
            if self.hooks:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.hooks))
            for mode in self.functions:
                _push_mode(mode)  # type: ignore[no-untyped-call]
                stack.callback(_pop_mode)
            meters = [mode for mode in self.dispatches if isinstance(mode, Meter)]
            others = [mode for mode in self.dispatches if not isinstance(mode, Meter)]
            for mode in [*meters, *([] if paging is None else [paging]), *others]:
                _push_dispatch_mode(mode)
                stack.callback(_pop_dispatch_mode)
            yield
