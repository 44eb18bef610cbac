"""A thread that copies while the lane with the token computes.

A copy to a file or from it waits for the kernel of the system, not for Python: the thread releases
the interpreter lock meanwhile. Jobs are done in the order in which they were started, so a block is
written before it is read back. Where the device has streams they run on one of their own, which
waits for all earlier kernels.

    lane with the token:  kernels of lane 1 ....... kernels of lane 2 ....... kernels of lane 3
    this thread:          lane 0 goes, lane 2 comes │ lane 1 goes, lane 3 comes
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from queue import SimpleQueue
from typing import Any

import torch

from anybatch.core import accelerator, workers
from anybatch.core.undo import uninterrupted


class Job:
    """A copy on its way.

    Attributes:
        work: the function that copies; removed by the caller when it has ended.
        done: it has ended.
        error: the exception that it raised, or None.
    """

    __slots__ = ("after", "done", "error", "work")

    def __init__(self, work: Callable[[], None], after: Any) -> None:
        self.work: Callable[[], None] | None = work
        self.after = after
        self.done = False
        self.error: BaseException | None = None


class Copier:
    """Does jobs in order, in a thread of the pool from the first of them on, or before.

    Where no thread can be started, the caller does the job.

    Args:
        device: the other side of a copy from or to the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._done = threading.Condition()
        self._thread: workers.Task | None = None
        self._device, self._there = device, accelerator.of(device)
        self._stream: Any = None

    def begin(self) -> None:
        """Have the thread, where it is not there yet, while there is memory for it."""
        if self._thread is None:
            with uninterrupted(), suppress(MemoryError, RuntimeError):
                self._thread = workers.start(self._run)

    def start(self, work: Callable[[], None]) -> Job:
        """Have it done when all earlier jobs are."""
        after = None
        if self._there.streams:
            after = self._there.current_stream(self._device).record_event()
            if self._stream is None:
                self._stream = self._there.stream(self._device)
        job = Job(work, after)
        self.begin()
        if self._thread is None:
            self._do(job)
        else:
            self._jobs.put(job)
        return job

    def wait(self, job: Job) -> None:
        """Return when it has ended.

        Raises:
            BaseException: the exception that it raised.
        """
        if not job.done:
            with self._done:
                self._done.wait_for(lambda: job.done)
        if job.error is not None:
            raise job.error

    def close(self) -> None:
        """Return when all jobs have ended, and the thread waits for others."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.wait()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            self._do(job)
            del job

    def _do(self, job: Job) -> None:
        try:
            assert job.work is not None
            with nullcontext() if self._stream is None else self._there.on(self._stream):
                if job.after is not None:
                    self._stream.wait_event(job.after)
                job.work()
                if self._stream is not None:
                    self._stream.synchronize()
        except BaseException as error:
            job.error = error
        with self._done:
            job.done = True
            self._done.notify_all()
