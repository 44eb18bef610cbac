"""Whether what was measured part by part is what the whole takes: kernels that are really run.

torch's kernel and what `anybatch.convolutions` makes of it run back to back, in turns, on the same
operands. It chooses from the same file of measurements as the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

import anybatch
from anybatch.conv.algorithms import native
from benchmarks.ucudnn.device import Work, seconds
from benchmarks.ucudnn.paper.choices import POWERS, Kernel

Found = dict[str, Any]


def check(
    kernels: Sequence[Kernel], size: int, workspace: int, cache: Path, rounds: int
) -> list[Found]:
    """Return predicted and real seconds of every kernel, torch's and ours."""
    return [_one(kernel, size, workspace, cache, rounds) for kernel in kernels]


def _one(kernel: Kernel, size: int, workspace: int, cache: Path, rounds: int) -> Found:
    problem, chosen = kernel.recorded.problem, kernel.within(POWERS, workspace)
    operands = (torch.randn(shape, device=problem.device) for shape in problem.operands(size))
    work = partial(native, problem, *operands)
    pairs, described = [], ""
    for index in range(rounds):
        if index % 2:
            after, described = _inside(work, problem.device, workspace, cache)
            before = seconds(work, problem.device)
        else:
            before = seconds(work, problem.device)
            after, described = _inside(work, problem.device, workspace, cache)
        pairs.append((before, after))
    torchs, ours = (median(side) for side in zip(*pairs, strict=True))
    return {
        "layer": kernel.recorded.layer,
        "kernel": problem.kernel,
        "chosen": described,
        "same": described == str(chosen),
        "predicted": [kernel.own.seconds, chosen.seconds],
        "seconds": [torchs, ours],
        "times": quantiles([a / b for a, b in pairs]),
    }


def _inside(work: Work, device: str, workspace: int, cache: Path) -> tuple[float, str]:
    """Return what a run takes inside the context, and what was chosen."""
    with anybatch.convolutions(workspace, policy=POWERS, cache=cache) as found:
        work()
        elapsed = seconds(work, device)
    return elapsed, ", ".join(map(str, found.configurations))
