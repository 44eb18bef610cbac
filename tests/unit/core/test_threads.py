"""A thread begins, or it is said that it cannot, under a limit that the kernel keeps."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from anybatch.core import threads

FILLED = """
import mmap, resource, sys, threading
from anybatch.core import threads

threading.stack_size(1 << 20)
begun, go = [], threading.Event()
def work():
    begun.append(1)
    go.wait()
now = int(next(l for l in open("/proc/self/status") if l.startswith("VmData")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (now + (24 << 20), resource.RLIM_INFINITY))
there = []
try:
    for _ in range(100):
        thread = threading.Thread(target=work, daemon=True)
        threads.start(thread)
        there.append(thread)
except MemoryError:
    pass
while len(begun) < len(there):
    pass
go.set()
for thread in there:
    thread.join()
print(len(there))
"""


def test_a_thread_runs() -> None:
    ran = []
    thread = threading.Thread(target=lambda: ran.append(1))
    threads.start(thread)
    thread.join()
    assert ran == [1]


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts what is mapped on Linux")
def test_under_a_limit_those_that_begin_run_and_the_next_does_not() -> None:
    """24 MiB are room for some stacks of 1 MiB; which of them is the last one differs."""
    done = subprocess.run(
        [sys.executable, "-c", FILLED], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert 1 <= int(done.stdout) < 24


def test_the_size_of_stacks_stays_as_it_was_set() -> None:
    before = threads.stack_size()
    threading.stack_size(1 << 20)
    try:
        for _ in range(2):
            thread = threading.Thread(target=threads.stack_size)
            threads.start(thread)
            thread.join()
            assert threads.stack_size() == 1 << 20
        assert threading.stack_size() == 1 << 20
    finally:
        threading.stack_size(before)
