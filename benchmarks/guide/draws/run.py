"""Random draws of a training and a budget, each planned and trained under a hard limit.

Networks with and without BatchNorm, with losses in which samples meet, an LSTM and long
convolutions; three optimizers; what a person may ask of a plan; and budgets from seven tenths of
what one sample a micro-batch holds up to the undivided batch. Each is planned and trained for three
steps in a process of its own, where the kernel refuses memory past the budget, a quarter of it and
256 MiB for what is no tensor (RLIMIT_DATA, above what is mapped when network, data and kernels are
ready), and a live meter around planning and steps compares tensors with the budget itself. Memory
is kept as the command keeps it under a budget (malloc: tight); where glibc keeps it as it will,
what planning leaves behind in pieces can be all that such a limit leaves.

A draw ends in the budget, or with a `BudgetError`. That is true where no candidate that is then
tried without a limit (micro-batches of 1, 2, 4 ... and all samples, and what the error says is
enough) holds less than the budget; else it is "refused too early". Anything else has failed.
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
