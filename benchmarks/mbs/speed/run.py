"""Forward and backward of one step: the engine against the best loop by hand.

Timings on a shared machine drift by more than the difference asked about, so nothing is
compared across time: by_hand and a subject run back to back, the order alternating, and the
figure is the median over pairs of time(by_hand) / time(subject). Above 1 the subject is
faster. by_hand against itself shows the noise. Both glibc malloc modes run, each in a child
process started with them (design, 5.10).
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

from benchmarks.environment import MALLOC, environment
from benchmarks.mbs.loops import PEERS, Loop
from benchmarks.mbs.ours import SUBJECTS
from benchmarks.mbs.problem import Problem
from benchmarks.mbs.speed.problems import STEPS
from benchmarks.results import console, write

HERE = Path(__file__).parent
SEED = 0
WARM_UP = 3  # untimed runs of each loop


def seconds(loop: Loop, problem: Problem, micro_batch: int) -> float:
    """One forward and backward, from empty gradients; the device is idle at both ends."""
    problem.model.zero_grad(set_to_none=True)
    cuda = next(problem.model.parameters()).is_cuda
    if cuda:
        torch.cuda.synchronize()
    start = perf_counter()
    loop(problem, micro_batch)
    if cuda:
        torch.cuda.synchronize()
    return perf_counter() - start


def pairs(
    first: Loop, second: Loop, problem: Problem, micro_batch: int, count: int
) -> list[tuple[float, float]]:
    """`count` back-to-back timings of both, the order alternating."""
    for loop in (first, second) * WARM_UP:
        seconds(loop, problem, micro_batch)
    found = []
    for index in range(count):
        if index % 2:
            b, a = (seconds(loop, problem, micro_batch) for loop in (second, first))
        else:
            a, b = (seconds(loop, problem, micro_batch) for loop in (first, second))
        found.append((a, b))
    return found


def summary(found: list[tuple[float, float]]) -> dict[str, float]:
    """Median and quartiles of the paired ratio, and the median seconds of both loops."""
    ratios = [a / b for a, b in found]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "ratio": round(middle, 4),
        "ratio_low": round(low, 4),
        "ratio_high": round(high, 4),
        "seconds_by_hand": round(statistics.median(a for a, _ in found), 5),
        "seconds": round(statistics.median(b for _, b in found), 5),
    }


def on_device(problem: Problem, device: str) -> Problem:
    """The same problem with model and batch on a device."""
    moved = {"inputs": problem.inputs.to(device), "targets": problem.targets.to(device)}
    return dataclasses.replace(problem, model=problem.model.to(device), **moved)


def one_mode(device: str, count: int, threads: int) -> dict[str, Any]:
    """Every step and subject in this process and its malloc mode."""
    torch.set_num_threads(threads)
    missing = [name for name, module in PEERS.items() if find_spec(module) is None]
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name, (make, micro_batch) in STEPS.items():
        torch.manual_seed(SEED)
        problem = on_device(make(), device)
        loops = {key: loop for key, loop in SUBJECTS.items() if key not in missing}
        results[name] = {
            key: summary(pairs(loops["by_hand"], loop, problem, micro_batch, count))
            for key, loop in track(loops.items(), name, len(loops), console=console)
        }
    return {"environment": environment(), "steps": results, "missing": missing}


def child(mode: str, device: str, count: int, threads: int) -> dict[str, Any]:
    """The same in a new process whose malloc was set before it started."""
    console.print(f"malloc mode {mode}")
    ours = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    command = [sys.executable, "-m", "benchmarks.mbs.speed.run", "--here", "--device", device]
    done = subprocess.run(
        [*command, "--pairs", str(count), "--threads", str(threads)],
        env={**ours, **MALLOC[mode]},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    device: str = "cpu",
    count: Annotated[int, typer.Option("--pairs", help="pairs of timings, >= 30")] = 40,
    threads: int = 1,
    here: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Time every step in both malloc modes and write results.json."""
    count = 2 if quick else count
    if here:
        print(json.dumps(one_mode(device, count, threads)))
        return
    modes = list(MALLOC) if device == "cpu" else ["default"]
    found = {mode: child(mode, device, count, threads) for mode in modes}
    name = "results.json" if device == "cpu" else f"results_{device}.json"
    sizes = {name: {"batch": make().batch, "micro_batch": n} for name, (make, n) in STEPS.items()}
    write(out / name, {"seed": SEED, "pairs": count, "sizes": sizes, "modes": found})


if __name__ == "__main__":
    typer.run(main)
