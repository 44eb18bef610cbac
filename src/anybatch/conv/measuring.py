"""Measurement of an algorithm: seconds and bytes of a real run on random numbers.

Of the seconds of a few runs the median counts; long ones are not repeated. Workspace is what the
algorithm allocates, as the meter counts it, and its own result, because that is copied to where all
samples are; of filters the sum so far is there, too. The set-up of an algorithm for all its parts
is timed separately, and its results are workspace. The meter does not count allocations inside a
kernel; on CUDA the allocator does.

Source: u-cuDNN, section III-D.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from math import inf, prod
from time import perf_counter

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from anybatch.conv.algorithms import ALGORITHMS, LAYOUTS, native
from anybatch.conv.execute import run
from anybatch.conv.fourier import HALVES
from anybatch.conv.plans import NoPlanError
from anybatch.conv.problem import Problem
from anybatch.core import accelerator
from anybatch.core.accelerators import kernel_switches
from anybatch.core.divisions import Configuration
from anybatch.memory.fakes import interrupted_between_functions
from anybatch.memory.meter import Meter

RUNS = 3
"""Runs of which the median counts."""

DUELS = 5
"""Pairs of a comparison."""

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
    _finish(device)
    begin = perf_counter()
    work()
    _finish(device)
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


def _finish(device: torch.device) -> None:
    accelerator.of(device).synchronise(device)
