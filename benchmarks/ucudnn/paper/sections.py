"""The paper's tables, each computed from the kernels of a network and what they may be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import prod
from typing import Any

import torch

from anybatch.conv.convolutions import Policy
from anybatch.conv.problem import Problem
from anybatch.core.plan_sections import Configuration
from benchmarks.ucudnn.paper.choices import (
    ALL,
    MIB,
    POWERS,
    UNDIVIDED,
    WORKSPACES,
    Kernel,
    all_within,
    bytes_of,
    each_within,
    seconds_of,
)

Found = dict[str, Any]
MIDDLE = 64 * MIB
TOTALS = (2 * MIB, 8 * MIB, 32 * MIB)
"""Of the parallel branches of a module together."""


def one(configuration: Configuration) -> Found:
    """Return a configuration as it goes into the results."""
    result: Found = {"chosen": str(configuration), "seconds": configuration.seconds}
    result["workspace"] = configuration.workspace
    return result | {
        "parts": [[part.size, part.algorithm, part.seconds] for part in configuration.parts]
    }


def summed(chosen: Sequence[Configuration]) -> Found:
    """Return what several configurations take together."""
    result: Found = {"seconds": seconds_of(chosen), "workspace": bytes_of(chosen)}
    return result | {"divided": sum(one.divided for one in chosen), "kernels": len(chosen)}


def policies(kernels: Sequence[Kernel], workspace: int) -> list[Policy]:
    """Return the policies that were measured; `all` only was within the middle workspace."""
    always: list[Policy] = [UNDIVIDED, POWERS]
    every = all(ALL in kernel.fronts for kernel in kernels) and workspace <= MIDDLE
    return [*always, ALL] if every else always


def layer(kernels: Sequence[Kernel], name: str) -> Found:
    """Return the kernels of a layer within the middle workspace (Fig. 9): kernel -> policy."""
    return {
        k.recorded.problem.kernel: {p: one(k.within(p, MIDDLE)) for p in policies([k], MIDDLE)}
        for k in kernels
        if k.recorded.layer == name
    }


def each(kernels: Sequence[Kernel]) -> Found:
    """Return what a network's kernels take (Fig. 10, 11): workspace of each -> policy."""
    return {
        str(w): {p: summed(each_within(kernels, p, w)) for p in policies(kernels, w)}
        for w in WORKSPACES
    }


def memory(kernels: Sequence[Kernel], size: int) -> list[Found]:
    """Return the bytes of every layer (Fig. 12): 512 MiB undivided, and 64 MiB divided."""
    rows = []
    for name, found in groupby(kernels, key=lambda k: k.recorded.layer):
        own = list(found)
        problem = own[0].recorded.problem
        row: Found = {"layer": name, "count": own[0].recorded.count}
        row["data"] = _bytes(problem, problem.operands(size)[0], problem.result(size))
        row["filters"] = _bytes(problem, problem.weight)
        row["undivided"] = max(k.within(UNDIVIDED, WORKSPACES[-1]).workspace for k in own)
        row["divided"] = max(k.within(POWERS, MIDDLE).workspace for k in own)
        rows.append(row)
    return rows


def _bytes(problem: Problem, *shapes: Sequence[int]) -> int:
    return sum(map(prod, shapes)) * int(getattr(torch, problem.dtype).itemsize)


def against(kernels: Sequence[Kernel]) -> Found:
    """Return WD beside WR at equal totals (Fig. 13): workspace of each in WR -> both."""
    count = sum(k.recorded.count for k in kernels)
    found: Found = {}
    for w in WORKSPACES:
        shared = all_within(kernels, POWERS, w * count)
        found[str(w)] = {
            "total": w * count,
            "WR, undivided": summed(each_within(kernels, UNDIVIDED, w)),
            "WR": summed(each_within(kernels, POWERS, w)),
            "WD, undivided": summed(all_within(kernels, UNDIVIDED, w * count).chosen),
            "WD": summed(shared.chosen),
            "variables": shared.variables,
            "solving": shared.solving,
        }
    return found


def shares(kernels: Sequence[Kernel], total: int) -> list[Found]:
    """Return the share of every kernel in a total (Fig. 14), and what it takes."""
    chosen = iter(all_within(kernels, POWERS, total).chosen)
    rows = []
    for kernel in kernels:
        mine = [next(chosen) for _ in range(kernel.recorded.count)]
        row: Found = {"layer": kernel.recorded.layer, "kernel": kernel.recorded.problem.kernel}
        row |= {"own": kernel.own.seconds * len(mine), "seconds": seconds_of(mine)}
        rows.append(row | {"workspace": bytes_of(mine), "chosen": str(mine[0])})
    return rows


def branches(kernels: Sequence[Kernel]) -> Found:
    """Return parallel branches within a total: equal shares, and WD."""
    count = sum(k.recorded.count for k in kernels)
    return {
        str(total): {
            "torch": seconds_of([k.own for k in kernels for _ in range(k.recorded.count)]),
            "equal, undivided": summed(each_within(kernels, UNDIVIDED, total // count)),
            "equal": summed(each_within(kernels, POWERS, total // count)),
            "WD": summed(all_within(kernels, POWERS, total).chosen),
        }
        for total in TOTALS
    }


def cliff(kernels: Sequence[Kernel]) -> list[Found]:
    """Return the best undivided algorithm of every kernel, and what a byte less makes (Fig. 1)."""
    rows = []
    for kernel in kernels:
        best = kernel.fronts[UNDIVIDED][-1]
        row: Found = {"layer": kernel.recorded.layer, "kernel": kernel.recorded.problem.kernel}
        row |= {"best": one(best)}
        if best.workspace:
            less = best.workspace - 1
            row["less"] = one(kernel.within(UNDIVIDED, less))
            row["divided"] = one(kernel.within(POWERS, less))
        rows.append(row)
    return rows
