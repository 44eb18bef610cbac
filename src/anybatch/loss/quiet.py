"""Parts of a model that compute no loss, and run without tracing.

Tracing a call costs some microseconds, and a forward makes hundreds; the loss is taken in the few
after the last layer. So the first forward finds the parts in which none was taken, and from then on
`TracingMode` is off while one of them runs:

    Llama:  model (quiet) │ lm_head (quiet) │ pad, [1:], cross_entropy     traced

A part in which one was taken is divided further: its own parts are observed next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from torch import nn
from torch.overrides import _get_current_function_mode, _pop_mode, _push_mode

from anybatch.loss.tracing import TracingMode


class Quiet:
    """Parts of a model, each recorded as computing a loss or quiet.

    Args:
        model: its children are observed first.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._quiet: dict[nn.Module, bool] = dict.fromkeys(model.children(), False)
        self._traced: dict[nn.Module, bool] = {}
        self._handles: list[Any] = []
        self._forwards = 0
        self._stacks: dict[int, list[TracingMode | int | None]] = {}

    @contextmanager
    def around(self, tracing: TracingMode) -> Iterator[None]:
        """Trace the body, except its quiet parts; forwards of several lanes may alternate."""
        if self._forwards == 0:
            for part in self._quiet:
                self._handles.append(part.register_forward_pre_hook(self._enter))
                self._handles.append(part.register_forward_hook(self._exit, always_call=True))
        self._forwards += 1
        try:
            with tracing:
                yield
        finally:
            self._forwards -= 1
            if self._forwards == 0:
                for handle in self._handles:
                    handle.remove()
                self._handles.clear()
                self._stacks.clear()
                self._learn()

    def forget(self) -> None:
        """Trace every part from now on: a loss was computed in a part that had none."""
        self._quiet.clear()

    def _enter(self, part: nn.Module, _inputs: Any) -> None:
        top = _get_current_function_mode()  # type: ignore[no-untyped-call]
        there: TracingMode | int | None = None
        if isinstance(top, TracingMode):
            there = _pop_mode() if self._quiet.get(part) else len(top.terms)  # type: ignore[no-untyped-call]
        self._stacks.setdefault(get_ident(), []).append(there)

    def _exit(self, part: nn.Module, _inputs: Any, _outputs: Any) -> None:
        stack = self._stacks.get(get_ident())
        if not stack:  # a checkpoint computes it again, and the last forward has ended meanwhile
            return
        there = stack.pop()
        if isinstance(there, TracingMode):
            _push_mode(there)  # type: ignore[no-untyped-call]
        elif there is not None:
            top = _get_current_function_mode()  # type: ignore[no-untyped-call]
            took = isinstance(top, TracingMode) and len(top.terms) > there
            self._traced[part] = took or self._traced.get(part, False)

    def _learn(self) -> None:
        traced, self._traced = self._traced, {}
        for part, took in traced.items():
            if not took:
                self._quiet[part] = True
            else:
                del self._quiet[part]
                self._quiet.update(dict.fromkeys(part.children(), False))
