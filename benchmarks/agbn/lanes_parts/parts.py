"""The parts of a step in lanes, each by itself: switching, BatchNorm, and the copies to a file.

They are timed out of the step, with as many turns, layers and bytes as the step has.
"""

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch.core.barrier import reduce
from anybatch.lockstep.batchnorm import batch_norm
from anybatch.lockstep.scheduler import Lanes, LaneTurns
from anybatch.memory.stores import FileStore
from benchmarks.agbn.lanes_parts.ways import Subject

REPEATS = 5
Shape = tuple[int, ...]


def median(step: Callable[[], Any], count: int = REPEATS) -> float:
    """Median wall seconds of a call, after one that is not counted."""
    step()
    found = []
    for _ in range(count):
        start = perf_counter()
        step()
        found.append(perf_counter() - start)
    return statistics.median(found)


def shapes(workload: Subject) -> list[Shape]:
    """The input of each BatchNorm of the network for one micro-batch."""
    found: list[Shape] = []
    norms = [m for m in workload.model.modules() if isinstance(m, nn.BatchNorm2d)]
    hooks = [
        m.register_forward_pre_hook(lambda _, inputs: found.append(tuple(inputs[0].shape)))
        for m in norms
    ]
    with torch.no_grad():
        workload.model(workload.x[: workload.micro_batch])
    for hook in hooks:
        hook.remove()
    return found


def switching(lanes: int, meetings: int) -> float:
    """Seconds in which `lanes` threads meet so often, and do nothing else."""

    def work(_: int) -> None:
        for _ in range(meetings):
            reduce("here", int, int.__add__, abs)

    return median(lambda: Lanes(lanes, LaneTurns(lanes), nullcontext).run(work))


def native(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Normalise as torch does, by the these rows alone."""
    return F.batch_norm(x, None, None, weight, bias, True)


def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What a lane does, met by nobody."""
    return batch_norm(x, weight, bias, 1e-5)[0]


def through(norm: Callable[[Tensor, Tensor, Tensor], Tensor], shape: Shape, lanes: int) -> float:
    """Seconds of forward for `lanes` inputs one after another, then backward: from cold memory."""
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(lanes)]
    weight, bias = (torch.ones(shape[1], requires_grad=True) for _ in range(2))
    upward = torch.randn(shape)

    def step() -> None:
        outputs = [norm(x, weight, bias) for x in inputs]
        while outputs:
            outputs.pop().backward(upward)  # type: ignore[no-untyped-call]
            inputs[len(outputs)].grad = None

    return median(step)


def normalising(workload: Subject, lanes: int) -> dict[str, float]:
    """Seconds of all BatchNorms of a step, forward and backward, as torch does it and as lanes."""
    found = {"native": 0.0, "ours": 0.0}
    for shape in shapes(workload):
        found["native"] += through(native, shape, lanes)
        found["ours"] += through(ours, shape, lanes)
    return found


def copying(size: int, moved: int) -> float:
    """Seconds to write and read `moved` bytes, in storages of `size`, by one thread."""
    store, data = FileStore(), torch.zeros(size, dtype=torch.uint8)
    pairs = max(1, min(64, moved // (2 * size)))

    def there_and_back() -> None:
        for key in range(pairs):
            store.writing(key, data.untyped_storage())()
        for key in range(pairs):
            store.reading(key, data.untyped_storage())()
            store.drop(key)

    try:
        return median(there_and_back) * moved / (2 * pairs * size)
    finally:
        store.close()
