"""Errors of anybatch, as one family: catch `AnybatchError` to catch them all."""

from __future__ import annotations

from functools import partial
from typing import Any


class AnybatchError(Exception):
    """The base of every error that anybatch raises on purpose."""


class BatchError(AnybatchError, ValueError):
    """The batch cannot be split: leaves of different sizes, no tensor, no sample."""


class LossError(AnybatchError, ValueError):
    """The loss lacks a declaration that it needs, or breaks the one that it has."""


class NotExactError(AnybatchError, RuntimeError):
    """The gradient of the full batch cannot be computed this way; no step was made."""


class LockstepError(NotExactError):
    """Micro-batches do not reach the same barriers of the model or the loss."""


class NotReproducibleError(NotExactError):
    """A second pass, or a tensor that is computed again, is another one than the first."""


class BudgetError(AnybatchError, RuntimeError):
    """A step does not fit in its budget.

    Raised before the step; by `offload` after the step that it records, by `offload_states` in it.

    Attributes:
        needed: bytes of the smallest step of that kind.
        budget: bytes of the budget.
    """

    def __init__(self, text: str, *, needed: int, budget: int) -> None:
        super().__init__(text)
        self.needed, self.budget = needed, budget

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), needed=self.needed, budget=self.budget), self.args


class ScheduleError(AnybatchError, ValueError):
    """An offload schedule does not serve its step: memory, order or a missing tensor."""


class StoreError(AnybatchError, OSError):
    """Offloaded tensors could not be stored or read back."""


class RankError(AnybatchError, RuntimeError):
    """Another rank has failed or is gone, so no rank has made the step."""


class NotYetError(AnybatchError, NotImplementedError):
    """A feature is planned, but not implemented."""
