"""A thread begins, or it is said that there is no memory for it.

``Thread.start`` waits until the new thread says that it runs. Where the system has a stack for it,
and Python no memory for its first frame, it dies before it can say so, and ``start`` waits without
end (under RLIMIT_DATA, where full stacks count). So the initial memory of a thread is requested
from the system first, and released at once.

    ask for a stack and a little more ──> there ──> given back ──> start
                                      └─> not there: MemoryError
"""

from __future__ import annotations

import mmap
import sys
import threading

if sys.platform != "win32":
    import resource

FRAMES = 4 << 20
"""Initial bytes of a thread in addition to its stack: its first frames, and its heap."""

USUAL = 8 << 20
"""Bytes of a stack where the system sets no limit."""


def start(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        MemoryError: there is no memory for it to begin.
        RuntimeError: the system starts no more threads.
    """
    if sys.platform != "win32":  # which knows no limits of this kind
        try:
            mmap.mmap(-1, _stack() + FRAMES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        except OSError as error:
            raise MemoryError(
                "there is no memory for the stack and the first frame of a new thread"
            ) from error
    thread.start()


def stack_size() -> int:
    """Return the requested bytes of a thread's stack; 0 for the default of the system.

    A read by Python sets it to 0, so it is set again.
    """
    size = threading.stack_size()
    threading.stack_size(size)
    return size


def _stack() -> int:
    """Return the bytes of the stack of a new thread."""
    size = stack_size()
    if size == 0 and sys.platform != "win32":
        size = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return size if size > 0 else USUAL
