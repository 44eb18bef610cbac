"""Real processes on gloo, started once and asked many times: what several ranks are tested with."""

from __future__ import annotations

import atexit
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.frames import roomy

PROCESSES = mp.get_context("forkserver")
"""Starts processes that have torch imported already, which is most of what such a start costs."""
STAND_IN = [name for name in ("tests.devices.stand_in",) if name in sys.modules]
"""It must be there before torch is."""
IMPORTED = "torch._dynamo", "anybatch.engine.engine", "tests.oracle", "tests.pool", "tests.frozen"
PROCESSES.set_forkserver_preload([*STAND_IN, *IMPORTED])

PATIENCE = 120
"""Seconds after which a rank that does not answer counts as hanging."""


class Pool:
    """Ranks that run functions of modules that they can import.

    Args:
        size: how many.
    """

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        meet = str(Path(self._folder.name) / "meet")
        self.failed = False
        self._ends: list[Connection] = []
        self.processes = []
        for rank in range(size):
            mine, its = PROCESSES.Pipe()
            process = PROCESSES.Process(target=_serve, args=(rank, size, meet, its), daemon=True)
            process.start()
            self._ends.append(mine)
            self.processes.append(process)

    def each(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what ``work(rank, size, *args)`` gives on each rank, an exception as itself."""
        for end in self._ends:
            end.send((work, args))
        found = [self._answer(rank) for rank in range(len(self._ends))]
        self.failed |= any(isinstance(one, BaseException) for one in found)
        return found

    def run(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        """Do the same, and fail where any rank does."""
        found = self.each(work, *args)
        failed = [(rank, one) for rank, one in enumerate(found) if isinstance(one, BaseException)]
        assert not failed, "\n".join(
            f"rank {r}: {e!r} {getattr(e, '__notes__', '')}" for r, e in failed
        )
        return found

    def close(self) -> None:
        """End all of them."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self._folder.cleanup()

    def _answer(self, rank: int) -> Any:
        end = self._ends[rank]
        if not end.poll(PATIENCE):
            return TimeoutError(f"rank {rank} does not answer")
        try:
            return end.recv()
        except EOFError:
            return EOFError(f"rank {rank} is gone")


WAITING: dict[int, Pool] = {}
"""Number of ranks -> those that no test uses at present."""


@contextmanager
def ranks(size: int, *, fresh: bool = False) -> Iterator[Pool]:
    """Use `size` ranks that wait, or start them; if nothing failed on them, they wait again.

    `fresh` ones are used only here: they are measured, end, or have settings of their own.
    """
    pool = None if fresh else WAITING.pop(size, None)
    pool = pool or Pool(size)
    try:
        yield pool
    finally:
        alive = all(process.is_alive() for process in pool.processes)
        if fresh or pool.failed or not alive or size in WAITING:
            pool.close()
        else:
            WAITING[size] = pool


@atexit.register
def _end() -> None:
    for pool in WAITING.values():
        pool.close()


def _serve(rank: int, size: int, meet: str, end: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=size)
    while True:
        work, args = end.recv()
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        try:
            found = roomy(work, rank, size, *args)
        except BaseException as error:
            error.add_note(traceback.format_exc())
            error.__traceback__ = None
            found = error
        end.send(found)
