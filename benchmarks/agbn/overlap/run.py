"""The one sum of gradients over ranks: its share of a step, and the gain from hiding it.

Two real gloo processes of one thread each run on one machine of two cores. A step sums the
gradients of all its micro-batches once. `after` sends them when the last backward has ended,
`during` each piece as soon as backward has completed it, always in the same order. Speed is
seconds(after) / seconds(way) of the slowest rank, paired within a round: the median and the
quartiles. `nothing sent` is the most that hiding could gain. `by hand` is a plain loop; `engine` is
anybatch.

On `this machine` the cores that compute also carry and add the sent bytes. `10 Gbit/s` and `1
Gbit/s` stand in for a network card: they take the time of 2 M (N - 1) / N bytes at that rate and no
processor, and add nothing up.

The shares are measured inside the engine's steps, with sums after backward: waiting for the slower
rank, summing, and the last micro-batch's backward, behind which the sum could hide.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.multiprocessing as mp
import typer

from benchmarks.agbn.overlap.links import LINKS
from benchmarks.agbn.overlap.steps import CASES, SEED, run
from benchmarks.environment import MALLOC, environment
from benchmarks.results import console, read, write

HERE = Path(__file__).parent
RANKS = 2


def of_ranks(case: str, links: list[str], rounds: int) -> Any:
    """Return what rank 0 has found of one case."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        work = (RANKS, str(Path(folder) / "meet"), [case], links, rounds, str(answer))
        mp.spawn(_serve, args=work, nprocs=RANKS)  # type: ignore[attr-defined, no-untyped-call]
        return json.loads(answer.read_text())[case]


def _serve(
    rank: int, size: int, meet: str, cases: list[str], links: list[str], rounds: int, answer: str
) -> None:
    found = run(rank, size, meet, cases, links, rounds)
    if rank == 0:
        Path(answer).write_text(json.dumps(found))


def one_mode(cases: list[str], rounds: int) -> dict[str, Any]:
    """Measure in this process's malloc mode."""
    found = {}
    for case in cases:
        console.print(case)
        found[case] = {"rounds": rounds, **of_ranks(case, list(LINKS), rounds)}
    torch.set_num_threads(1)
    return {"environment": environment(), "cases": found}


def child(mode: str, rounds: int, only: str) -> dict[str, Any]:
    """Measure in a process that was started in a malloc mode."""
    console.print(f"malloc mode {mode}")
    command = [sys.executable, "-m", "benchmarks.agbn.overlap.run", "--here"]
    ours = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    done = subprocess.run(
        [*command, "--rounds", str(rounds), "--only", only],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**ours, **MALLOC[mode], "OMP_NUM_THREADS": "1"},
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    rounds: Annotated[int, typer.Option(help="rounds of timings")] = 20,
    only: Annotated[str, typer.Option(help="steps whose name holds this; others are kept")] = "",
    here: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Measure in both malloc modes and write results.json."""
    if quick:
        rounds, only = 2, "transformer, 4"
    if here:
        print(json.dumps(one_mode([case for case in CASES if only in case], rounds)))
        return
    saved = (read(out / "results.json") or {}).get("modes", {}) if only else {}
    modes = {mode: child(mode, rounds, only) for mode in MALLOC}
    for mode, found in modes.items():
        found["cases"] = saved.get(mode, {}).get("cases", {}) | found["cases"]
    write(out / "results.json", {"seed": SEED, "modes": modes})


if __name__ == "__main__":
    typer.run(main)
