"""Costs of algorithms on this machine: measured once, and stored in a file.

    one kernel, so many samples, one algorithm ──> seconds, bytes of workspace

A file holds the measurements of one type of machine with one version of torch, and may be copied to
equal ones. Several processes may use it at a time. torch's kernel on all samples has no workspace:
it returns the result itself.

Source: u-cuDNN, section III-D: benchmarks are cached in memory and in a file-based database.
"""

from __future__ import annotations

import json
import sqlite3
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, astuple, replace
from pathlib import Path
from time import perf_counter
from typing import Protocol

from anybatch.conv.measuring import duel, held, machine, measure
from anybatch.conv.problem import Problem
from anybatch.conv.search import Search
from anybatch.core.divisions import Configuration, KernelPart
from anybatch.errors import StoreError


class Tell(Protocol):
    """Callback that receives the kernel and algorithm measured next."""

    def __call__(self, problem: Problem, size: int, algorithm: str) -> None:
        """Take in a kernel, its samples and an algorithm, which are measured next."""

    def over(self) -> None:
        """Take in that all of a kernel was measured."""


TABLE = """
create table if not exists costs (
    machine text, problem text, size integer, algorithm text,
    seconds real, workspace integer, setup real,
    primary key (machine, problem, size, algorithm)
)
"""


class Costs:
    """The parts that were measured.

    Args:
        path: of the file, created if missing. Default None: they are stored in memory.
        seconds: for measuring one kernel; configurations not measured by then are not considered.
        tell: called with the next measurement. Default: not called.

    Raises:
        StoreError: there is no such file, and none can be made.
    """

    def __init__(
        self, path: Path | None = None, *, seconds: float = 60.0, tell: Tell | None = None
    ) -> None:
        self._path, self._seconds, self._tell = path, seconds, tell
        self._parts: dict[tuple[Problem, int, str], KernelPart] = {}
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._open()) as file, file:
                file.execute(TABLE)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                "measurements of convolutions must be stored in a file that can be written, and "
                f"{path} cannot ({error}): name another one, or give cache=False"
            ) from error

    def parts(
        self, problem: Problem, size: int, policy: str, limit: int, seconds: float | None = None
    ) -> list[KernelPart]:
        """Return the measurements of a kernel, and run the missing ones.

        Args:
            problem: the kernel.
            size: N, the samples of the mini-batch.
            policy: which micro-batches: "all", "powerOfTwo" or "undivided".
            limit: bytes of workspace; an algorithm that needs more for some samples is not tried
                for more of them.
            seconds: that measuring it may go on for. Default None: as many as for any.
        """
        most = self._seconds if seconds is None else seconds

        def fits(n: int, name: str) -> bool:
            return held(problem, n, name) <= limit

        search = Search(problem, policy, fits, limit, perf_counter() + most)
        found = search.run(size, self._stored(problem) | self._here(problem), self._measure)
        if self._tell is not None:
            self._tell.over()
        return alike(found)

    def duel(self, problem: Problem, configuration: Configuration) -> float:
        """Return the seconds of a configuration relative to torch's own kernel, run alternately.

        Parts were measured one by one, and other work may have disturbed some of them. Both run
        alternating are disturbed equally.
        """
        name, size = f"duel: {configuration}", configuration.size
        cached = (self._stored(problem) | self._here(problem)).get((size, name))
        if cached is None:
            if self._tell is not None:
                self._tell(problem, size, str(configuration))
            cached = KernelPart(size, name, duel(problem, configuration), 0)
            self._parts[problem, size, name] = cached
            self._keep(problem, cached)
            if self._tell is not None:
                self._tell.over()
        return cached.seconds

    def _measure(self, problem: Problem, size: int, name: str) -> KernelPart:
        if self._tell is not None:
            self._tell(problem, size, name)
        part = KernelPart(size, name, *measure(problem, size, name))
        self._parts[problem, size, name] = part
        self._keep(problem, part)
        return part

    def _keep(self, problem: Problem, part: KernelPart) -> None:
        """Write a part to the file; where that fails nothing is lost but for other processes."""
        if self._path is None:
            return
        row = machine(problem.device), _text(problem), *astuple(part)
        try:
            with closing(self._open()) as file, file:
                file.execute("insert or replace into costs values (?, ?, ?, ?, ?, ?, ?)", row)
        except sqlite3.Error as error:
            self._lost(error)

    def _lost(self, error: sqlite3.Error) -> None:
        """Go on without the file."""
        warnings.warn(
            f"measurements of convolutions are no longer stored in {self._path} ({error})",
            stacklevel=2,
        )
        self._path = None

    def _here(self, problem: Problem) -> dict[tuple[int, str], KernelPart]:
        """Return the measurements of a kernel from this process."""
        return {(n, name): part for (p, n, name), part in self._parts.items() if p == problem}

    def _stored(self, problem: Problem) -> dict[tuple[int, str], KernelPart]:
        """Return the measurements of a kernel from the file."""
        if self._path is None:
            return {}
        wanted = machine(problem.device), _text(problem)
        try:
            with closing(self._open()) as file:
                rows = file.execute(
                    "select size, algorithm, seconds, workspace, setup from costs "
                    "where machine = ? and problem = ?",
                    wanted,
                ).fetchall()
        except sqlite3.Error as error:
            self._lost(error)
            return {}
        return {(n, name): KernelPart(n, name, *more) for n, name, *more in rows}

    def _open(self) -> sqlite3.Connection:
        assert self._path is not None
        return sqlite3.connect(self._path, timeout=60.0)


def alike(parts: Sequence[KernelPart]) -> list[KernelPart]:
    """Return parts of which those of one algorithm have one set-up, the shortest measured."""
    setups = {part.algorithm: part.setup for part in sorted(parts, key=lambda p: -p.setup)}
    return [replace(part, setup=setups[part.algorithm]) for part in parts]


def _text(problem: Problem) -> str:
    return json.dumps(asdict(problem))
