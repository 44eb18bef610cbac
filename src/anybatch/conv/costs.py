"""What algorithms take on this machine: measured once, and kept in a file.

    one kernel, so many samples, one algorithm ──> seconds, bytes of workspace

Seconds are those of real runs on random numbers, of which the median counts; long ones are taken as
they are. Workspace is what the algorithm allocates, as the meter counts it, and its own result,
because that is copied to where all samples are; of filters the sum so far is there, too. What an
algorithm does once for all its parts is timed apart, and what it keeps of it is workspace. What a
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
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from math import prod
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from anybatch.conv.algorithms import ALGORITHMS, LAYOUTS, NATIVE, candidates
from anybatch.conv.divide import Part, sizes
from anybatch.conv.fourier import HALVES
from anybatch.conv.problem import Problem
from anybatch.meter import Meter

RUNS = 3
"""Runs of which the median counts."""

LONG = 0.2
"""Seconds after which a first run is taken as it is."""

HOPELESS = 4.0
"""Times what the best known takes for a sample, beyond which more samples are not tried."""

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
        path: of the file; it is made where there is none. Default None: they are kept in memory.
        seconds: that measuring one kernel may go on for; what is left out then is not considered.
    """

    def __init__(self, path: Path | None = None, *, seconds: float = 60.0) -> None:
        self._path, self._seconds = path, seconds
        self._known: dict[tuple[Problem, int, str], Part] = {}
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._open()) as file, file:
                file.execute(TABLE)

    def parts(self, problem: Problem, size: int, policy: str, limit: int) -> list[Part]:
        """Return what is known of a kernel, and measure what is not.

        Args:
            problem: the kernel.
            size: N, the samples of the mini-batch.
            policy: which micro-batches: "all", "powerOfTwo" or "undivided".
            limit: bytes of workspace; an algorithm that needs more for some samples is not tried
                for more of them.
        """
        begin, found = perf_counter(), list[Part]()
        kept = self._kept(problem)
        best = float("inf")
        for name in candidates(problem):
            order = [size] if name == NATIVE else []
            order += [n for n in sizes(policy, size) if n not in order]
            for n in order:
                known = kept.get((n, name)) or self._known.get((problem, n, name))
                if known is None:
                    if perf_counter() - begin > self._seconds and found:
                        break
                    if found and held(problem, n, name) > limit:
                        break
                    known = self._measure(problem, n, name)
                if name == NATIVE and n == size:
                    known = replace(known, workspace=0)  # whatever it is, it is torch's own
                found.append(known)
                if known.workspace > limit:
                    break
                each = known.seconds / n + known.setup / size
                if policy != "all" and each > HOPELESS * best:
                    break
                best = min(best, each)
        return alike(found)

    def _measure(self, problem: Problem, size: int, name: str) -> Part:
        part = Part(size, name, *measure(problem, size, name))
        self._known[problem, size, name] = part
        if self._path is not None:
            wanted = machine(problem.device), _text(problem)
            row = *wanted, size, name, part.seconds, part.workspace, part.setup
            with closing(self._open()) as file, file:
                file.execute("insert or replace into costs values (?, ?, ?, ?, ?, ?, ?)", row)
        return part

    def _kept(self, problem: Problem) -> dict[tuple[int, str], Part]:
        """Return what the file has of a kernel."""
        if self._path is None:
            return {}
        wanted = machine(problem.device), _text(problem)
        with closing(self._open()) as file:
            rows = file.execute(
                "select size, algorithm, seconds, workspace, setup from costs "
                "where machine = ? and problem = ?",
                wanted,
            ).fetchall()
        return {(n, name): Part(n, name, *more) for n, name, *more in rows}

    def _open(self) -> sqlite3.Connection:
        assert self._path is not None
        return sqlite3.connect(self._path, timeout=60.0)


def alike(parts: Sequence[Part]) -> list[Part]:
    """Return parts of which those of one algorithm have one set-up, the shortest measured."""
    setups = {part.algorithm: part.setup for part in sorted(parts, key=lambda p: -p.setup)}
    return [replace(part, setup=setups[part.algorithm]) for part in parts]


def held(problem: Problem, size: int, name: str) -> int:
    """Return the bytes of workspace of one algorithm; nothing is computed for it."""
    with FakeTensorMode():
        return _run(problem, size, name)[2]


def measure(problem: Problem, size: int, name: str) -> tuple[float, int, float]:
    """Return seconds, bytes of workspace and seconds of set-up of one algorithm."""
    work, setup, workspace = _run(problem, size, name)
    device = torch.device(problem.device)
    once = _taken(setup, device) if ALGORITHMS[name].once else 0.0
    return _taken(work, device), workspace, once


def _taken(work: Callable[[], Tensor], device: torch.device) -> float:
    """Return the median of the seconds that it takes."""

    def once() -> float:
        _finish(device)
        begin = perf_counter()
        work()
        _finish(device)
        return perf_counter() - begin

    first = once()
    taken = [first] if first > LONG else sorted(once() for _ in range(RUNS))
    return taken[len(taken) // 2]


def _run(
    problem: Problem, size: int, name: str
) -> tuple[Callable[[], Tensor], Callable[[], Tensor], int]:
    """Run an algorithm on random numbers, as two parts where they are summed.

    Returns:
        What runs a part again, what runs its set-up, and its workspace.
    """
    dtype, device = getattr(torch, problem.dtype), torch.device(problem.device)
    one, other = (_made(problem, shape, dtype, device) for shape in problem.operands(size))
    way = ALGORITHMS[name]
    with Meter(device) as meter:
        if problem.kernel == "filter":
            total = way.add(problem, way.add(problem, None, one, other), one, other)
            way.finish(problem, total)
        else:
            shared = way.shared(problem, other)
            way.part(problem, one, shared)
    if problem.kernel == "filter":
        summed = 2 * prod(problem.weight) * dtype.itemsize if dtype in HALVES else 0
        work = partial(way.add, problem, None, one, other)
        setup = partial(way.finish, problem, total)
        return work, setup, meter.peak + summed
    work, setup = partial(way.part, problem, one, shared), partial(way.shared, problem, other)
    return work, setup, meter.peak


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
