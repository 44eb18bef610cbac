"""BatchNorm over ranks compared with local BatchNorm: speed, communication, bytes and numerics.

Real processes on gloo, one thread each, run on one machine. A step of ResNet-20 on 32 pixels is
forward, backward, and one all-reduce of all gradients. `local` is torch's BatchNorm, each rank by
its own rows; `global` is `anybatch.global_batchnorm`. `global, nothing sent` computes the same sums
without sending: the difference from `global` is communication and waiting. Speed is seconds(local)
/ seconds(global) of the slowest rank, paired within a round.

Where there are more ranks than cores, ranks wait for the processor, not only for each other: those
rows show how often a rank waits, not the cost of a network.

Bytes are those that the loopback device has sent, a rank's share of them; 2 M (N - 1) / N is the
volume of a ring all-reduce (AGBN, section 4.1). Numerics: the relative error of the variance of
4,096 float32 rows with deviation 0.1 on 2 ranks, against float64.
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

from benchmarks.agbn.global_bn.numerics import errors
from benchmarks.agbn.global_bn.steps import SEED, run
from benchmarks.environment import MALLOC, environment
from benchmarks.results import console, write

HERE = Path(__file__).parent
RANKS, BATCHES, MEANS = (2, 4, 8), (8, 32), (0.0, 1e2, 1e3, 1e4)


def of_ranks(size: int, batches: tuple[int, ...], rounds: int) -> Any:
    """Return what rank 0 of `size` processes has found."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        work = (size, str(Path(folder) / "meet"), batches, rounds, str(answer))
        mp.spawn(_serve, args=work, nprocs=size)  # type: ignore[attr-defined, no-untyped-call]
        return json.loads(answer.read_text())


def _serve(rank: int, size: int, meet: str, batches: Any, rounds: int, answer: str) -> None:
    found = run(rank, size, meet, batches, rounds)
    if rank == 0:
        Path(answer).write_text(json.dumps(found))


def one_mode(ranks: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Measure in this process's malloc mode."""
    found = {}
    for size in ranks:
        console.print(f"{size} ranks")
        found[str(size)] = of_ranks(size, BATCHES, max(3, 2 * rounds // size))
    torch.set_num_threads(1)
    return {"environment": environment(), "ranks": found}


def child(mode: str, ranks: str, rounds: int) -> dict[str, Any]:
    """Measure in a process that was started in a malloc mode."""
    console.print(f"malloc mode {mode}")
    command = [sys.executable, "-m", "benchmarks.agbn.global_bn.run", "--here"]
    options = ["--ranks", ranks, "--rounds", str(rounds)]
    done = subprocess.run(
        [*command, *options],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**_environ(), **MALLOC[mode], "OMP_NUM_THREADS": "1"},
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _environ() -> dict[str, str]:
    names = {name for mode in MALLOC.values() for name in mode}
    return {name: value for name, value in os.environ.items() if name not in names}


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    rounds: Annotated[int, typer.Option(help="rounds of timings, for two ranks")] = 40,
    ranks: Annotated[str, typer.Option(help="numbers of processes")] = ",".join(map(str, RANKS)),
    here: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Measure in both malloc modes and write results.json."""
    if quick:
        rounds, ranks = 3, "2"
    if here:
        print(json.dumps(one_mode(tuple(map(int, ranks.split(","))), rounds)))
        return
    modes = {mode: child(mode, ranks, rounds) for mode in MALLOC}
    numerics = {f"{mean:g}": errors(mean, 2) for mean in MEANS}
    write(out / "results.json", {"seed": SEED, "modes": modes, "numerics": numerics})


if __name__ == "__main__":
    typer.run(main)
