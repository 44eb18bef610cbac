"""Whether Python's or numpy's global generator has moved: by its memory, without asking for it.

Both return their state as hundreds of numbers, which is slow, and a step reads it at its beginning
and for each micro-batch. The state is a few kilobytes of memory. numpy has a public address for its
words; the addresses of Python's, and of numpy's normal number that was drawn in advance, are found
with generators of our own when this module is imported. If one is not found, callers must compare
the state itself.

    Random        │ head │ place │ 624 words │            found by its state
    MT19937       │ 624 words │ place │                   ctypes.state_address
    RandomState   │ ... │ has_gauss │ gauss │ ...         found by drawing one
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from typing import Any

import numpy as np

WORDS = 624
"""The state of a Mersenne twister: so many words of 32 bits, and the place of the next draw."""

TWISTER = 4 * WORDS + 4
"""Its bytes."""

GAUSS = 16
"""Bytes of a flag, and of the normal number that was drawn in advance if it is set."""

PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]
"""Python's global generator."""

PYTHON_LIES = id(PYTHON) + object.__basicsize__

NUMPY: Any = getattr(np.random.get_state, "__self__", None)
"""numpy's global generator, whose bits another one may make."""

BITS: Any = getattr(np.random, "get_bit_generator", None)
"""Returns that one; missing in old versions of numpy."""


def memory() -> tuple[bytes, bytes, bytes, Any] | None:
    """Return the memory contents of both generators; None where these cannot be located.

    A normal number that Python has drawn in advance is an attribute, and comes last.
    """
    bits = BITS() if LOCATED else None
    if not isinstance(bits, np.random.MT19937):
        return None
    return (
        ctypes.string_at(bits.ctypes.state_address, TWISTER),
        ctypes.string_at(GAUSS_LIES, GAUSS),
        ctypes.string_at(PYTHON_LIES, TWISTER),
        PYTHON.gauss_next,
    )


def _python_located() -> bool:
    """Say whether Python's generator lies where `memory` reads it."""
    if type(PYTHON).__basicsize__ - object.__basicsize__ < TWISTER:
        return False
    *words, place = PYTHON.getstate()[1]
    there = np.array([place, *words], dtype=np.uint32).tobytes()
    return ctypes.string_at(PYTHON_LIES, TWISTER) == there


def _gauss_at() -> int | None:
    """Return how far into a generator of numpy's the number lies that was drawn in advance."""
    one = np.random.RandomState(0)
    size = type(one).__basicsize__

    def there() -> bytes:
        return ctypes.string_at(id(one), size)

    none = there()
    one.standard_normal()  # makes two
    after, gauss = there(), one.get_state(legacy=False)["gauss"]
    one.standard_normal()
    used, expected = there(), struct.pack("d", gauss)
    for at in range(object.__basicsize__, size - GAUSS + 1, 8):
        flags = [struct.unpack_from("i", state, at)[0] for state in (none, after, used)]
        if flags == [0, 1, 0] and after[at + 8 : at + GAUSS] == expected:
            return at
    return None


def _located() -> bool:
    there = isinstance(NUMPY, np.random.RandomState) and BITS is not None
    return there and sys.implementation.name == "cpython" and _python_located()


_AT = _gauss_at() if _located() else None
LOCATED = _AT is not None
"""Whether the address was found."""
GAUSS_LIES = id(NUMPY) + (_AT or 0)
