"""Threads that have something to do."""

from __future__ import annotations

import threading

from anybatch.core import threads


def busy() -> int:
    """Return how many there are, without those of the pool that wait for work."""
    return threading.active_count() - threads.idle()
