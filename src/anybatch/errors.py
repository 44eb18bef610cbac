"""Everything anybatch refuses, as one family: catch `AnybatchError` to catch them all."""

from __future__ import annotations

from functools import partial
from typing import Any


class AnybatchError(Exception):
    """The base of every error that anybatch raises on purpose."""


class BatchError(AnybatchError, ValueError):
    """The batch cannot be split: leaves of different sizes, no tensor, no sample."""


class LossError(AnybatchError, ValueError):
    """The loss is not declared where it must be, or does not do what was declared."""


class NotExactError(AnybatchError, RuntimeError):
    """The gradient of the whole batch cannot be had this way, so no step was made."""


class LockstepError(NotExactError):
    """Micro-batches do not go through the same layers where samples meet."""


class NotReproducibleError(NotExactError):
    """A second pass met other samples or other random draws than the first."""


class BudgetError(AnybatchError, RuntimeError):
    """A step does not fit in the memory it was given, and nothing was run.

    Attributes:
        needed: bytes of the smallest step of that kind.
        given: bytes of the budget.
    """

    def __init__(self, text: str, *, needed: int, given: int) -> None:
        super().__init__(text)
        self.needed, self.given = needed, given

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), needed=self.needed, given=self.given), self.args


class ScheduleError(AnybatchError, ValueError):
    """A schedule of what leaves the device does not do what its step needs."""


class StoreError(AnybatchError, OSError):
    """What left the device could not be kept or brought back."""


class RankError(AnybatchError, RuntimeError):
    """Another rank has failed or is gone, so no rank has made the step."""


class NotYetError(AnybatchError, NotImplementedError):
    """The place for a feature is here; the feature is not."""
