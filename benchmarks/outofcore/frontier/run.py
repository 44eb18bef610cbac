"""The memory and the time of a step: every way to hold less, in one run.

A ResNet and a DenseNet with BatchNorm and a transformer run in memory; with
`torch.utils.checkpoint` on half of their blocks, three in four, and every block; with torch's
`save_on_cpu`; with hooks that write every saved tensor to a file, as a person would; and in
`anybatch.offload`, with budgets from 0.9 to 0.4 of the peak in memory as far as they are feasible,
where tensors only move and where cheap ones may be recomputed too.

`peak` is the most live bytes, including weights, gradients and rows, measured in a step of its own.
`wall` is the median (and the quartiles) of time(way) / time(in memory): a step in memory runs
between two in other ways, every other round backwards. Gradients are compared bit for bit, and so
are the statistics of BatchNorm after the step: a recomputed block updates them twice.

On a CPU `save_on_cpu` does not move tensors, and with `pin_memory=True` it copies them within the
same memory: it is included because a person has that line. The bytes that the files by hand leave
in the page cache are memory too, and not counted; `anybatch.offload` bypasses it. Both glibc malloc
modes run, each in its own process.
"""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.environment import environment
from benchmarks.modes import in_both_modes
from benchmarks.outofcore.frontier.clock import measured
from benchmarks.outofcore.frontier.figure import draw
from benchmarks.outofcore.frontier.networks import NETWORKS, Network
from benchmarks.outofcore.frontier.ours import ours, reported
from benchmarks.outofcore.frontier.peers import peers
from benchmarks.outofcore.offload.steps import Step
from benchmarks.results import console, write

HERE = Path(__file__).parent
SEED = 0


def one(network: Network, rounds: int, spill: Path | None) -> dict[str, Any]:
    """Every way around the step of one network."""
    torch.manual_seed(SEED)
    step = Step(network.make())
    in_memory = step.peak(nullcontext())
    lines = peers(step.model, network.blocks(step.model), spill) | ours(step, spill)
    flat = {(line, name): way for line, ways in lines.items() for name, way in ways.items()}
    found = measured(step, flat, rounds)
    rows: dict[str, Any] = {line: {} for line in lines}
    for (line, name), row in found.items():
        rows[line][name] = row | reported(flat[line, name])
    return {"in memory": in_memory, "lines": rows}


def one_mode(names: list[str], rounds: int, spill: Path | None) -> dict[str, Any]:
    """Every network, in this process and its malloc mode."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in names:
        console.print(name)
        found[name] = one(NETWORKS[name], rounds, spill)
    return {"environment": environment(), "networks": found}


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    rounds: Annotated[int, typer.Option(help="timings of every way")] = 5,
    networks: Annotated[str, typer.Option(help="names, comma between")] = ",".join(NETWORKS),
    spill: Annotated[Path | None, typer.Option(help="folder of what goes to disk")] = None,
    here: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Measure in both malloc modes, write results.json and draw frontier.png."""
    names = networks.split(",")
    if quick:
        names, rounds = names[-1:], 2
    if here:
        print(json.dumps(one_mode(names, rounds, spill)))
        return
    words = ["--networks", ",".join(names), "--rounds", str(rounds)]
    words += [] if spill is None else ["--spill", str(spill)]
    modes = in_both_modes("benchmarks.outofcore.frontier.run", *words)
    results = {"seed": SEED, "rounds": rounds, "modes": modes}
    write(out / "results.json", results)
    draw(results, out)


if __name__ == "__main__":
    typer.run(main)
