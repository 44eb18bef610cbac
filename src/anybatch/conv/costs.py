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
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from anybatch.conv.algorithms import ALGORITHMS, LAYOUTS, NATIVE, candidates, native
from anybatch.conv.divide import Configuration, Part, sizes
from anybatch.conv.execute import run
from anybatch.conv.fourier import HALVES
from anybatch.conv.problem import Problem
from anybatch.errors import StoreError
from anybatch.meter import Meter

RUNS = 3
"""Runs of which the median counts."""

DUELS = 5
"""Turns of a duel."""

LONG = 0.2
"""Seconds after which a first run is taken as it is."""

HOPELESS = 4.0
"""Times what the best known takes for a sample, beyond which more samples are not tried."""


ALGORITHMS_ARE = 2
"""Raised whenever an algorithm takes other seconds or workspace than before."""


class Tell(Protocol):
    """Is told what is measured."""

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
        most = self._seconds if seconds is None else seconds
        search = _Search(problem, policy, limit, perf_counter() + most)
        found = search.run(size, self._kept(problem) | self._here(problem), self._measure)
        if self._tell is not None:
            self._tell.over()
        return alike(found)

    def duel(self, problem: Problem, configuration: Configuration) -> float:
        """Return what a configuration takes, in what torch's own kernel takes, run in turns.

        Parts were measured one by one, and other work may have been beside some of them. Of both
        run in turns that is not so.
        """
        name, size = f"duel: {configuration}", configuration.size
        known = (self._kept(problem) | self._here(problem)).get((size, name))
        if known is None:
            if self._tell is not None:
                self._tell(problem, size, str(configuration))
            known = Part(size, name, duel(problem, configuration), 0)
            self._known[problem, size, name] = known
            self._keep(problem, known)
            if self._tell is not None:
                self._tell.over()
        return known.seconds

    def _measure(self, problem: Problem, size: int, name: str) -> Part:
        if self._tell is not None:
            self._tell(problem, size, name)
        part = Part(size, name, *measure(problem, size, name))
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
                file.execute("insert or replace into costs values (?, ?, ?, ?, ?, ?, ?)", row)
        except sqlite3.Error as error:
            warnings.warn(
                f"what convolutions cost is not written to {self._path} from here on ({error})",
                stacklevel=2,
            )
            self._path = None

    def _here(self, problem: Problem) -> dict[tuple[int, str], Part]:
        """Return what this process has measured of a kernel."""
        return {(n, name): part for (p, n, name), part in self._known.items() if p == problem}

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


@dataclass(frozen=True)
class _Search:
    """What of a kernel is worth measuring: the most promising algorithms first.

    Torch's own on all samples is what all others must beat. Each algorithm is tried on the fewest
    samples; then those that were fastest for a sample come first, on more and more of them, until
    they are hopeless beside the best, need too much, or the time is over.
    """

    problem: Problem
    policy: str
    limit: int
    until: float

    def run(
        self,
        size: int,
        known: Mapping[tuple[int, str], Part],
        measure: Callable[[Problem, int, str], Part],
    ) -> list[Part]:
        """Return what is known and what is measured now."""
        steps, found = sizes(self.policy, size), dict[tuple[int, str], Part]()
        each = dict[str, float]()

        def goes_on(n: int, name: str) -> bool:
            """Measure one more, and say whether more samples of it may be worth it."""
            part = known.get((n, name))
            if part is None and found and not self._affords(n, name, each):
                return False
            part = part or measure(self.problem, n, name)
            if name == NATIVE and n == size:
                part = replace(part, workspace=0)  # whatever it is, it is torch's own
            found[n, name] = part
            each[name] = part.seconds / n + part.setup / size
            best = min(each.values())
            hopeless = self.policy != "all" and each[name] > HOPELESS * best
            return part.workspace <= self.limit and not hopeless

        goes_on(size, NATIVE)
        names = [name for name in candidates(self.problem) if name != NATIVE]
        least = steps[0]
        worth = [name for name in names if goes_on(least, name)]
        for name in sorted([NATIVE, *worth], key=lambda name: each[name]):
            for n in steps:
                if (n, name) not in found and not goes_on(n, name):
                    break
        return list(found.values())

    def _affords(self, n: int, name: str, each: Mapping[str, float]) -> bool:
        """Say whether there is room for one more, and time: it takes what others do, or less."""
        expected = n * each.get(name, 0.0)
        return perf_counter() + expected <= self.until and (
            held(self.problem, n, name) <= self.limit
        )


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


def duel(problem: Problem, configuration: Configuration) -> float:
    """Return the median of the ratios of seconds, of a configuration to torch's own kernel."""
    dtype, device = getattr(torch, problem.dtype), torch.device(problem.device)
    shapes = problem.operands(configuration.size)
    one, other = (_made(problem, shape, dtype, device) for shape in shapes)
    strides = native(problem, one, other).stride()
    ours = partial(run, problem, configuration, (one, other), strides)
    own = partial(native, problem, one, other)
    pairs = [(_seconds(own, device), _seconds(ours, device)) for _ in range(DUELS)]
    return sorted(ours / own for own, ours in pairs)[DUELS // 2]


def _seconds(work: Callable[[], Tensor], device: torch.device) -> float:
    """Return what it takes."""
    _finish(device)
    begin = perf_counter()
    work()
    _finish(device)
    return perf_counter() - begin


def _taken(work: Callable[[], Tensor], device: torch.device) -> float:
    """Return the median of the seconds that it takes."""
    first = _seconds(work, device)
    taken = [first] if first > LONG else sorted(_seconds(work, device) for _ in range(RUNS))
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
    return json.dumps([torch.__version__, device, named, torch.get_num_threads(), ALGORITHMS_ARE])


def _made(
    problem: Problem, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    dice = torch.Generator(device).manual_seed(0)  # not the person's, which a step may draw from
    found = torch.randn(shape, device=device, generator=dice).to(dtype)
    if problem.layout == "channels_last" and shape != problem.weight and len(shape) in LAYOUTS:
        return found.contiguous(memory_format=LAYOUTS[len(shape)])
    return found


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _text(problem: Problem) -> str:
    return json.dumps(asdict(problem))
