"""Loss.algorithm1: equality with the paper's formula, and its distance from the batch gradient.

MBS, Algorithm 1, divides every micro-batch's loss by the number of micro-batches N_S. The loop
`naive` is that formula, written by hand. It gives the gradient of the batch where every micro-batch
has the same denominator and no samples are coupled, and another gradient elsewhere.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
import typer
from rich.progress import track

from benchmarks.environment import environment
from benchmarks.mbs.cases import CASES, Case, splits
from benchmarks.mbs.loops import naive, undivided
from benchmarks.mbs.measure import as_json, gradients, worst
from benchmarks.mbs.ours import anybatch
from benchmarks.mbs.problem import Problem
from benchmarks.results import console, write

HERE = Path(__file__).parent
SEED = 0
NAMES = (
    "cross_entropy-mlp",
    "cross_entropy-resnet",
    "mse-mlp",
    "pixel_pos_weight-unet",
    "class_weights-mlp",
    "flat_tokens-transformer",
    "bce_dice-unet",
)


def literal(problem: Problem) -> Problem:
    """The same problem with the paper's rule asked for by name."""
    from anybatch import Loss

    loss_fn = problem.loss_fn
    assert loss_fn is not None
    return dataclasses.replace(problem, declared=lambda: Loss.algorithm1(loss_fn))


def one_case(case: Case) -> dict[str, Any]:
    """For each split, the error against the paper's formula and against the batch."""
    problem = case.make(SEED)
    paper = literal(problem)
    want = gradients(undivided, problem, problem.batch)
    found: dict[str, Any] = {}
    for split, size in splits(problem.batch).items():
        got, formula = gradients(anybatch, paper, size), gradients(naive, problem, size)
        found[split] = {
            "to_formula": as_json(worst(got, formula)),
            "to_batch": as_json(worst(got, want)),
        }
    return found


def main(*, quick: bool = False, out: Path = HERE) -> None:
    """Run the named cases and write results.json."""
    torch.set_num_threads(1)
    names = NAMES[:2] if quick else NAMES
    chosen = [case for case in CASES if case.name in names]
    table = {case.name: one_case(case) for case in track(chosen, "algorithm1", console=console)}
    write(out / "results.json", {"seed": SEED, "environment": environment(), "cases": table})


if __name__ == "__main__":
    typer.run(main)
