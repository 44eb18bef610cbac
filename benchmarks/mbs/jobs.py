"""Many small questions, one at a time, in a process that may die: then that is the answer."""

import multiprocessing as mp
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
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


def start(answer: Callable[[Any], Any]) -> tuple[BaseProcess, Connection]:
    """A process that answers, and the way to it."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, answer), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def answers(
    answer: Callable[[Any], Any], questions: Iterable[Any], patience: float = PATIENCE
) -> Iterator[tuple[Any, Any | Died]]:
    """Each question with its answer, in order.

    Args:
        answer: a function of a module; what it raises kills the process.
        questions: picklable, none of them None.
        patience: seconds after which a question has no end.
    """
    process, pipe = start(answer)
    for index, question in enumerate(questions, 1):
        pipe.send(question)
        try:
            found = pipe.recv() if pipe.poll(patience) else Died(f"no end after {patience:.0f} s")
        except EOFError:
            process.join()
            found = Died(f"the process died with {process.exitcode}")
        yield question, found
        if isinstance(found, Died) or index % FRESH == 0:
            process.kill()
            process.join()
            process, pipe = start(answer)
    process.kill()
    process.join()
