"""Kernels are measured before anybody waits for them, in one process or in several.

    kernels ──> process 0   forward 3x64x64 ...   ──┐
            └─> process 1   filter 64x32x32 ...   ──┴──> one file

Processes share what they measure through the file. On a CPU they also share its memory's speed, so
a measurement beside others may be slower than by itself: one process is the default, and
`benchmarks/ucudnn/parallel` has the errors of several.

Source: u-cuDNN, section III-D: micro-configurations are benchmarked in parallel on all GPUs.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from anybatch.conv.costs import Costs
from anybatch.conv.divide import KernelPart
from anybatch.conv.network import Key


@dataclass(frozen=True)
class Warming:
    """Settings for the measurement of kernels.

    Attributes:
        path: of the file.
        policy: which micro-batches.
        limit: bytes of workspace.
        seconds: for all kernels together, in every process.
        processes: that measure at a time.
    """

    path: Path
    policy: str
    limit: int
    seconds: float
    processes: int = 1


def warm(keys: Sequence[Key], how: Warming) -> Iterator[tuple[Key, list[KernelPart]]]:
    """Measure kernels, and yield each with its measurements; those in the file are not run again.

    Args:
        keys: kernels and their samples.
        how: they are measured.
    """
    if how.processes == 1:
        begin, costs = perf_counter(), Costs(how.path)
        for place, key in enumerate(keys):
            left = max(0.0, how.seconds - (perf_counter() - begin))
            yield key, _measured(costs, key, how, left / (len(keys) - place))
        return
    share = how.seconds * how.processes / max(len(keys), 1)
    threads = torch.get_num_threads()
    with ProcessPoolExecutor(
        how.processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(threads,),
    ) as pool:
        try:
            submitted = {pool.submit(_in_a_process, key, how, share): key for key in keys}
            for done in as_completed(submitted):
                yield submitted[done], done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _in_a_process(key: Key, how: Warming, seconds: float) -> list[KernelPart]:
    return _measured(Costs(how.path), key, how, seconds)


def _measured(costs: Costs, key: Key, how: Warming, seconds: float) -> list[KernelPart]:
    with torch.no_grad():
        return costs.parts(*key, how.policy, how.limit, seconds)
