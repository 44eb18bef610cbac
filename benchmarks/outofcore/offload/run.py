"""Hand-written forward and backward, in memory and within a budget (`anybatch.offload`).

Budgets are shares of the live peak of the same step in memory, including weights, gradients and
rows; `all that may leave` is the least that hooks on saved tensors can do. A step in memory and one
in another way run back to back, the order alternating: `wall` is the median (and the quartiles) of
time(way) / time(in memory), above 1 where offloading costs time. `live peak` is measured in a step
that follows its plan, and listed with the prediction. Tensors are offloaded from the CPU to an
unlinked file past the page cache, from CUDA to pinned host memory; `save_on_cpu` is torch's own and
has no meaning on a CPU. Gradients are compared bit for bit. Both glibc malloc modes run, each in
its own process.
"""

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.environment import environment
from benchmarks.mbs.problem import Problem
from benchmarks.mbs.speed.problems import STEPS
from benchmarks.modes import in_both_modes
from benchmarks.outofcore.offload.steps import Step, measured, ways
from benchmarks.results import console, write

HERE = Path(__file__).parent
SEED = 0
SHARES = (0.75, 0.5, 0.35)
NAMES = ("resnet18", "unet96", "transformer")


def problem_of(name: str, device: str) -> Problem:
    """A problem of the speed table on a device."""
    torch.manual_seed(SEED)
    problem = STEPS[name][0]()
    rows = {"inputs": problem.inputs.to(device), "targets": problem.targets.to(device)}
    return dataclasses.replace(problem, model=problem.model.to(device), **rows)


def one_mode(names: list[str], rounds: int, device: str, spill: Path | None) -> dict[str, Any]:
    """Every step in every way, in this process and its malloc mode."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in names:
        console.print(name)
        step = Step(problem_of(name, device))
        every = ways(step, SHARES, spill)
        peak = step.peak(nullcontext())
        rows = {way: measured(step, around, rounds) for way, around in every.items()}
        found[name] = {"in memory": peak, "ways": rows}
    return {"environment": environment(), "steps": found}


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    rounds: Annotated[int, typer.Option(help="pairs of timings")] = 20,
    steps: Annotated[str, typer.Option(help="names, comma between")] = ",".join(NAMES),
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    spill: Annotated[Path | None, typer.Option(help="folder of the spill file")] = None,
    here: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Measure in both malloc modes and write results.json."""
    names = steps.split(",")
    if quick:
        names, rounds = names[:1], 2
    if here:
        print(json.dumps(one_mode(names, rounds, device, spill)))
        return
    words = ["--steps", ",".join(names), "--rounds", str(rounds), "--device", device]
    words += [] if spill is None else ["--spill", str(spill)]
    modes = in_both_modes("benchmarks.outofcore.offload.run", *words)
    write(out / "results.json", {"seed": SEED, "rounds": rounds, "modes": modes})


if __name__ == "__main__":
    typer.run(main)
