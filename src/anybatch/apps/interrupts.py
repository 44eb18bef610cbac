"""Let Ctrl-C wait until something that must not be half done is done.

An optimizer changes one parameter after another, a checkpoint is written byte after byte. Python
raises KeyboardInterrupt between any two lines of them. Inside `unbroken()` the signal is noted, and
handled when the block ends.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def unbroken() -> Iterator[None]:
    """Run a block to its end before Ctrl-C takes effect.

    In a thread other than the main one, where Python delivers no signal, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(signal.SIGINT, None)
