"""Pool of threads that outlives a step: the micro-batches of the next one run in those of this one.

Libraries keep state by thread: cuDNN the plan for a shape, cuBLAS a handle, and torch the loaded
kernels. A thread that is new in each step begins without.

    step 1:  start 3 threads   run 3 tasks   idle: 3
    step 2:                    run 5 tasks   (2 more are started)   idle: 5
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

from anybatch.core import threads


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


_IDLE: list[SimpleQueue[Task]] = []
"""One queue for each thread that waits; lists are changed by one thread at a time in Python."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_IDLE.clear)  # the threads are not there


def start(work: Callable[[], None]) -> Task:
    """Give work to a thread that waits, or to a new one.

    Args:
        work: as `Task` takes it.

    Raises:
        MemoryError: there is no memory for a new thread to begin.
        RuntimeError: the system starts no more threads.
    """
    task = Task(work)
    try:
        tasks = _IDLE.pop()
    except IndexError:
        tasks = SimpleQueue()
        threads.start(threading.Thread(target=_serve, args=(tasks,), daemon=True))
    tasks.put(task)
    return task


def idle() -> int:
    """Return how many threads wait for work."""
    return len(_IDLE)


def _serve(tasks: SimpleQueue[Task]) -> None:
    while True:
        task = tasks.get()
        done = task.done
        contextvars.Context().run(task.work)
        del task  # or the tensors of a step would live until the next one
        _IDLE.append(tasks)
        done.release()
