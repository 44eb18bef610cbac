"""The micro-batch that each finder chooses, compared with the best of a full sweep.

A finder gets a problem and a budget in live tensor bytes (a share of those of the undivided batch)
and returns a micro-batch. Then every size of a fine grid up to the largest that fits, and every
returned size, is timed in the same rounds: one step of the full batch with the hand-written loop. A
finder's share is the time of the best size that fits over the time of its own, in wall and in
processor time; each time is over the median of its round. The table also has the sizes that it
never tried and that would have been better (its own falls below 95 % of them), and the number of
tried sizes that ran out of memory. Seconds of a search include the meter's work, which is the same
for all. Both glibc malloc modes run, each in its own process.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer

from benchmarks.environment import MALLOC, environment
from benchmarks.mbs.choice.finders import Finder, Found, largest_that_fits
from benchmarks.mbs.choice.ours import FINDERS
from benchmarks.mbs.choice.problems import PROBLEMS
from benchmarks.mbs.choice.registry import missing
from benchmarks.mbs.choice.sweep import Sweep, grid, peak, relative, sweep
from benchmarks.mbs.problem import Problem
from benchmarks.results import console, write

HERE = Path(__file__).parent
SEED = 0
SHARES = (0.6, 0.3, 0.1)  # budget over the peak of the undivided batch
GOAL = 0.95  # of the best: a size is better where a finder's own falls below this share of it
QUICK_BATCH = 8
Searches = dict[str, tuple[Found, float]]  # finder -> what it found, seconds of the search


def search(problem: Problem, budget: int, finders: dict[str, Finder]) -> Searches:
    """What every finder finds, and how long its whole search took."""
    found: Searches = {}
    for name, find in finders.items():
        start = perf_counter()
        result = find(problem, budget)
        found[name] = result, perf_counter() - start
    return found


def row(found: Found, took: float, sweep: Sweep, peaks: dict[int, int], budget: int) -> Any:
    """One finder's row: its size, how good it is, and what it missed."""
    cells = {
        "size": found.size,
        "note": found.note,
        "tried": [[size, round(spent, 4), outcome] for size, spent, outcome in found.tried],
        "failed": sum(outcome == "out of memory" for *_, outcome in found.tried),
        "search_seconds": round(took, 3),
    }
    if found.size is None:
        return cells
    fitting = [size for size in sweep.wall if peaks[size] <= budget]
    worth, tried = relative(sweep.wall), {size for size, *_ in found.tried}
    better = [size for size in fitting if worth[size] < GOAL * worth[found.size]]
    return cells | {
        "seconds": round(median(sweep.wall[found.size]), 5),
        "share": share(worth, found.size, fitting),
        "share_processor": share(relative(sweep.processor), found.size, fitting),
        "peak_bytes": peaks[found.size],
        "over": peaks[found.size] > budget,
        "missed": [size for size in better if size not in tried],
    }


def share(worth: dict[int, float], size: int, fitting: list[int]) -> float | None:
    """The time of the best size that fits over that of `size`; None where nothing fits."""
    return round(min(worth[one] for one in fitting) / worth[size], 4) if fitting else None


def one_problem(problem: Problem, rounds: int, finders: dict[str, Finder]) -> dict[str, Any]:
    """Every finder at every budget, then one sweep over all sizes that matter."""
    undivided = peak(problem, problem.batch)
    budgets = {share: int(share * undivided) for share in SHARES}
    found = {share: search(problem, budget, finders) for share, budget in budgets.items()}
    caps = {share: largest_that_fits(problem, budget).size for share, budget in budgets.items()}
    sizes = {result.size for results in found.values() for result, _ in results.values()}
    sizes |= {size for cap in caps.values() if cap for size in grid(cap)}
    timed = sweep(problem, [size for size in sizes if size], rounds)
    peaks = {size: peak(problem, size) for size in timed.wall}
    return {
        "undivided_peak_bytes": undivided,
        "sweep": swept(timed, peaks),
        "budgets": {
            str(share): {
                "budget_bytes": budgets[share],
                "largest": caps[share],
                "finders": {
                    name: row(result, took, timed, peaks, budgets[share])
                    for name, (result, took) in results.items()
                },
            }
            for share, results in found.items()
        },
    }


def swept(timed: Sweep, peaks: dict[int, int]) -> dict[int, dict[str, Any]]:
    """Every size of the sweep: both medians, its peak, and the rounds they come from."""
    return {
        size: {
            "seconds": round(median(timed.wall[size]), 5),
            "seconds_processor": round(median(timed.processor[size]), 5),
            "peak_bytes": peaks[size],
            "rounds": [round(one, 5) for one in timed.wall[size]],
            "rounds_processor": [round(one, 5) for one in timed.processor[size]],
        }
        for size in timed.wall
    }


def on_device(problem: Problem, device: str) -> Problem:
    """The same problem with model and batch on a device."""
    moved = {"inputs": problem.inputs.to(device), "targets": problem.targets.to(device)}
    return dataclasses.replace(problem, model=problem.model.to(device), **moved)


def one_mode(
    device: str, names: list[str], rounds: int, threads: int, batch: int | None
) -> dict[str, Any]:
    """Every problem, in this process and its malloc mode."""
    torch.set_num_threads(threads)
    absent = missing()
    finders = {name: find for name, find in FINDERS.items() if name not in absent}
    results = {}
    for name in names:
        console.print(f"  {name}")
        torch.manual_seed(SEED)
        problem = PROBLEMS[name](batch) if batch else PROBLEMS[name]()
        results[name] = one_problem(on_device(problem, device), rounds, finders)
    return {"environment": environment(), "problems": results, "missing": absent}


def child(mode: str, options: list[str]) -> dict[str, Any]:
    """The same in a new process whose malloc was set before it started."""
    console.print(f"malloc mode {mode}")
    ours = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.mbs.choice.run", "--here", *options],
        env={**ours, **MALLOC[mode]},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    device: str = "cpu",
    rounds: Annotated[int, typer.Option(help="rounds of the sweep, >= 5")] = 9,
    threads: int = 1,
    problems: Annotated[str, typer.Option(help="names, comma between")] = ",".join(PROBLEMS),
    here: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Let every finder choose, sweep, in both malloc modes, and write results.json."""
    names, rounds = (["transformer"], 2) if quick else (problems.split(","), rounds)
    batch = QUICK_BATCH if quick else None
    if here:
        print(json.dumps(one_mode(device, names, rounds, threads, batch)))
        return
    options = ["--device", device, "--rounds", str(rounds), "--threads", str(threads)]
    options += ["--problems", ",".join(names), *(["--quick"] if quick else [])]
    modes = list(MALLOC) if device == "cpu" else ["default"]
    found = {mode: child(mode, options) for mode in modes}
    name = "results.json" if device == "cpu" else f"results_{device}.json"
    batches = {name: {"batch": batch or PROBLEMS[name]().batch} for name in names}
    write(out / name, {"seed": SEED, "rounds": rounds, "sizes": batches, "modes": found})


if __name__ == "__main__":
    typer.run(main)
