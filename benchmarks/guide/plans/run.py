"""Forecasts and choices of a plan, compared with every candidate that fits, each of them run.

For each training and budget `anybatch.plan` chooses, and all candidates are planned one by one with
their size and mechanism fixed: 2, 4, 8 ... and all samples in a micro-batch, with all saved tensors
in memory, and where that does not fit with some offloaded to a file. Every one that fits is run:
its first two steps under the meter, which measures its peak, and then all of them in alternation,
so that their seconds can be compared. Of each two steps the second counts: a training repeats the
same step, and the first finds the heap of another candidate. `share` is the time of the fastest
over that of the plan's own choice; a step that held more than the budget is no candidate. The
finders of the most that fits choose among the same sizes where the gradient is the same without
lockstep. Their search runs under the meter's limit, and the table gives the time of their size (a
size that is not there is run, too).

Errors of seconds are |predicted - measured| / measured, of a step that was timed while planning.
"""

from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer

import anybatch
from anybatch import Engine, Plan
from anybatch.errors import BudgetError
from anybatch.memory.meter import Meter
from benchmarks.environment import environment
from benchmarks.guide.plans.cells import PROBLEMS, Cell, cells
from benchmarks.mbs.choice.registry import FINDERS, missing
from benchmarks.results import console, write

HERE = Path(__file__).parent
SEED = 0
QUICK = ("LSTM",)
Found = dict[str, Any]


class Candidate:
    """A plan that is run: its first step under the meter, and then as often as one likes.

    Args:
        cell: what is trained.
        plan: is obeyed; None for micro-batches of `size` without a budget.
        size: samples.
    """

    def __init__(self, cell: Cell, plan: Plan | None, size: int = 0) -> None:
        self._problem, self.plan = cell.problem, plan
        fixed: dict[str, Any] = {"plan": plan} if plan is not None else {"micro_batch": size}
        self._engine = Engine(cell.problem.model, cell.problem.loss_fn, **fixed)
        self.step()  # saved tensors that may leave are recorded, and all of them leave
        last, made = self._engine.last, self._engine.plan
        assert last is not None
        assert made is not None
        self.micro_batch, self.mechanism = made.micro_batch, made.mechanism
        self.offloaded = made.offload is not None
        self.peak, self.predicted = self._metered(last.peak_bytes or 0), last.predicted_bytes
        self.over = self.peak > cell.budget
        self.seconds: list[float] = []

    def _metered(self, first: int) -> int:
        """Return the most bytes that a step has held: the first, or one that follows its plan."""
        model = self._problem.model
        model.zero_grad()
        there = {"there": [*model.parameters(), *model.buffers()]}
        with Meter(torch.device("cpu"), there) as meter:
            self._engine.backward(self._problem.inputs, self._problem.targets)
        return max(first, int(meter.peak))

    def step(self) -> float:
        """Take a step, and return its seconds."""
        self._problem.model.zero_grad()
        start = perf_counter()
        self._engine.backward(self._problem.inputs, self._problem.targets)
        return perf_counter() - start

    def row(self, timed: dict[tuple[int, bool], float]) -> Found:
        """Return what is written of it."""
        return {
            "micro_batch": self.micro_batch,
            "mechanism": self.mechanism,
            "away": self.offloaded,
            "planned": self.plan is not None,
            "over": self.over,
            "predicted": self.predicted,
            "peak": self.peak,
            "seconds": median(self.seconds),
            "foreseen": timed.get((self.micro_batch, self.offloaded)),
        }


def planned(cell: Cell, **fixed: Any) -> Plan | None:
    """Return the plan of a cell; None where it does not fit."""
    problem = cell.problem
    batch = problem.inputs, problem.targets
    problem.model.zero_grad()  # gradients that are there would count
    try:
        return anybatch.plan(problem.model, problem.loss_fn, batch, memory=cell.budget, **fixed)
    except BudgetError:
        return None


def every(cell: Cell, chosen: Plan | None, sizes: set[int]) -> list[Candidate]:
    """Return all candidates that fit, the chosen one first.

    Args:
        cell: what is trained.
        chosen: its plan.
        sizes: that are known to fit, found by running them; of these a step without a plan is run
            where they are planned not to fit.
    """
    found = [] if chosen is None else [Candidate(cell, chosen)]
    batch = cell.problem.batch
    for n in sorted(sizes | {2**k for k in range(1, batch.bit_length())} | {batch}):
        here = planned(cell, micro_batch=n, offload="off", timed=False)
        plans = [here or planned(cell, micro_batch=n, offload="file", timed=False)]
        if here is None and n in sizes:
            found.append(Candidate(cell, None, n))
        tried = {(c.micro_batch, c.offloaded) for c in found}
        found += [
            Candidate(cell, plan)
            for plan in plans
            if plan is not None and (plan.micro_batch, plan.offload is not None) not in tried
        ]
    return found


def peers(cell: Cell) -> Found:
    """Return the size of each finder that looks for the most that fits."""
    if not cell.problem.terms:
        return {}
    return {name: find(cell.problem, cell.budget).size for name, find in FINDERS.items()}


def one(cell: Cell, rounds: int) -> Found:
    """Return what was found of a cell."""
    start = perf_counter()
    chosen = planned(cell)
    took = perf_counter() - start
    others = peers(cell)
    found = every(cell, chosen, {n for n in others.values() if n})
    for _ in range(rounds):
        for candidate in found:
            candidate.step()
            candidate.seconds.append(candidate.step())
    memory = None if chosen is None else chosen.memory
    timed = {} if memory is None else {
        (c.micro_batch, c.offloaded): c.seconds for c in memory.candidates if c.seconds is not None
    }  # fmt: skip
    return {
        "name": cell.name,
        "budget": cell.budget,
        "whole": None if memory is None else memory.undivided,
        "planned": chosen is not None,
        "planning": took,
        "candidates": [candidate.row(timed) for candidate in found],
        "peers": others,
    }


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    each: Annotated[int, typer.Option(help="budgets of a training")] = 4,
    rounds: Annotated[int, typer.Option(help="of steps of all candidates")] = 8,
) -> None:
    """Plan, run everything, and write results.json."""
    names = [*QUICK] if quick else [*PROBLEMS]
    each, rounds = (1, 1) if quick else (each, rounds)
    if missing():
        console.print(f"not installed, so without: {', '.join(missing())}")
        for name in missing():
            del FINDERS[name]
    torch.set_num_threads(1)
    found = []
    for cell in cells(names, each, SEED):
        start = perf_counter()
        found.append(one(cell, rounds))
        console.print(f"{cell.name}: {perf_counter() - start:.0f} s")
    facts = {"environment": environment(), "seed": SEED, "rounds": rounds}
    write(out / "results.json", {**facts, "cells": found})


if __name__ == "__main__":
    typer.run(main)
