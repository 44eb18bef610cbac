"""Time of a step in lanes, compared with plain micro-batching of the same size.

A lane is one micro-batch; lanes wait for each other at every BatchNorm. Plain micro-batching is a
hand-written loop that normalises each micro-batch by itself. It computes another function, moves
nothing and waits nowhere, so it is the limit. A ResNet-18 for images of 32 pixels runs in five
ways: undivided; plain; and in lanes, with all tensors in memory (`stays`), with a dispatch mode
that watches and moves nothing (`watched`), and with waiting lanes offloaded to a file (`leaves`).
Every way runs in every round, in alternating order; figures are medians of the ratios within
rounds. Processor seconds are those of all threads.

The parts are timed by themselves: threads that only switch, BatchNorm forward and backward from
cold memory against torch's own, and the moved bytes, written and read by one thread. `mode` is
watched - stays, `copies` is leaves - watched, and `rest` is the remainder of stays - plain: the
activations of all micro-batches are in memory at once, and no cache holds them.

Two scans change the number of micro-batches of a batch, and the number of BatchNorm layers of one
network. Both malloc modes run, each in a child process, because the undivided batch is faster with
large thresholds; its better mode counts.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.agbn.lanes_parts.curves import draw
from benchmarks.agbn.lanes_parts.parts import copying, normalising, shapes, switching
from benchmarks.agbn.lanes_parts.ways import (
    ROOMS,
    WAYS,
    Subject,
    against,
    in_lanes,
    rounds,
    subject,
)
from benchmarks.environment import MALLOC, environment
from benchmarks.results import console, read, write

HERE = Path(__file__).parent
FULL: dict[str, Any] = {
    "total": {"width": 64, "blocks": (2, 2, 2, 2), "batch": 256, "lanes": 16, "rounds": 5},
    "lanes": {"width": 16, "blocks": (2, 2, 2, 2), "batch": 128, "rounds": 7},
    "layers": {"width": 16, "blocks": (2, 2, 2, 2), "batch": 128, "lanes": 16, "rounds": 7},
}
QUICK: dict[str, Any] = {
    "total": {"width": 4, "blocks": (1, 1), "batch": 16, "lanes": 4, "rounds": 1},
    "lanes": {"width": 4, "blocks": (1, 1), "batch": 16, "rounds": 1},
    "layers": {"width": 4, "blocks": (1, 1), "batch": 16, "lanes": 4, "rounds": 1},
}
COUNTS = (2, 4, 8, 16, 32, 64)
NORMS = (1, 2, 4, 8, 12, 17)
PARTS = tuple(FULL)
Results = dict[str, Any]


def total(size: Results) -> Results:
    """All ways of one network, and the parts."""
    n = size["batch"] // size["lanes"]
    workload = subject(size["width"], size["blocks"], size["batch"], n)
    timings = rounds(workload, WAYS, size["rounds"])
    found: Results = {"seconds": {way: [one[way] for one in timings] for way in WAYS}}
    for other in ("plain", "undivided"):
        for clock, name in enumerate(("clock", "processor")):
            found[f"to {other}, {name}"] = {
                way: against(timings, way, other, clock) for way in WAYS if way != other
            }
    found["parts"] = parts(workload, size["lanes"])
    return found


def parts(workload: Subject, lanes: int) -> Results:
    """The parts by themselves, in seconds of a step."""
    engine = in_lanes(workload, "leaves")
    for _ in range(2):
        engine.backward(workload.x, workload.y)
    assert engine.last is not None
    moved, every = engine.last.moved_bytes, shapes(workload)
    sizes = sorted(4 * torch.Size(shape).numel() for shape in every)
    return {
        "switching": switching(lanes, 2 * len(every)),
        "BatchNorm": normalising(workload, lanes),
        "moved bytes": moved,
        "copying": copying(sizes[len(sizes) // 2], moved),
        "norms": len(every),
    }


def by_lanes(size: Results) -> Results:
    """Ratios to plain micro-batching for several numbers of micro-batches of one batch."""
    found: Results = {}
    for count in (k for k in COUNTS if k <= size["batch"] // 2):
        workload = subject(size["width"], size["blocks"], size["batch"], size["batch"] // count)
        timings = rounds(workload, ("plain", *ROOMS), size["rounds"])
        found[str(count)] = {way: against(timings, way, "plain") for way in ROOMS}
    return found


def by_layers(size: Results) -> Results:
    """The same for several numbers of BatchNorm layers in one network."""
    found: Results = {}
    n, most = size["batch"] // size["lanes"], 2 * sum(size["blocks"]) + 1
    for count in (k for k in NORMS if k <= most):
        workload = subject(size["width"], size["blocks"], size["batch"], n, count)
        timings = rounds(workload, ("plain", *ROOMS), size["rounds"])
        found[str(count)] = {way: against(timings, way, "plain") for way in ROOMS}
    return found


MEASURED = {"total": total, "lanes": by_lanes, "layers": by_layers}


def child(mode: str, only: str, *, quick: bool) -> Results:
    """The same in a new process whose malloc was set before it started."""
    console.print(f"{only}, malloc mode {mode}")
    ours = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    command = [sys.executable, "-m", "benchmarks.agbn.lanes_parts.run", "--here", "--only", only]
    done = subprocess.run(
        [*command, *(["--quick"] if quick else [])],
        env={**ours, **MALLOC[mode]},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found: Results = json.loads(done.stdout.splitlines()[-1])
    return found


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    only: Annotated[str, typer.Option(help="total, lanes or layers; the others are kept")] = "",
    here: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Measure the parts in both malloc modes; write results.json and curves.png."""
    sizes = QUICK if quick else FULL
    if here:
        torch.set_num_threads(1)
        found = {only: MEASURED[only](sizes[only]), "environment": environment()}
        print(json.dumps(found))
        return
    results = read(out / "results.json") or {}
    modes: Results = results.get("modes", {mode: {} for mode in MALLOC})
    for name in (only,) if only else PARTS[:1] if quick else PARTS:
        for mode in MALLOC:
            modes[mode] |= child(mode, name, quick=quick)
    shown = {name: {k: str(v) for k, v in size.items()} for name, size in sizes.items()}
    results = {"seed": 0, "sizes": shown, "modes": modes}
    write(out / "results.json", results)
    draw(results, out / "curves.png")


if __name__ == "__main__":
    typer.run(main)
