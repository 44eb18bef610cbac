"""What algorithms take on this machine: measured once, and kept in a file.

    one kernel, so many samples, one algorithm ──> seconds, bytes of workspace

Seconds are those of real runs on random numbers, of which the median counts; long ones are taken as
they are. Workspace is what the algorithm allocates, as the meter counts it, and its own result,
because that is copied to where all samples are; of filters the sum so far is there, too. What a
kernel allocates inside itself the meter does not see. torch's kernel on all samples has none: what
it returns is the result.

A file holds what was measured on one kind of machine with one version of torch, and may be copied
to others like it. Several processes may use it at a time.

Source: u-cuDNN, section III-D: benchmarks are cached in memory and in a file-based database.
"""

from __future__ import annotations

import json
import platform
import sqlite3
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, astuple, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from anybatch.conv.algorithms import ALGORITHMS, LAYOUTS, NATIVE, candidates
from anybatch.conv.divide import Part, sizes
from anybatch.conv.problem import Problem
from anybatch.errors import StoreError
from anybatch.meter import Meter

RUNS = 3
"""Runs of which the median counts."""

LONG = 0.2
"""Seconds after which a first run is taken as it is."""

HOPELESS = 4.0
"""Times what the best known takes for a sample, beyond which more samples are not tried."""


class Tell(Protocol):
    """Is told what is measured."""

    def __call__(self, problem: Problem, size: int, algorithm: str) -> None:
        """Take in a kernel, its samples and an algorithm, which are measured next."""

    def over(self) -> None:
        """Take in that all of a kernel was measured."""


TABLE = """
create table if not exists parts (
    machine text, problem text, size integer, algorithm text, seconds real, workspace integer,
    primary key (machine, problem, size, algorithm)
)
"""


class Costs:
    """The parts that were measured.

    Args:
        path: of the file; it is made where there is none. Default None: they are kept in memory.
        seconds: that measuring one kernel may go on for; what is left out then is not considered.
        tell: is told what is measured next. Default: nobody is.

    Raises:
        StoreError: there is no such file, and none can be made.
    """

    def __init__(
        self, path: Path | None = None, *, seconds: float = 60.0, tell: Tell | None = None
    ) -> None:
        self._path, self._seconds, self._tell = path, seconds, tell
        self._known: dict[tuple[Problem, int, str], Part] = {}
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._open()) as file, file:
                file.execute(TABLE)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                f"what convolutions cost is kept in a file that can be written, and {path} cannot "
                f"({error}): name another one, or give cache=False"
            ) from error

    def parts(
        self, problem: Problem, size: int, policy: str, limit: int, seconds: float | None = None
    ) -> list[Part]:
        """Return what is known of a kernel, and measure what is not.

        Args:
            problem: the kernel.
            size: N, the samples of the mini-batch.
            policy: which micro-batches: "all", "powerOfTwo" or "undivided".
            limit: bytes of workspace; an algorithm that needs more for some samples is not tried
                for more of them.
            seconds: that measuring it may go on for. Default None: as many as for any.
        """
        begin, found = perf_counter(), list[Part]()
        most = self._seconds if seconds is None else seconds
        kept = self._kept(problem)
        best = float("inf")
        for name in candidates(problem):
            order = [size] if name == NATIVE else []
            order += [n for n in sizes(policy, size) if n not in order]
            for n in order:
                known = kept.get((n, name)) or self._known.get((problem, n, name))
                if known is None:
                    if perf_counter() - begin > most and found:
                        break
                    if found and held(problem, n, name) > limit:
                        break
                    known = self._measure(problem, n, name)
                if name == NATIVE and n == size:
                    known = replace(known, workspace=0)  # whatever it is, it is torch's own
                found.append(known)
                if known.workspace > limit:
                    break
                each = known.seconds / n
                if policy != "all" and each > HOPELESS * best:
                    break
                best = min(best, each)
        if self._tell is not None:
            self._tell.over()
        return found

    def _measure(self, problem: Problem, size: int, name: str) -> Part:
        if self._tell is not None:
            self._tell(problem, size, name)
        seconds, workspace = measure(problem, size, name)
        part = Part(size, name, seconds, workspace)
        self._known[problem, size, name] = part
        self._keep(problem, part)
        return part

    def _keep(self, problem: Problem, part: Part) -> None:
        """Write a part to the file; where that fails nothing is lost but for other processes."""
        if self._path is None:
            return
        row = machine(problem.device), _text(problem), *astuple(part)
        try:
            with closing(self._open()) as file, file:
                file.execute("insert or replace into parts values (?, ?, ?, ?, ?, ?)", row)
        except sqlite3.Error as error:
            warnings.warn(
                f"what convolutions cost is not written to {self._path} from here on ({error})",
                stacklevel=2,
            )
            self._path = None

    def _kept(self, problem: Problem) -> dict[tuple[int, str], Part]:
        """Return what the file has of a kernel."""
        if self._path is None:
            return {}
        wanted = machine(problem.device), _text(problem)
        with closing(self._open()) as file:
            rows = file.execute(
                "select size, algorithm, seconds, workspace from parts "
                "where machine = ? and problem = ?",
                wanted,
            ).fetchall()
        return {(n, name): Part(n, name, t, w) for n, name, t, w in rows}

    def _open(self) -> sqlite3.Connection:
        assert self._path is not None
        return sqlite3.connect(self._path, timeout=60.0)


def held(problem: Problem, size: int, name: str) -> int:
    """Return the bytes of workspace of one algorithm; nothing is computed for it."""
    with FakeTensorMode():
        return _run(problem, size, name)[1]


def measure(problem: Problem, size: int, name: str) -> tuple[float, int]:
    """Return the seconds and the bytes of workspace of one algorithm."""
    work, workspace = _run(problem, size, name)
    device = torch.device(problem.device)

    def once() -> float:
        _finish(device)
        begin = perf_counter()
        work()
        _finish(device)
        return perf_counter() - begin

    first = once()
    taken = [first] if first > LONG else sorted(once() for _ in range(RUNS))
    return taken[len(taken) // 2], workspace


def _run(problem: Problem, size: int, name: str) -> tuple[Callable[[], Tensor], int]:
    """Run an algorithm on random numbers; return what runs it again, and its workspace."""
    dtype, device = getattr(torch, problem.dtype), torch.device(problem.device)
    one, other = (_made(problem, shape, dtype, device) for shape in problem.operands(size))
    work = partial(ALGORITHMS[name], problem, one, other)
    with Meter(device) as meter:
        result = work()
    return work, int(meter.peak + (result.nbytes if problem.kernel == "filter" else 0))


def machine(device: str) -> str:
    """Return what times depend on beside the kernel."""
    processor = platform.processor() or platform.machine()
    named = torch.cuda.get_device_name() if device == "cuda" else processor
    return json.dumps([torch.__version__, device, named, torch.get_num_threads()])


def _made(
    problem: Problem, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    found = torch.randn(shape, device=device).to(dtype)
    if problem.layout == "channels_last" and shape != problem.weight and len(shape) in LAYOUTS:
        return found.contiguous(memory_format=LAYOUTS[len(shape)])
    return found


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _text(problem: Problem) -> str:
    return json.dumps(asdict(problem))
