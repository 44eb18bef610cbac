"""The command's own process: it may start itself again, with another host allocator.

A GPU's memory it asks to be kept in expandable segments (`anybatch.devices.segments_of`); for that
it need not start again.

glibc's handling of freed memory is fixed when a process begins (`allocator`). Only a process of the
command itself may be replaced; a program or a test that calls it is not.
"""

from __future__ import annotations

import multiprocessing
import os
import signal

import typer

from anybatch.cli import allocator
from anybatch.cli.devices import find_device
from anybatch.devices import segments_of

ENTRY = object()
"""The `obj` of the command in the command's own process, and only there."""


def allocate(
    context: typer.Context, malloc: allocator.RequestedMode, device: str | None, *, budgeted: bool
) -> str:
    """Return the memory settings in words; in the command's own process, apply them first."""
    found = find_device(device)
    host = _host(context, malloc, found.type, budgeted=budgeted)
    return "; ".join(filter(None, (host, segments_of(found).ask())))


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


def _host(
    context: typer.Context, malloc: allocator.RequestedMode, device: str, *, budgeted: bool
) -> str:
    decision = allocator.decide(malloc, device, budgeted=budgeted, environment=os.environ)
    if decision.environment is None:
        return str(decision)
    if context.obj is ENTRY:
        allocator.restart(decision.environment)
    now = allocator.running(os.environ)
    return f"malloc: {now} (another mode is only for a process that the command begins)"
