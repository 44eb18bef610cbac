"""Bytes as people write them, at the border only: inside, a number of bytes is an int.

``"6GiB"`` is 6 * 2**30, ``"6GB"`` is 6 * 10**9. Binary units are printed, because memory is sold
and limited in them.
"""

from __future__ import annotations

import re
from typing import Any

UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}IB": 1 << 10 * (i + 1) for i, letter in enumerate("KMGTP")},
    **{f"{letter}B": 1000 ** (i + 1) for i, letter in enumerate("KMGTP")},
}
"""Upper-case unit -> bytes."""

_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_HALF_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGTP])\s*", re.IGNORECASE)


def parse_bytes(value: Any, name: str = "memory", *, word: str | None = None) -> int:
    """Return the bytes that a size argument means.

    Args:
        value: a whole number of bytes, such as 6e9, or a text such as "6GiB", "512 MiB", "1.5GB".
        name: its name in errors.
        word: other valid values, for the error; None (default) is nothing.

    Returns:
        Bytes, at least 1.

    Raises:
        ValueError: it is no such number or text, or less than one byte.
    """
    found = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        found = int(value) if value % 1 == 0 else None
    elif isinstance(value, str) and (match := _WRITTEN.fullmatch(value)):
        unit = UNITS.get(match[2].upper())
        found = None if unit is None else int(float(match[1]) * unit)
    if found is None or found < 1:
        other = "" if word is None else f', or "{word}"'
        half = _HALF_WRITTEN.fullmatch(value) if isinstance(value, str) else None
        mend = ""
        if half is not None:
            number, letter = half[1], half[2].upper()
            mend = f': write "{number}{letter}iB" for powers of 1024 or "{number}{letter}B" of 1000'
        raise ValueError(
            f"{name} must be a number of bytes of at least 1, or a text such as "
            f'"6GiB", "512MiB" or "1.5GB"{other}, and it is {value!r}{mend}'
        )
    return found


def parse_share(value: Any) -> float | None:
    """Return the share that a text such as "80%" means: 0.8; None for anything else.

    Args:
        value: a percentage as text, or an amount of memory in any form.

    Raises:
        ValueError: it is 0 %, or more than 100 %.
    """
    match = _SHARE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    share = float(match[1]) / 100
    if not 0 < share <= 1:
        raise ValueError(
            "memory as a share of the free memory must be above 0 % and at most 100 %, and it is "
            f'{value!r}: write "80%"'
        )
    return share


BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
"""Lower-case unit -> bits; networks are sold in powers of ten."""


def parse_bandwidth(value: Any, name: str = "network") -> float:
    """Return the bytes a second of a text such as "10Gbit" or "10Gbit/s".

    Args:
        value: the text.
        name: its name in errors.

    Raises:
        ValueError: it is no such text, or nothing at all goes through.
    """
    match = _WRITTEN.fullmatch(value.strip().removesuffix("/s")) if isinstance(value, str) else None
    unit = None if match is None else BITS.get(match[2].lower())
    found = 0.0 if match is None or unit is None else float(match[1]) * unit / 8
    if not found:
        raise ValueError(
            f'{name} must be bits a second such as "10Gbit" or "400Gbit", and it is {value!r}'
        )
    return found


SECONDS = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400}
"""Lower-case unit -> seconds."""


def parse_seconds(value: Any, name: str = "deadline") -> float:
    """Return the seconds of a text such as "90s", "30min", "6h" or "2d".

    Args:
        value: the text.
        name: its name in errors.

    Raises:
        ValueError: it is no such text, or no time at all.
    """
    match = _WRITTEN.fullmatch(value) if isinstance(value, str) else None
    unit = None if match is None else SECONDS.get(match[2].lower())
    found = 0.0 if match is None or unit is None else float(match[1]) * unit
    if not found:
        raise ValueError(
            f'{name} must be a time such as "30min", "6h" or "2d", and it is {value!r}'
        )
    return found


def show_bytes(count: int) -> str:
    """Return `count` bytes with three digits or so and a binary unit: "61.4 MiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    digits = 0 if unit == "B" or abs(size) >= 100 else 1
    return f"{size:.{digits}f} {unit}"


def show_seconds(seconds: float) -> str:
    """Return `seconds` in a readable unit: "0.41 s", "12 min", "3.4 h"."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = seconds / 60
    return f"{minutes:.3g} min" if minutes < 100 else f"{minutes / 60:.3g} h"


def show_samples(n: int) -> str:
    """Return a number of samples in words."""
    return "one sample" if n == 1 else f"{n} samples"
