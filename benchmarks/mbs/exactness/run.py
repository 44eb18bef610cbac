"""Every case, split and loop: the error of the gradient and the loss, in float64.

The bound is Law 1's (docs/why.md): 1e-12, or ten times the error between two undivided runs whose
rows are permuted, whichever is larger. A loop that gives NaN or no gradient is `not finite`.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
import typer
from rich.progress import track

from anybatch.tools.exactness import error_of, tolerance
from benchmarks.environment import environment
from benchmarks.mbs.cases import CASES, Case, splits
from benchmarks.mbs.loops import Loop, undivided
from benchmarks.mbs.measure import as_json, gradients, installed, worst
from benchmarks.mbs.problem import Problem, rows
from benchmarks.results import console, write

HERE = Path(__file__).parent
SEEDS = (0, 1, 2)


def permuted(problem: Problem, seed: int) -> Problem:
    """The same batch with its rows in another order."""
    order = torch.randperm(problem.batch, generator=torch.Generator().manual_seed(seed))
    moved = {"inputs": rows(problem.inputs, order), "targets": rows(problem.targets, order)}
    return dataclasses.replace(problem, **moved)


def one_seed(case: Case, seed: int, loops: dict[str, Loop]) -> dict[str, Any]:
    """The bound of a case and the errors of every loop by split, for one seed."""
    problem = case.make(seed)
    want = gradients(undivided, problem, problem.batch)
    other = gradients(undivided, permuted(problem, seed), problem.batch)
    found: dict[str, Any] = {"bound": tolerance(error_of(other[0], want[0]))}
    for name, loop in loops.items():
        found[name] = {
            split: worst(gradients(loop, problem, size), want)
            for split, size in splits(problem.batch).items()
        }
    return found


def one_case(case: Case, seeds: tuple[int, ...], loops: dict[str, Loop]) -> dict[str, Any]:
    """The worst of several seeds by loop and split; exact where every seed keeps its bound."""
    found = [one_seed(case, seed, loops) for seed in seeds]
    row: dict[str, Any] = {"bound": max(one["bound"] for one in found), "exact": {}}
    for name in loops:
        row["exact"][name] = {
            split: all(one[name][split] <= one["bound"] for one in found)
            for split in found[0][name]
        }
        row[name] = {
            split: as_json(max(one[name][split] for one in found)) for split in found[0][name]
        }
    return row


def main(*, quick: bool = False, out: Path = HERE) -> None:
    """Run the catalogue through every loop and write results.json."""
    torch.set_num_threads(1)
    seeds = SEEDS[:1] if quick else SEEDS
    loops, missing = installed()
    del loops["undivided"]
    chosen = CASES[::8] if quick else CASES
    table = {
        case.name: one_case(case, seeds, loops)
        for case in track(chosen, "exactness", console=console)
    }
    results = {"seeds": seeds, "environment": environment(), "missing": missing, "cases": table}
    write(out / "results.json", results)


if __name__ == "__main__":
    typer.run(main)
