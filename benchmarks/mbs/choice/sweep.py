"""The whole truth about the micro-batch: every size of a fine grid, timed in the same rounds.

A shared machine drifts by more than the sizes differ, so no size is timed on its own. A round
times each of them once, in an order drawn anew, and a size is worth its time over the median of
its round: what slows a whole round cancels. Processor time stands beside the wall's, because
other work on the machine disturbs it less; with one thread and nothing else to do they agree.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from time import perf_counter, process_time

import torch

from benchmarks.mbs.choice.meter import Meter
from benchmarks.mbs.loops import by_hand
from benchmarks.mbs.problem import Problem

SEED = 0
Times = dict[int, list[float]]  # micro-batch -> seconds of each round


@dataclass(frozen=True)
class Sweep:
    """Seconds of the whole step, by micro-batch and round, on the wall and of the processor."""

    wall: Times
    processor: Times


def grid(cap: int) -> list[int]:
    """Powers of two, three times powers of two, and the cap itself: all of them up to `cap`."""
    powers = [1 << power for power in range(cap.bit_length())]
    return sorted({size for power in powers for size in (power, 3 * power, cap) if size <= cap})


def seconds(problem: Problem, size: int) -> tuple[float, float]:
    """Wall and processor seconds of one step of the whole batch from empty gradients.

    The device is idle at both ends.
    """
    problem.model.zero_grad(set_to_none=True)
    cuda = next(problem.model.parameters()).is_cuda
    if cuda:
        torch.cuda.synchronize()
    wall, processor = perf_counter(), process_time()
    by_hand(problem, size)
    if cuda:
        torch.cuda.synchronize()
    return perf_counter() - wall, process_time() - processor


def sweep(problem: Problem, sizes: Iterable[int], rounds: int = 9) -> Sweep:
    """Time the whole step at every size, `rounds` times, after one untimed round."""
    ordered, draw = sorted(set(sizes)), random.Random(SEED)
    for size in ordered:
        seconds(problem, size)
    wall: Times = {size: [] for size in ordered}
    processor: Times = {size: [] for size in ordered}
    for _ in range(rounds):
        for size in draw.sample(ordered, len(ordered)):
            on_wall, of_processor = seconds(problem, size)
            wall[size].append(on_wall)
            processor[size].append(of_processor)
    return Sweep(wall, processor)


def relative(times: Times) -> dict[int, float]:
    """Each size's time over the median of its round, the median over the rounds."""
    middles = [median(one) for one in zip(*times.values(), strict=True)]
    return {
        size: median(one / middle for one, middle in zip(found, middles, strict=True))
        for size, found in times.items()
    }


def peak(problem: Problem, size: int) -> int:
    """The most live bytes of a step of the whole batch at a micro-batch."""
    problem.model.zero_grad(set_to_none=True)
    meter = Meter(problem)
    with meter:
        by_hand(problem, size)
    problem.model.zero_grad(set_to_none=True)
    found: int = meter.peak
    return found
