"""Stores for what is paged, slow and broken ones too, and copies that end by the dice."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from anybatch.memory.stores import FileStore, HostStore, Store


def host() -> Store:
    """Return a store in memory of the host."""
    return HostStore()


def stores(tmp_path: Path) -> dict[str, Store]:
    """Return a store of each way."""
    return {"host": HostStore(), "file": FileStore(tmp_path)}


class Slow(HostStore):
    """Copies only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.fails = False

    def writing(self, key: Hashable, storage: Any) -> Callable[[], None]:
        copy = super().writing(key, storage)

        def late() -> None:
            assert self.go.wait(10)
            if self.fails:
                raise OSError("no space left")
            copy()

        return late


class Broken(HostStore):
    """Fails at what it is told to."""

    def __init__(self, *ways: str) -> None:
        super().__init__()
        self.ways = ways

    def writing(self, key: Hashable, storage: Any) -> Callable[[], None]:
        return self.fails if "out" in self.ways else super().writing(key, storage)

    def reading(self, key: Hashable, storage: Any) -> Callable[[], None]:
        return self.fails if "back" in self.ways else super().reading(key, storage)

    def fails(self) -> None:
        raise OSError("the disk is gone")


class Whenever:
    """Stands for `Copier`, and for its jobs: one ends when it is waited for, or by the dice.

    Whoever asks whether the next one has ended throws them. So copies end as early or as late as
    they can, between any two things that are done, without a thread.
    """

    def __init__(self, chance: random.Random, share: float) -> None:
        self.chance, self.share = chance, share
        self.jobs: deque[Ends] = deque()

    def begin(self) -> None:
        pass

    def start(self, work: Callable[[], None]) -> Ends:
        self.jobs.append(Ends(self, work))
        return self.jobs[-1]

    def wait(self, job: Ends) -> None:
        while not job.ended:
            self.end()

    def end(self) -> None:
        job = self.jobs.popleft()
        assert job.work is not None
        job.work()
        job.ended = True

    def close(self) -> None:
        while self.jobs:
            self.end()


class Ends:
    """Stands for a `Job`."""

    def __init__(self, copier: Whenever, work: Callable[[], None]) -> None:
        self.copier, self.ended, self.error = copier, False, None
        self.work: Callable[[], None] | None = work

    @property
    def done(self) -> bool:
        copier = self.copier
        if not self.ended and copier.jobs[0] is self and copier.chance.random() < copier.share:
            copier.end()
        return self.ended
