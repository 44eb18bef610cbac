"""Path of the module that runs, found in the frames of Python on request.

Hooks on modules would show it too, but torch calls a module with hooks by a closure, which holds
its arguments with the frame of an error: after an out-of-memory error that memory is not freed.
"""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn

CALL = nn.Module._call_impl.__code__
"""Every call of a module goes through it, and holds the module as `self`."""

BEGINS = frozenset(("forward", "backward", "trace"))
"""Functions of this package that run a model: frames around them are not part of it."""


class Paths:
    """Names the modules of a model.

    Args:
        model: whose modules are named.

    Attributes:
        outside: the name of what runs in none of them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.outside = "forward"
        self._names = {id(module): name for name, module in model.named_modules()}

    def now(self) -> str:
        """Return the innermost module that runs in this thread; `outside` where none does."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code is CALL:
                held = frame.f_locals
                module = held["self"]
                if type(held) is dict:  # before Python 3.13 the frame keeps it, and all arguments
                    held.clear()
                class_name, name = type(module).__name__, self._names.get(id(module), "")
                return f"{name} ({class_name})" if name else class_name
            inside = frame.f_globals.get("__name__", "").startswith("anybatch.execution.proof.")
            if inside and code.co_name in BEGINS:
                break
            frame = frame.f_back
        return self.outside
