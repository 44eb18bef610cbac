"""One cell of the table, in a process of its own: a network, a way, and perhaps a limit.

The process loads what torch loads late by a step of a short sample, gives free blocks back to the
system, makes the network and its sample, and only then is RLIMIT_DATA set: `limit` bytes above what
it has. A limit so holds gradients and all else that a step takes; parameters are there before.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from anybatch import Engine, Plan
from anybatch.core.oom import out_of_memory
from anybatch.errors import BudgetError
from anybatch.memory.meter import Meter
from anybatch.tools.exactness import error_of
from benchmarks.mbs.tables.limited import DataLimit
from benchmarks.outofcore.floors.networks import SMALL, Task, made
from benchmarks.outofcore.floors.peers import Flags, step_of, together, ways
from benchmarks.outofcore.limits.child import resident

LITTLE = 1 << 20
"""Bytes of a budget that no step of these fits in."""

Way = Flags | str
"""Flags of a peer, or the plan of an engine as JSON."""


@dataclass(frozen=True)
class Cell:
    """What a process is to do.

    Attributes:
        network: its name.
        length: tokens, patches, or pixels a side.
        way: how a step is run.
        short: the same for the short sample that comes first; None is no such step.
        limit: bytes above those before the step; None is no limit.
        steps: that are clocked, after one that is not.
        truth: file of the true gradients, which are compared; None is no comparison.
    """

    network: str
    length: int
    way: Way
    short: Way | None = None
    limit: int | None = None
    steps: int = 1
    truth: str | None = None


def run(cell: Cell) -> dict[str, Any] | None:
    """Take the steps; None where memory was refused.

    Returns:
        Seconds of the first step, the median of the others and of the processor's, the growth of
        the process, and the error of the gradient.
    """
    torch.set_num_threads(1)
    if cell.short is not None:
        _step(made(cell.network, SMALL[cell.network]), cell.short)()
    task = made(cell.network, cell.length)
    step = _step(task, cell.way)
    gc.collect()
    limit = None if cell.limit is None else DataLimit(cell.limit)
    if limit:
        limit.begin()
    wall, busy = [], []
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins at VmRSS again
    before = resident("VmRSS")
    try:
        for _ in range(1 + cell.steps):
            task.network.zero_grad()
            start, used = time.perf_counter(), time.process_time()
            step()
            wall.append(time.perf_counter() - start)
            busy.append(time.process_time() - used)
    except (RuntimeError, MemoryError) as error:
        if out_of_memory(error):
            return None
        raise
    finally:
        if limit:
            limit.lift()
    grown = resident("VmHWM") - before
    found = {
        "grown": grown,
        "first": wall[0],
        "wall": median(wall[1:]),
        "processor": median(busy[1:]),
    }
    if cell.truth is not None:
        want = torch.load(cell.truth, mmap=True)
        found["error"] = max(error_of(_gradients(task), want).values())
    return found


def _step(task: Task, way: Way) -> Callable[[], Tensor]:
    if isinstance(way, Flags):
        return step_of(task, way)
    engine = Engine(task.network, task.loss, plan=Plan.from_json(way), cache=None, tune="off")
    return lambda: engine.backward(task.inputs, task.targets)


def _gradients(task: Task) -> dict[str, Tensor]:
    return {name: p.grad for name, p in task.network.named_parameters() if p.grad is not None}


def live(cell: Cell) -> int:
    """Return the most bytes of tensors in a step, without those of parameters."""
    torch.set_num_threads(1)
    task = made(cell.network, cell.length)
    step = _step(task, cell.way)
    owners = {"parameters": [*task.network.parameters()]}
    if isinstance(cell.way, str):
        step()
        task.network.zero_grad()
    with Meter(torch.device("cpu"), owners) as meter:
        step()
    held: int = meter.peak - sum(p.nbytes for p in task.network.parameters())
    return held


def truth(network: str, length: int, dtype: torch.dtype, path: str) -> None:
    """Write the gradients of the undivided sample."""
    task = made(network, length)
    task.network.to(dtype)
    x = task.inputs.to(dtype) if task.inputs.is_floating_point() else task.inputs
    y = task.targets.to(dtype) if task.targets.is_floating_point() else task.targets
    task.loss(task.network(x), y).backward()  # type: ignore[no-untyped-call]
    torch.save(_gradients(task), Path(path))


def settings(network: str, length: int) -> dict[str, tuple[Flags, int]]:
    """Return way -> its best setting, and the live bytes of that."""
    found: dict[str, tuple[Flags, int]] = {}
    for way, every in ways(made(network, length)).items():
        found[way] = _least(network, length, every)
    every = together({way: flags for way, (flags, _) in found.items()})
    found["all flags"] = _least(network, length, every)
    return found


def _least(network: str, length: int, every: list[Flags]) -> tuple[Flags, int]:
    found = [(flags, live(Cell(network, length, flags))) for flags in every]
    return min(found, key=lambda one: one[1])


def planned(network: str, length: int, budget: int = LITTLE) -> tuple[str, int, str]:
    """Return the plan of an engine as JSON, the budget and the plan in words.

    Args:
        network: its name.
        length: of the sample.
        budget: bytes; where it is too small, it is the least one that is not.
    """
    torch.set_num_threads(1)
    while True:
        task = made(network, length)
        engine = Engine(task.network, task.loss, memory=budget, cache=None, tune="off")
        try:
            engine.backward(task.inputs, task.targets)
        except BudgetError as error:
            budget = max(budget + 1024, -(-error.needed // 1024) * 1024)
        else:
            assert engine.plan is not None
            return engine.plan.to_json(), budget, str(engine.plan)
