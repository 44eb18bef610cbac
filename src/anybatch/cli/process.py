"""The command's own process, which may start itself again and must end its readers."""

from __future__ import annotations

import multiprocessing
import signal

ENTRY = object()
"""The `obj` of the command in the command's own process, and only there."""


def end_readers() -> None:
    """End the processes that read images, and that no loader ends any more.

    They ignore SIGTERM, so that a scheduler's does not end them in the middle of a step, and Python
    would wait for them for ever (test_a_reader_without_a_loader_does_not_keep_the_command).
    """
    readers = multiprocessing.active_children()
    if readers and hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch raises there where a reader is killed
    for reader in readers:
        reader.kill()
