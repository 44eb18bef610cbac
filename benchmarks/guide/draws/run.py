"""Random draws of a training and a budget, each planned and trained under a hard limit.

A draw is a network (with and without BatchNorm, with coupled losses, an LSTM, long convolutions),
one of three optimizers, options of a plan, and a budget. Budgets range from seven tenths of the
bytes of a micro-batch of one sample up to those of the undivided batch. Each draw is planned and
trained for three steps in its own process. The kernel refuses memory past the budget, a quarter of
it and 256 MiB for bytes that are no tensors (RLIMIT_DATA, above the memory mapped when network,
data and kernels are ready). A live meter around planning and steps compares tensors with the budget
itself. The malloc mode is the command's under a budget (tight). In glibc's default mode, heap
fragments left by planning can use up such a limit.

A draw ends in the budget, or with a `BudgetError`. The refusal is true where no candidate that then
runs without a limit (micro-batches of 1, 2, 4 ... and all samples, and the bytes that the error
says are enough) holds less than the budget; else it is "refused too early". It has "said too
little" where a plan for those bytes holds more. Anything else has failed.
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any
from unittest.mock import patch

import typer
from rich.progress import track

from anybatch.cli.allocator import choose, glibc, settings_of
from benchmarks.environment import environment
from benchmarks.guide.draws.child import child
from benchmarks.results import console, write

HERE = Path(__file__).parent
COUNT = 200
QUICK = (0, 1)
OFTEN = 10
"""Draws after which they are written down."""
Found = dict[str, Any]


def drawn(seed: int) -> Found:
    """Return what has become of a draw in a process of its own, also where that was killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "benchmarks.guide.draws.child"])
    mode = settings_of(choose("cpu", budgeted=True), glibc())  # of processes to come
    start = perf_counter()
    with patch.dict(os.environ, mode), ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            found = pool.submit(child, seed).result()
        except BrokenProcessPool as error:
            found = {"seed": seed, "ended": "killed", "why": str(error)}
        except Exception as error:
            found = {"seed": seed, "ended": "failed", "why": repr(error)[:400]}
    return {**found, "took": round(perf_counter() - start, 2)}


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    count: Annotated[int, typer.Option(help="draws")] = COUNT,
    first: Annotated[int, typer.Option(help="seed of the first draw")] = 0,
) -> None:
    """Plan and train every draw, and write results.json, now and then and at the end."""
    seeds = QUICK if quick else range(first, first + count)
    found: list[Found] = []
    for seed in track(seeds, "draws", console=console):
        found.append(drawn(seed))
        if found[-1]["ended"] not in ("in budget", "refused"):
            console.print(found[-1])
        if len(found) % OFTEN == 0 or len(found) == len(seeds):
            write(out / "results.json", {"environment": environment(), "draws": found})


if __name__ == "__main__":
    typer.run(main)
