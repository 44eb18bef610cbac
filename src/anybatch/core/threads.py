"""Threads that begin or fail with an error, and a pool of threads that outlives a step.

``Thread.start`` waits until the new thread says that it runs. Where the system has a stack for it,
and Python no memory for its first frame, it dies before it can say so, and ``start`` waits without
end (under RLIMIT_DATA, where full stacks count). So the initial memory of a thread is requested
from the system first, and released at once.

    ask for a stack and a little more ──> there ──> given back ──> start
                                      └─> not there: MemoryError
"""

from __future__ import annotations

import _thread
import contextvars
import mmap
import os
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue

if sys.platform != "win32":
    import resource

FRAMES = 4 << 20
"""Initial bytes of a thread in addition to its stack: its first frames, and its heap."""

USUAL = 8 << 20
"""Bytes of a stack where the system sets no limit."""

SMALL = 256 << 10
"""Bytes of the stack of a thread that copies on a host: a limit of the system counts it in full.

It touches 12 KiB of it (`benchmarks/outofcore/floors`).
"""


def start(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        MemoryError: there is no memory for it to begin.
        RuntimeError: the system starts no more threads.
    """
    _require(_stack())
    thread.start()


def _require(stack: int) -> None:
    if sys.platform != "win32":  # which knows no limits of this kind
        try:
            mmap.mmap(-1, stack + FRAMES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        except OSError as error:
            raise MemoryError(
                "there is no memory for the stack and the first frame of a new thread"
            ) from error


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


# Pool of threads that outlives a step: the micro-batches of the next one run in those of this one.
#
# Libraries keep state by thread: cuDNN the plan for a shape, cuBLAS a handle, and torch the loaded
# kernels. A thread that is new in each step begins without.
#
#     step 1:  start 3 threads   run 3 tasks   idle: 3
#     step 2:                    run 5 tasks   (2 more are started)   idle: 5


class Task:
    """Work item for a thread of the pool.

    Args:
        work: called once, in a context without variables; must not raise.
    """

    __slots__ = ("done", "work")

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.done = threading.Lock()
        self.done.acquire()

    def wait(self) -> None:
        """Return when it has ended."""
        with self.done:
            pass


Idle = list[SimpleQueue[Task]]

_IDLE: tuple[Idle, Idle] = [], []
"""One queue for each thread that waits: of usual stacks, and of small ones.

Lists are changed by one thread at a time in Python.
"""


def _forget() -> None:
    for idle in _IDLE:
        idle.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)  # the threads are not there


def start_task(work: Callable[[], None], *, small: bool = False) -> Task:
    """Give work to a thread that waits, or to a new one.

    Args:
        work: as `Task` takes it.
        small: it copies on a host, so that a stack of `SMALL` bytes is enough.

    Raises:
        MemoryError: there is no memory for a new thread to begin.
        RuntimeError: the system starts no more threads.
    """
    task, idle = Task(work), _IDLE[small]
    try:
        tasks = idle.pop()
    except IndexError:
        tasks = SimpleQueue()
        if small:
            _require(SMALL)
            _start_small(tasks, idle)
        else:
            start(threading.Thread(target=_serve, args=(tasks, idle), daemon=True))
    tasks.put(task)
    return task


def _start_small(tasks: SimpleQueue[Task], idle: Idle) -> None:
    """Start a thread with a stack of at most `SMALL` bytes.

    The size is that of all threads that start meanwhile, so nothing waits here, as
    ``Thread.start`` does.
    """
    size = stack_size()
    threading.stack_size(min(size or SMALL, SMALL))
    try:
        _thread.start_new_thread(_serve, (tasks, idle))
    finally:
        threading.stack_size(size)


def idle() -> int:
    """Return how many threads wait for work."""
    return sum(map(len, _IDLE))


def _serve(tasks: SimpleQueue[Task], idle: Idle) -> None:
    while True:
        task = tasks.get()
        done = task.done
        contextvars.Context().run(task.work)
        del task  # or the tensors of a step would live until the next one
        idle.append(tasks)
        done.release()
