"""All ways around one step, clocked in turn, and what each of them holds and gives."""

from collections.abc import Mapping
from contextlib import nullcontext
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from benchmarks.outofcore.offload.steps import WARM_UP, Step

Way = Any
Name = tuple[str, str]
"""Of a way: its line in the figure, and its setting."""

PLAIN = nullcontext()


def measured(step: Step, ways: Mapping[Name, Way], rounds: int) -> dict[Name, dict[str, Any]]:
    """Return of every way its seconds over those in memory, its peak, and whether it is exact.

    A step in memory runs between two in other ways, and is paired with both of them; every other
    round goes through the ways backwards.
    """
    for around in (PLAIN, *ways.values()):
        for _ in range(WARM_UP):
            step.run(around)
    pairs: dict[Name, list[tuple[float, float]]] = {name: [] for name in ways}
    for index in range(rounds):
        order = list(ways) if index % 2 else list(ways)[::-1]
        for k in range(0, len(order), 2):
            before, after = order[k], order[k + 1] if k + 1 < len(order) else None
            seconds = step.run(ways[before])
            plain = step.run(PLAIN)
            pairs[before].append((plain, seconds))
            if after is not None:
                pairs[after].append((plain, step.run(ways[after])))
    start = [buffer.clone() for buffer in step.model.buffers()]
    want = _outcome(step, PLAIN, start)
    found = {}
    for name, around in ways.items():
        gradients, buffers = map(_same, _outcome(step, around, start), want)
        row = {"peak": step.peak(around), "same gradient": gradients, "same buffers": buffers}
        found[name] = _medians(pairs[name]) | row
    return found


def _medians(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    return {
        "wall": [round(cut, 4) for cut in quantiles((b / a for a, b in pairs), n=4)],
        "seconds in memory": round(median(plain for plain, _ in pairs), 5),
        "seconds": round(median(seconds for _, seconds in pairs), 5),
    }


def _outcome(step: Step, around: Way, start: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients and the buffers after one step from these buffers."""
    for buffer, value in zip(step.model.buffers(), start, strict=True):
        buffer.copy_(value)
    gradients = step.gradients(around)
    return gradients, [buffer.clone() for buffer in step.model.buffers()]


def _same(found: list[Tensor], want: list[Tensor]) -> bool:
    return len(found) == len(want) and all(map(torch.equal, found, want))
