"""Measurement of kernels before a training, in one process or in several.

    kernels ──> process 0   forward 3x64x64 ...   ──┐
            └─> process 1   filter 64x32x32 ...   ──┴──> one file

Processes share what they measure through the file. On a CPU they also share its memory's speed, so
a measurement beside others may be slower than by itself: one process is the default, and
`benchmarks/ucudnn/parallel` has the errors of several.

Source: u-cuDNN, section III-D: micro-configurations are benchmarked in parallel on all GPUs.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import ClassVar

import torch

from anybatch.conv.chooser import certain, own_of, worthwhile
from anybatch.conv.convolutions import WORKSPACE, Cache, cache_file
from anybatch.conv.dispatch import KernelRecorder
from anybatch.conv.divide import Key, share
from anybatch.conv.measure import Costs
from anybatch.core.plan_sections import Configuration, KernelPart
from anybatch.core.units import parse_bytes


@dataclass(frozen=True)
class Warming:
    """Settings for the measurement of kernels.

    Attributes:
        path: of the file; None keeps nothing.
        policy: sizes of micro-batches, as in `anybatch.convolutions`.
        limit: bytes of workspace.
        seconds: for all kernels together, in every process.
        processes: that measure at a time.
    """

    path: Path | None
    policy: str
    limit: int
    seconds: float
    processes: int = 1


def warm(keys: Sequence[Key], how: Warming) -> Iterator[tuple[Key, list[KernelPart]]]:
    """Measure kernels, and yield each with its measurements; those in the file run no more."""
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


@dataclass(frozen=True)
class MeasuredKernel:
    """A convolution kernel of one or several layers that are alike, as it was measured.

    Attributes:
        layers: their names.
        key: the kernel, and its samples.
        seconds: of torch's own algorithm.
        front: its candidates in the order of workspace: torch's own, and clearly faster ones; the
            last one is the fastest.
        chosen: one of these.
    """

    layers: tuple[str, ...]
    key: Key
    seconds: float
    front: tuple[Configuration, ...]
    chosen: Configuration


class KernelBenchmark:
    """Times of convolution kernels, in a file that later processes read.

    Args:
        workspace: bytes, or a text such as "64MiB", that one kernel may allocate beside its
            operands and its result. Default 64 MiB.
        policy: which micro-batches are measured, as in `anybatch.convolutions`. Default: powers of
            two.
        cache: the file, as in `anybatch.convolutions`. Default True: in the user's cache folder.

    Attributes:
        path: of the file; None where times are kept in memory.

    Raises:
        ValueError: `workspace` is not valid.
        StoreError: the file cannot be written.

    Example:
        >>> recorder, benchmark = record_kernels(model, inputs), KernelBenchmark("100MiB")
        >>> keys = list(benchmark.measure(recorder.scaled(64)))
        >>> [(one.layers, str(one.chosen)) for one in benchmark.choose(recorder, keys)]

    Source: u-cuDNN, section III-D.
    """

    WORKSPACE: ClassVar[str] = WORKSPACE
    """Of a kernel by default."""

    def __init__(
        self,
        workspace: int | str = WORKSPACE,
        *,
        policy: str = "powerOfTwo",
        cache: Cache = True,
    ) -> None:
        self.path = cache_file(cache)
        self._limit, self._policy = parse_bytes(workspace, "workspace"), policy
        self._costs = Costs(self.path, seconds=0)
        self._parts: dict[Key, list[KernelPart]] = {}

    def measure(
        self, keys: Iterable[Key], *, seconds: float = 600.0, processes: int = 1
    ) -> Iterator[Key]:
        """Measure kernels, and yield each when that is done; those in the file are not run again.

        Args:
            keys: kernels and their samples, as `KernelRecorder.scaled` returns them.
            seconds: for all of them together, in every process. Default 600.
            processes: that measure at a time. Default 1.
        """
        how = Warming(self.path, self._policy, self._limit, seconds, processes)
        for key, parts in warm(list(keys), how):
            self._parts[key] = parts
            yield key

    def choose(
        self, recorder: KernelRecorder, keys: Iterable[Key], total: int | None = None
    ) -> list[MeasuredKernel]:
        """Return kernels with the configuration that is chosen for each, in their order.

        Args:
            recorder: has the names of their layers.
            keys: kernels and their samples; what is not measured and not in the file is torch's.
            total: bytes of workspace for all of them together, divided so that all together are
                fastest. Default None: each has the whole workspace.
        """
        measured = {key: self._measured(key) for key in keys}
        fronts = {
            key: certain(self._costs, key[0], worthwhile(parts, key[1], total or self._limit))
            for key, parts in measured.items()
        }
        chosen = [front[-1] for front in fronts.values()]
        if total is not None:
            chosen = share(list(fronts.values()), total)
        return [
            MeasuredKernel(
                tuple(recorder.layers(key[0])),
                key,
                own_of(measured[key], key[1]).seconds,
                tuple(front),
                one,
            )
            for (key, front), one in zip(fronts.items(), chosen, strict=True)
        ]

    def _measured(self, key: Key) -> list[KernelPart]:
        found = self._parts.get(key)
        return self._costs.parts(*key, self._policy, self._limit) if found is None else found
