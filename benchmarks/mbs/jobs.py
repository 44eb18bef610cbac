"""Many small questions, each in a process that may die: then that is the answer."""

import multiprocessing as mp
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch

PATIENCE = 120.0
"""Seconds after which a question has no end."""

FRESH = 300
"""Questions to one process: what they leave behind is gone with it."""


class Died(Exception):  # noqa: N818
    """A question killed its process, or had no end."""


def serve(pipe: Connection, answer: Callable[[Any], Any]) -> None:
    """Answer what comes, in a process of its own, with one thread."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    while (question := pipe.recv()) is not None:
        pipe.send(answer(question))


class Server:
    """A process that answers, and another one after it has died or answered `FRESH` questions."""

    def __init__(self, answer: Callable[[Any], Any], patience: float) -> None:
        self.answer, self.patience, self.count = answer, patience, 0
        self._start()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, self.answer), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, question: Any) -> Any | Died:
        """The answer; `Died` where there is none."""
        self.pipe.send(question)
        try:
            ready = self.pipe.poll(self.patience)
            found = self.pipe.recv() if ready else Died(f"no end after {self.patience:.0f} s")
        except EOFError:
            self.process.join()
            found = Died(f"the process died with {self.process.exitcode}")
        self.count += 1
        if isinstance(found, Died) or self.count % FRESH == 0:
            self.stop()
            self._start()
        return found

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def answers(
    answer: Callable[[Any], Any],
    questions: Iterable[Any],
    patience: float = PATIENCE,
    jobs: int = 1,
) -> Iterator[tuple[Any, Any | Died]]:
    """Each question with its answer, in order.

    Args:
        answer: a function of a module; what it raises kills the process.
        questions: picklable, none of them None.
        patience: seconds after which a question has no end.
        jobs: processes that answer at the same time.
    """
    listed = list(questions)
    idle: SimpleQueue[Server] = SimpleQueue()
    servers = [Server(answer, patience) for _ in range(jobs)]
    for server in servers:
        idle.put(server)

    def ask(question: Any) -> Any | Died:
        server = idle.get()
        try:
            return server.ask(question)
        finally:
            idle.put(server)

    try:
        with ThreadPoolExecutor(jobs) as pool:
            yield from zip(listed, pool.map(ask, listed), strict=True)
    finally:
        for server in servers:
            server.stop()
