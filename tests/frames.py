"""Room for the frames of a test, all in one piece.

CPython keeps frames in pieces of 16 KiB, each of which it maps anew where a call does not fit into
the last one, and unmaps when that call returns. A function that is called often, just where a piece
is full, so costs two system calls and four page faults each time. Rehearsals are as deep as that,
and pay for that with much of their time.

The trick: a frame that asks for a large stack gets a piece large enough for it, and the pieces are
powers of two; what is left of this one holds all frames of what it calls.

Source: CPython, Python/pystate.c, `push_chunk`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Found = TypeVar("Found")

SLOTS = 1 << 17
"""Values of 8 bytes: with what a piece needs beside them, just over half of 2 MiB."""


def roomy(
    work: Callable[Arguments, Found], /, *args: Arguments.args, **named: Arguments.kwargs
) -> Found:
    """Return what ``work(*args, **named)`` does, whose frames have a MiB."""
    return work(*args, **named)


roomy.__code__ = roomy.__code__.replace(co_stacksize=SLOTS)
