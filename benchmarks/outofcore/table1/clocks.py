"""Seconds on a device, and what its link, its arithmetic and its memory do in one.

On CUDA kernels are timed by events, and the link by copies from and to pinned memory; on the CPU
the clock is the wall's and the link is the file that `anybatch.offload` uses.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from anybatch.core.plan_sections import Link
from anybatch.memory.stores import FileStore
from benchmarks.simulators.machine import Machine

ROUNDS = 5
LARGE = {"cuda": 256 << 20, "cpu": 16 << 20}
"""Bytes of a copy."""
SIDE = {"cuda": 4096, "cpu": 256}
"""Rows of a product."""


def clocked(device: torch.device, body: Callable[[], object]) -> float:
    """Return the seconds of what a device is given to do."""
    if device.type != "cuda":
        start = perf_counter()
        body()
        return perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    body()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def usual(device: torch.device, body: Callable[[], object]) -> float:
    """Return the median seconds of some rounds, after one that does not count."""
    body()
    return median(clocked(device, body) for _ in range(ROUNDS))


def link_of(device: torch.device) -> Link:
    """Return the bytes a second of the way out and back, one at a time."""
    data = torch.ones(LARGE[device.type], dtype=torch.uint8, device=device)
    if device.type == "cuda":
        host = torch.empty(data.shape, dtype=torch.uint8, pin_memory=True)
        out = usual(device, lambda: host.copy_(data, non_blocking=True))
        return Link(len(data) / out, len(data) / usual(device, lambda: _to(data, host)))
    store = FileStore(direct=True)
    out = usual(device, store.writing(0, data.untyped_storage()))
    back = usual(device, store.reading(0, data.untyped_storage()))
    store.close()
    return Link(len(data) / out, len(data) / back)


def machine_of(device: torch.device) -> Machine:
    """Return what a device computes, moves and sends in a second, as measured now."""
    side, data = SIDE[device.type], torch.ones(LARGE[device.type] // 4, device=device)
    a, other = torch.ones(side, side, device=device), torch.empty_like(data)
    product = usual(device, lambda: a @ a)
    moved = usual(device, lambda: _to(other, data))
    flops, memory = 2 * side**3 / product, 2 * data.nbytes / moved
    return Machine("measured", flops, memory, link_of(device))


def _to(to: Tensor, what: Tensor) -> Tensor:
    return to.copy_(what, non_blocking=True)
