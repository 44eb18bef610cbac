"""Measurement of algorithms: seconds and bytes on this machine, searched, measured and stored.

    one kernel, so many samples, one algorithm ──> seconds, bytes of workspace

A file holds the measurements of one type of machine with one version of torch, and may be copied to
equal ones. Several processes may use it at a time. torch's kernel on all samples has no workspace:
it returns the result itself.

Source: u-cuDNN, section III-D: benchmarks are cached in memory and in a file-based database.
"""

from __future__ import annotations

import json
import platform
import sqlite3
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from functools import lru_cache, partial
from math import inf, prod
from pathlib import Path
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from anybatch.conv.algorithms import (
    ALGORITHMS,
    LAYOUTS,
    NATIVE,
    NoPlanError,
    candidates,
    native,
    run,
)
from anybatch.conv.divide import sizes
from anybatch.conv.fourier import HALVES
from anybatch.conv.problem import Problem
from anybatch.core import accelerator
from anybatch.core.accelerator import finish
from anybatch.core.accelerators import kernel_switches
from anybatch.core.plan_sections import Configuration, KernelPart
from anybatch.errors import StoreError
from anybatch.memory.fakes import interrupted_between_functions
from anybatch.memory.meter import Meter


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
        """Return the measurements of a kernel, and run the missing ones for which there is time.

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
        return alike(found) or [KernelPart(size, NATIVE, 0.0, 0)]

    def duel(self, problem: Problem, configuration: Configuration, *, run: bool = True) -> float:
        """Return the seconds of a configuration relative to torch's own kernel, run alternately.

        Where there was no duel, and none is to `run`, it has lost: infinity.

        Parts were measured one by one, and other work may have disturbed some of them. Both run
        alternating are disturbed equally.
        """
        name, size = f"duel: {configuration}", configuration.size
        cached = (self._stored(problem) | self._here(problem)).get((size, name))
        if cached is None and not run:
            return inf
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


# Measurement of an algorithm: seconds and bytes of a real run on random numbers.
#
# Of the seconds of a few runs the median counts; long ones are not repeated. Workspace is what the
# algorithm allocates, as the meter counts it, and its own result, because that is copied to where
# all samples are; of filters the sum so far is there, too. The set-up of an algorithm for all its
# parts is timed separately, and its results are workspace. The meter does not count allocations
# inside a kernel; on CUDA the allocator does.
#
# Source: u-cuDNN, section III-D.

RUNS = 3
"""Runs of which the median counts."""

DUELS = 5
"""Pairs of a comparison."""

METERED = 2
"""Runs before those that are timed, in which memory is counted; one where nothing is summed."""

LONG = 0.2
"""Seconds after which a first run is taken as it is."""

REVISION = 2
"""Raised whenever an algorithm takes other seconds or workspace than before."""


@lru_cache(maxsize=1 << 14)
def held(problem: Problem, size: int, name: str) -> int:
    """Return the bytes of workspace of one algorithm, by a dry run.

    It is called for every limit. On CUDA libraries allocate more, which only a real run shows.
    """
    with interrupted_between_functions(), FakeTensorMode():
        return _run(problem, size, name)[2]


def measure(problem: Problem, size: int, name: str) -> tuple[float, int, float]:
    """Return seconds, bytes of workspace and seconds of set-up of one algorithm.

    One that there is none of takes for ever.
    """
    device = torch.device(problem.device)
    try:
        work, setup, workspace = _run(problem, size, name)
    except NoPlanError:
        return inf, 0, 0.0
    once = _median_seconds(setup, device) if ALGORITHMS[name].once else 0.0
    return _median_seconds(work, device), workspace, once


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
    """Return the seconds of a piece of work."""
    finish(device)
    begin = perf_counter()
    work()
    finish(device)
    return perf_counter() - begin


def _median_seconds(work: Callable[[], Tensor], device: torch.device) -> float:
    """Return the median of the seconds that it takes."""
    first = _seconds(work, device)
    times = [first] if first > LONG else sorted(_seconds(work, device) for _ in range(RUNS))
    return times[len(times) // 2]


def _run(
    problem: Problem, size: int, name: str
) -> tuple[Callable[[], Tensor], Callable[[], Tensor], int]:
    """Run an algorithm on random numbers, as two parts where they are summed.

    Returns:
        Functions that run a part and its set-up again, and its workspace.
    """
    dtype, device = getattr(torch, problem.dtype), torch.device(problem.device)
    one, other = (_made(problem, shape, dtype, device) for shape in problem.operands(size))
    way = ALGORITHMS[name]
    with allocated(device) as most, Meter(device) as meter:
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
        return work, setup, max(meter.peak, most()) + summed
    work, setup = partial(way.part, problem, one, shared), partial(way.shared, problem, other)
    return work, setup, max(meter.peak, most())


@contextmanager
def allocated(device: torch.device) -> Iterator[Callable[[], int]]:
    """Count the bytes that a device's allocator gives out in the body, library workspace included.

    Yields:
        A function that returns the peak in bytes; 0 on a device whose allocator has none.
    """
    there = accelerator.of(device)
    if not there.peaks:
        yield lambda: 0
        return
    before = there.allocated(device)
    there.reset_peak(device)
    yield lambda: there.peak(device) - before


def machine(device: str) -> str:
    """Return the machine, versions and settings that times depend on, as JSON."""
    named = platform.processor() or platform.machine()
    found = [torch.__version__, device, torch.get_num_threads(), REVISION]
    there = accelerator.of(device)
    if not there.host:
        named = there.describe()
        found += kernel_switches(device)
    return json.dumps([*found, named])


def _made(
    problem: Problem, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)  # not the person's: a step may draw from it
    found = torch.randn(shape, device=device, generator=generator).to(dtype)
    if problem.layout == "channels_last" and shape != problem.weight and len(shape) in LAYOUTS:
        return found.contiguous(memory_format=LAYOUTS[len(shape)])
    return found


# Search for the algorithms of a kernel that are worth measuring, the most promising first.
#
# All others must be faster than torch's own on all samples. Each algorithm is tried on the fewest
# samples; then those that were fastest for a sample come first, on more and more of them, until
# they cannot win any more, need too much, or the time is over.
#
#     native@32   fft@1  im2col@1   fft@2  fft@4  fft@8   native@1 ...
#     to beat     each once         the fastest goes on    until it is hopeless
#
# Source: none; u-cuDNN, section III-D, measures all.

HOPELESS = 4.0
"""Multiple of the best seconds of a sample, beyond which more samples are not tried."""

Measured = Mapping[tuple[int, str], KernelPart]
"""Samples and algorithm -> its measurement."""


@dataclass(frozen=True)
class Search:
    """A search through the parts of a kernel.

    Attributes:
        problem: the kernel.
        policy: which micro-batches: "all", "powerOfTwo" or "undivided".
        fits: says whether so many samples by an algorithm keep to the workspace.
        limit: bytes of workspace.
        until: moment of `perf_counter` at which no measurement is begun any more.
    """

    problem: Problem
    policy: str
    fits: Callable[[int, str], bool]
    limit: int
    until: float

    def run(
        self, size: int, measured: Measured, measure: Callable[[Problem, int, str], KernelPart]
    ) -> list[KernelPart]:
        """Return the earlier and the new measurements for N samples.

        There are none where torch's own kernel was not measured, as there was no time for it. How
        long it takes on all samples is estimated by the fewest.
        """
        steps, found = sizes(self.policy, size), dict[tuple[int, str], KernelPart]()
        each = dict[str, float]()

        def goes_on(n: int, name: str) -> bool:
            """Measure one more, and say whether more samples of it may be worth it."""
            part = measured.get((n, name))
            if part is None and not self._affords(n, name, each, own=name == NATIVE and n == size):
                return False
            part = part or measure(self.problem, n, name)
            if name == NATIVE and n == size:
                part = replace(part, workspace=0)  # whatever it is, it is torch's own
            found[n, name] = part
            each[name] = part.seconds / n + part.setup / size
            best = min(each.values())
            hopeless = self.policy != "all" and each[name] > HOPELESS * best
            return part.workspace <= self.limit and not hopeless

        least = steps[0]
        if least < size:
            goes_on(least, NATIVE)
        goes_on(size, NATIVE)
        if (size, NATIVE) not in found:
            return []
        names = [name for name in candidates(self.problem) if name != NATIVE]
        worth = [name for name in names if goes_on(least, name)]
        for name in sorted([NATIVE, *worth], key=lambda name: each[name]):
            for n in steps:
                if (n, name) not in found and not goes_on(n, name):
                    break
        return [found.pop((size, NATIVE)), *found.values()]

    def _affords(self, n: int, name: str, each: Mapping[str, float], *, own: bool) -> bool:
        """Return whether one more measurement fits in the limit and the time, by those so far.

        An algorithm that was not run yet is expected to take as long as torch's. Its own kernel on
        all samples is within every limit.
        """
        once = n * each.get(name, each.get(NATIVE, 0.0))
        expected = once * (METERED + (1 if once > LONG else RUNS))
        return perf_counter() + expected < self.until and (own or self.fits(n, name))
