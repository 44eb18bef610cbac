"""Forward and backward of one step: the engine against the best hand-written loop.

Timings on a shared machine drift by more than the difference in question, so nothing is compared
across time: by_hand and a subject run back to back, the order alternating, and the figure is the
median over pairs of time(by_hand) / time(subject). Above 1 the subject is faster. The engine gets
twice the pairs, and by_hand against itself shows the noise. The table also has the ratio of
processor time, which other work on the machine disturbs less: with one thread and nothing else to
do it equals the ratio of wall time. Both glibc malloc modes run, each in its own process.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter, process_time
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

from benchmarks.environment import MALLOC, environment
from benchmarks.mbs.loops import Loop
from benchmarks.mbs.measure import installed
from benchmarks.mbs.problem import Problem
from benchmarks.mbs.speed.problems import STEPS
from benchmarks.results import console, write

HERE = Path(__file__).parent
SEED = 0
Seconds = tuple[float, float]  # on the wall, of the processor
WARM_UP = 3  # untimed runs of each loop


def seconds(loop: Loop, problem: Problem, micro_batch: int) -> Seconds:
    """Wall and processor seconds of one forward and backward from empty gradients.

    The device is idle at both ends.
    """
    problem.model.zero_grad(set_to_none=True)
    cuda = next(problem.model.parameters()).is_cuda
    if cuda:
        torch.cuda.synchronize()
    wall, processor = perf_counter(), process_time()
    loop(problem, micro_batch)
    if cuda:
        torch.cuda.synchronize()
    return perf_counter() - wall, process_time() - processor


def pairs(
    first: Loop, second: Loop, problem: Problem, micro_batch: int, count: int
) -> list[tuple[Seconds, Seconds]]:
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


def summary(found: list[tuple[Seconds, Seconds]]) -> dict[str, float]:
    """Median and quartiles of the paired ratio, and the median seconds of both loops."""
    low, middle, high = statistics.quantiles([a[0] / b[0] for a, b in found], n=4)
    return {
        "pairs": len(found),
        "ratio": round(middle, 4),
        "ratio_low": round(low, 4),
        "ratio_high": round(high, 4),
        "ratio_processor": round(statistics.median(a[1] / b[1] for a, b in found), 4),
        "seconds_by_hand": round(statistics.median(a[0] for a, _ in found), 5),
        "seconds": round(statistics.median(b[0] for _, b in found), 5),
    }


def on_device(problem: Problem, device: str) -> Problem:
    """The same problem with model and batch on a device."""
    moved = {"inputs": problem.inputs.to(device), "targets": problem.targets.to(device)}
    return dataclasses.replace(problem, model=problem.model.to(device), **moved)


def one_mode(device: str, names: list[str], count: int, threads: int) -> dict[str, Any]:
    """Every subject on the named steps, in this process and its malloc mode."""
    torch.set_num_threads(threads)
    loops, missing = installed()
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name in names:
        make, micro_batch = STEPS[name]
        torch.manual_seed(SEED)
        problem = on_device(make(), device)
        results[name] = {
            key: summary(pairs(loops["by_hand"], loop, problem, micro_batch, times * count))
            for key, loop in track(loops.items(), name, console=console, auto_refresh=False)
            for times in [2 if key == "anybatch" else 1]
        }
    return {"environment": environment(), "steps": results, "missing": missing}


def child(mode: str, device: str, names: list[str], count: int, threads: int) -> dict[str, Any]:
    """The same in a new process whose malloc was set before it started."""
    console.print(f"malloc mode {mode}")
    ours = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    command = [sys.executable, "-m", "benchmarks.mbs.speed.run", "--here", "--device", device]
    done = subprocess.run(
        [*command, "--steps", ",".join(names), "--pairs", str(count), "--threads", str(threads)],
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
    count: Annotated[int, typer.Option("--pairs", help="pairs of timings, >= 30")] = 32,
    threads: int = 1,
    steps: Annotated[str, typer.Option(help="names of steps, comma between")] = ",".join(STEPS),
    here: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Time every step in both malloc modes and write results.json."""
    names, count = (["transformer"], 2) if quick else (steps.split(","), count)
    if here:
        print(json.dumps(one_mode(device, names, count, threads)))
        return
    modes = list(MALLOC) if device == "cpu" else ["default"]
    found = {mode: child(mode, device, names, count, threads) for mode in modes}
    name = "results.json" if device == "cpu" else f"results_{device}.json"
    sizes = {
        step: {"batch": STEPS[step][0]().batch, "micro_batch": STEPS[step][1]} for step in names
    }
    write(out / name, {"seed": SEED, "pairs": count, "sizes": sizes, "modes": found})


if __name__ == "__main__":
    typer.run(main)
