"""Errors of the command, one type for each fault that a user can fix.

A command must end in one line with the requirement, the actual value and the remedy, never in a
traceback. Python's own exceptions do not distinguish a fault in the user's data from a bug, so the
command prints exactly the errors below (and the library's) and raises everything else.
"""

from __future__ import annotations

import math

from anybatch.errors import AnybatchError


class SettingsError(AnybatchError):
    """A setting of the command does not make sense."""


class DataError(AnybatchError):
    """The data folder, or something in it, cannot be used."""


class ModelError(AnybatchError):
    """The model cannot be found, built, or used with this data."""


class RunFolderError(AnybatchError):
    """The run folder cannot be used or written."""


class TrainingError(AnybatchError):
    """Training itself went wrong: its loss is no longer a number."""


def refuse_not_finite(loss: float, step: int, epoch: int) -> None:
    """Refuse a step with a loss that is not finite.

    Raises:
        TrainingError: naming the step.
    """
    if not math.isfinite(loss):
        raise TrainingError(
            f"the loss must be a finite number; got {loss} in step {step} of epoch {epoch}. The "
            "weights are those before that step; try a smaller --lr."
        )


class MissingExtraError(AnybatchError):
    """An optional package is needed here and is not installed."""
