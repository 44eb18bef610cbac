"""Threads that have something to do."""

from __future__ import annotations

import threading

import pytest

from anybatch.core import threads


def busy() -> int:
    """Return how many there are, without those of the pool that wait for work."""
    return threading.active_count() - threads.idle()


def no_idle(patch: pytest.MonkeyPatch) -> None:
    """Have no thread of the pool wait for work: whatever is to run starts one."""
    patch.setattr(threads, "_IDLE", ([], []))
