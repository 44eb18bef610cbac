"""What a step in 16 lanes holds beside the undivided batch, counted inside and seen from outside.

Three networks with BatchNorm, float32: ResNet-18 of width 64 on 256 images of 32 pixels, a U-Net of
width 32 on 128 images of 64 pixels, ResNet-50 on 256 images of 64 pixels. All that waits leaves for
a file, as `micro_batch=` alone has it, but for what the next micro-batches need: as many bytes as
one holds in a turn, one and a half times. `plain` is a loop by hand over micro-batches of the same
size, which are normalised by themselves.

Live bytes are those of tensors at the peak of the second step: parameters, buffers, gradients and
all that the step allocates, without the mini-batch. The goal is a tenth of the undivided batch's,
plus a set of gradients. From outside: the most that the process has had in memory, as its parent
reads it from the system, less what it had after a step of two samples; in the malloc mode "tight",
where blocks over 1 MiB return to the system when they are freed.

A scan over the number of micro-batches of a small ResNet shows both fall together.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

from anybatch.apps.allocator import glibc, settings_of
from benchmarks.agbn.lanes_memory.one import NETS
from benchmarks.results import console, read, write

HERE = Path(__file__).parent
LANES = 16
COUNTS = (2, 4, 8, 16, 32, 64, 128)
SMALL = "small"
SHARE = 0.10
WAYS = ("undivided", "plain", "lanes")
Results = dict[str, Any]


def child(name: str, way: str, lanes: int) -> Results:
    """Run one way in a new process; what it counted, and by how much it has grown."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    command = [sys.executable, "-m", "benchmarks.agbn.lanes_memory.one", name, way, str(lanes)]
    with subprocess.Popen(
        command,
        env={**ours, **settings_of("tight", glibc())},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        said = process.stdout.readline()
        before = resident(process.pid, "VmRSS")
        print(file=process.stdin, flush=True)
        said = process.stdout.readline()
        most = resident(process.pid, "VmHWM")
        print(file=process.stdin, flush=True)
    found: Results = json.loads(said)
    return {**found, "growth": most - before}


def resident(pid: int, field: str) -> int:
    """Bytes of a process in memory, now (VmRSS) or at most so far (VmHWM)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def judged(cells: Results) -> Results:
    """The cells of a network with the shares of the undivided batch, and whether the goal is kept.

    Gradients are taken off the lanes'; parameters and buffers were there before the growth.
    """
    lanes, whole = cells["lanes"], cells["undivided"]
    inside = (lanes["peak"] - lanes["gradients"]) / whole["peak"]
    grown = lanes["growth"] + lanes["states"] - lanes["gradients"]
    outside = grown / (whole["growth"] + whole["states"])
    share = {"inside": round(inside, 4), "outside": round(outside, 4)}
    return {"ways": cells, "share": share, "kept": inside <= SHARE}


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    only: Annotated[str, typer.Option(help="networks, or scan; comma between")] = "",
) -> None:
    """Train each way in a process of its own and write results.json."""
    names = [name for name in NETS if name != SMALL]
    chosen = only.split(",") if only else [*names, "scan"]
    if quick:
        chosen = ["scan"]
    results = read(out / "results.json") or {"nets": {}, "scan": {}}
    for name in (n for n in names if n in chosen):
        cells = {
            way: child(name, way, LANES)
            for way in track(WAYS, description=name, console=console, auto_refresh=False)
        }
        results["environment"] = cells["lanes"]["environment"]
        results["nets"][name] = judged({w: _without(cell) for w, cell in cells.items()})
    if "scan" in chosen:
        counts = (2,) if quick else COUNTS
        scan = {"1": {"undivided": child(SMALL, "undivided", 1)}}
        results["environment"] = scan["1"]["undivided"]["environment"]
        for count in track(counts, description="scan", console=console, auto_refresh=False):
            scan[str(count)] = {way: child(SMALL, way, count) for way in ("plain", "lanes")}
        results["scan"] = {
            k: {way: _without(cell) for way, cell in ways.items()} for k, ways in scan.items()
        }
    sizes = {n: {"pixels": net.pixels, "batch": net.batch} for n, net in NETS.items()}
    write(out / "results.json", results | {"seed": 0, "sizes": sizes, "lanes": LANES})


def _without(cell: Results) -> Results:
    return {key: value for key, value in cell.items() if key != "environment"}


if __name__ == "__main__":
    typer.run(main)
