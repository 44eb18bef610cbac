"""Checks that a user's numbers about a machine are finite and in range."""

from __future__ import annotations

from math import isfinite

ROUNDING = 1e-9
"""Share of a figure that counts as rounding in a comparison with an integer or a goal."""


def at_least(least: float, **numbers: float) -> None:
    """Check that every number is finite and not below `least`.

    Raises:
        ValueError: one is not.
    """
    for name, value in numbers.items():
        if not isfinite(value) or value < least:
            raise ValueError(f"{name} must be a finite number of at least {least}, not {value!r}")


def positive(**numbers: float) -> None:
    """Check that every number is finite and above 0.

    Raises:
        ValueError: one is not.
    """
    for name, value in numbers.items():
        if not isfinite(value) or value <= 0:
            raise ValueError(f"{name} must be a finite number above 0, not {value!r}")


def share(**numbers: float) -> None:
    """Check that every number is from 0 to 1.

    Raises:
        ValueError: one is not.
    """
    for name, value in numbers.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be a share from 0 to 1, not {value!r}")


def positive_integer(**numbers: int) -> None:
    """Check that every number is an integer of at least 1.

    Raises:
        ValueError: one is not.
    """
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
