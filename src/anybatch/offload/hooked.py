"""Step under its hooks, and its cleanup after a failure or an interrupt.

For any end of the body, hooks and modes are removed and threads have ended afterwards. The
offloaded tensors of a failed step are dropped, for nothing can request them any more.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import torch

from anybatch.core.modules import eager
from anybatch.core.undo import uninterrupted
from anybatch.offload.execute import StepHooks
from anybatch.offload.mover import Mover
from anybatch.offload.watch import StepRecorder


class Hooked:
    """Runs the body under the hooks of a step.

    Args:
        step: the functions of the hooks.
        mover: moves storages; after a failure those that it holds are lost.
        watch: records the body; None where it is not recorded.
    """

    def __init__(self, step: StepHooks, mover: Mover, watch: StepRecorder | None) -> None:
        self._step, self._mover, self._watch = step, mover, watch
        self._entered: list[Any] = []

    def __enter__(self) -> Self:
        step, watch = self._step, self._watch
        try:
            with uninterrupted():
                hooks = torch.autograd.graph.saved_tensors_hooks(step.pack, step.unpack)
                for mode in (hooks, *(() if watch is None else (eager(), watch))):
                    mode.__enter__()
                    self._entered.append(mode)
        except BaseException:
            self.give_up()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with uninterrupted(once=True):
                self._exit()
                if exc_type is not None:
                    self.give_up()
                else:
                    self._mover.rest()
                    self._step.end()
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """Remove the hooks, and drop all offloaded tensors; another call does no harm."""
        self._exit()
        self._step.fail()
        self._mover.close()
        self._step.forget_copies()

    def _exit(self) -> None:
        while self._entered:
            self._entered.pop().__exit__(None, None, None)
