"""Forecasts of a step in lanes, compared with the bytes that it holds.

A lane is a micro-batch; lanes wait for each other at BatchNorm. The trainings with BatchNorm and
the budgets of `benchmarks/guide/plans` are planned in micro-batches of 2, 4, 8 ... samples without
timing, and run twice under the meter: with offloading the first step records, the second follows.
Lanes that offload only while they wait have a limit for each turn (a lane's run between two waits);
others before each kernel of a turn.
"""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

import anybatch
from anybatch import Engine
from anybatch.errors import BudgetError
from anybatch.memory.meter import Meter
from benchmarks.environment import environment
from benchmarks.guide.plans.cells import Cell, cells
from benchmarks.results import console, write

HERE = Path(__file__).parent
NAMES = ["ResNet-20, BatchNorm", "DenseNet, BatchNorm"]
EACH, SEED = 4, 0
Found = dict[str, Any]


def held(cell: Cell, plan: anybatch.Plan) -> int:
    """Return the most bytes that two steps of a plan hold."""
    model, peaks = cell.problem.model, []
    engine = Engine(model, cell.problem.loss_fn, plan=plan)
    for _ in range(2):
        model.zero_grad()
        there = {"there": [*model.parameters(), *model.buffers()]}
        with Meter(torch.device("cpu"), there) as meter:
            engine.backward(cell.problem.inputs, cell.problem.targets)
        peaks.append(int(meter.peak))
    model.zero_grad()
    return max(peaks)


def run(cell: Cell, n: int) -> Found | None:
    """Return what was foreseen of lanes of `n` samples and what they held; None for no lanes."""
    problem = cell.problem
    batch = problem.inputs, problem.targets
    try:
        plan = anybatch.plan(
            *(problem.model, problem.loss_fn, batch),
            memory=cell.budget,
            micro_batch=n,
            timed=False,
        )
    except BudgetError:
        return None
    if plan.mechanism != "lockstep":
        return None
    assert plan.memory is not None
    return {
        "training": cell.name,
        "budget": cell.budget,
        "micro_batch": n,
        "leaves": "while it runs" if plan.offload is not None else "while it waits",
        "predicted": plan.memory.predicted,
        "held": held(cell, plan),
    }


def main(
    *, quick: bool = False, out: Annotated[Path, typer.Option(help="folder of results")] = HERE
) -> None:
    """Plan and run all of them, and write results.json."""
    torch.set_num_threads(1)
    rows = []
    every = list(cells(NAMES[1:] if quick else NAMES, 1 if quick else EACH, SEED))
    for cell in track(every, "budgets", console=console):
        sizes = (1 << k for k in range(1, cell.problem.batch.bit_length()))
        found = (run(cell, n) for n in sizes if n < cell.problem.batch)
        rows += [one for one in found if one is not None]
    write(out / "results.json", {"environment": environment(), "seed": SEED, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
