"""Memory of a step in 16 lanes against the undivided batch, inside and outside the process.

A lane is one micro-batch; lanes wait for each other at every BatchNorm. Three networks in float32:
ResNet-18 of width 64 on 256 images of 32 pixels, a U-Net of width 32 on 128 images of 64 pixels,
ResNet-50 on 256 images of 64 pixels. Tensors of waiting lanes are offloaded to a file, as with
`micro_batch=` alone, except those of the next lanes: up to 1.5 times the bytes of one lane's turn
(its run between two waits). `plain` is a hand-written loop over micro-batches of that size, each
normalised by itself.

Live bytes are those of tensors at the peak of the second step: parameters, buffers, gradients and
all allocations of the step, without the mini-batch. The goal is a tenth of the undivided batch's,
plus a set of gradients. The process columns are the peak memory of the process, as its parent reads
it from the system, less that after a step of two samples. Their malloc mode is "tight": large
blocks return to the system when they are freed.

The second table changes the number of micro-batches of a small ResNet: plain and lanes fall
together. The third changes the size from which mode tight maps blocks by themselves. Each size has
its own process, the processes alternate their steps, and times are over those of the largest size.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

from anybatch.cli.allocator import TUNABLES, glibc, settings_of
from benchmarks.agbn.lanes_memory.one import NETS
from benchmarks.environment import environment
from benchmarks.results import console, read, write

HERE = Path(__file__).parent
LANES = 16
COUNTS = (2, 4, 8, 16, 32, 64, 128)
SMALL = "small"
THRESHOLDS = (2**20, 2**19, 2**17)
ROUNDS = 5
SHARE = 0.10
WAYS = ("undivided", "plain", "lanes")
Results = dict[str, Any]


class Child:
    """A network trained one way in a process of its own, whose malloc was set before it started.

    Attributes:
        found: what it has counted, and by how much it has grown.
    """

    def __init__(self, name: str, way: str, lanes: int, malloc: dict[str, str]) -> None:
        other = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", TUNABLES))}
        command = [sys.executable, "-m", "benchmarks.agbn.lanes_memory.one", name, way, str(lanes)]
        self._process = subprocess.Popen(
            command,
            env={**other, **malloc},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()
        before = resident(self._process.pid, "VmRSS")
        self._say("go on")
        self.found: Results = json.loads(self._read())
        self.found["growth"] = resident(self._process.pid, "VmHWM") - before

    def step(self) -> float:
        """Take a step more; its seconds."""
        self._say("step")
        return float(self._read())

    def close(self) -> None:
        """End the process."""
        self._say("end")
        self._process.communicate()

    def _say(self, word: str) -> None:
        print(word, file=self._process.stdin, flush=True)

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a step must end, and its process did with {self._process.wait()}")
        return line


def child(name: str, way: str, lanes: int) -> Results:
    """Run one way in a new process in mode tight."""
    one = Child(name, way, lanes, settings_of("tight", glibc()))
    one.close()
    return one.found


def thresholds(names: tuple[str, ...], sizes: tuple[int, ...], rounds: int) -> Results:
    """Growth and time of mode tight if its blocks are mapped from other sizes on.

    The processes of a network and way take their steps in turns; times are over the first size's.
    """
    found: Results = {}
    for name, way in [(name, way) for name in names for way in WAYS[1:]]:
        lanes = 2 if name == SMALL else LANES
        every = {}
        for size in track(sizes, description=f"{name}, {way}", console=console, auto_refresh=False):
            malloc = settings_of("tight", glibc()) | {"MALLOC_MMAP_THRESHOLD_": str(size)}
            every[size] = Child(name, way, lanes, malloc)
        timings = []
        for index in track(range(rounds), description="in turns", console=console):
            order = sizes if index % 2 else sizes[::-1]
            timings.append({size: every[size].step() for size in order})
        for size, one in every.items():
            one.close()
            ratio = statistics.median(row[size] / row[sizes[0]] for row in timings)
            cell = {"growth": one.found["growth"], "peak": one.found["peak"], "time": ratio}
            found.setdefault(str(size), {}).setdefault(name, {})[way] = cell
    return found


def resident(pid: int, field: str) -> int:
    """Bytes of a process in memory, now (VmRSS) or at most so far (VmHWM)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def judged(cells: Results) -> Results:
    """The cells of a network with the shares of the undivided batch, and whether the goal is kept.

    Gradients are taken off the lanes'; parameters and buffers were there before the growth.
    """
    lanes, undivided = cells["lanes"], cells["undivided"]
    inside = (lanes["peak"] - lanes["gradients"]) / undivided["peak"]
    grown = lanes["growth"] + lanes["states"] - lanes["gradients"]
    outside = grown / (undivided["growth"] + undivided["states"])
    share = {"inside": round(inside, 4), "outside": round(outside, 4)}
    return {"ways": cells, "share": share, "kept": inside <= SHARE}


def scanned(counts: tuple[int, ...]) -> Results:
    """What the small network holds by the number of micro-batches."""
    scan = {"1": {"undivided": child(SMALL, "undivided", 1)}}
    for count in track(counts, description="scan", console=console, auto_refresh=False):
        scan[str(count)] = {way: child(SMALL, way, count) for way in WAYS[1:]}
    return scan


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    only: Annotated[str, typer.Option(help="networks, scan or thresholds; comma between")] = "",
) -> None:
    """Train each way in a process of its own and write results.json."""
    names = [name for name in NETS if name != SMALL]
    chosen = only.split(",") if only else [*names, "scan", "thresholds"]
    if quick:
        chosen = ["scan", "thresholds"]
    results = read(out / "results.json") or {"nets": {}, "scan": {}}
    for name in (n for n in names if n in chosen):
        cells = {
            way: child(name, way, LANES)
            for way in track(WAYS, description=name, console=console, auto_refresh=False)
        }
        results["nets"][name] = judged(cells)
    if "scan" in chosen:
        results["scan"] = scanned((2,) if quick else COUNTS)
    if "thresholds" in chosen:
        nets = (SMALL,) if quick else tuple(names[::2])
        timings = thresholds(nets, THRESHOLDS[:2] if quick else THRESHOLDS, 1 if quick else ROUNDS)
        results["thresholds"] = timings
    sizes = {n: {"pixels": net.pixels, "batch": net.batch} for n, net in NETS.items()}
    where = environment() | {"malloc": "tight", "threads": 1}
    facts = {"environment": where, "seed": 0, "sizes": sizes, "lanes": LANES}
    write(out / "results.json", results | facts)


if __name__ == "__main__":
    typer.run(main)
