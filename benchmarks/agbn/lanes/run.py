"""BatchNorm of the whole batch in lanes: bytes and seconds beside the undivided batch.

A ResNet of four stages for 32 pixels, with BatchNorm, float32. The undivided batch is torch alone;
`local` is a loop by hand over micro-batches of the same size, another function, because each is
normalised by itself: it is what exactness is paid against. `stays` lets everything that waits stay
in memory; `leaves` sends all of it to an unlinked file, which is what `micro_batch=` alone does.

Bytes are live bytes of tensors at the peak, of one step, from empty gradients. Seconds are compared
in pairs, the order alternating: the figure is the median of time(lanes) / time(other), below 1 the
lanes are faster. The undivided batch is quicker with large malloc thresholds (its large blocks need
not be mapped anew), so both modes run, each in a child process started with them.
"""

import copy
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine
from anybatch.meter import Meter
from benchmarks.environment import MALLOC, environment
from benchmarks.mbs.models import ResNet
from benchmarks.results import console, write

HERE = Path(__file__).parent
BATCH, PIXELS, WIDTH = 128, 32, 16
MICRO_BATCHES = (32, 8, 2)
AMPLE = "1000GiB"
WARM_UP = 2
Run = Callable[[nn.Module, Tensor, Tensor], None]


def normalised(model: nn.Module) -> nn.Module:
    """Return the model with BatchNorm in the place of GroupNorm."""
    for name, child in model.named_children():
        if isinstance(child, nn.GroupNorm):
            setattr(model, name, nn.BatchNorm2d(child.num_channels))
        else:
            normalised(child)
    return model


def undivided(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Torch alone."""
    torch.autograd.backward(F.cross_entropy(model(x), y))


def local(micro_batch: int) -> Run:
    """Return the loop by hand, whose BatchNorm is that of each micro-batch."""

    def run(model: nn.Module, x: Tensor, y: Tensor) -> None:
        parts = zip(torch.split(x, micro_batch), torch.split(y, micro_batch), strict=True)
        for part, target in parts:
            share = len(part) / len(x)
            torch.autograd.backward(F.cross_entropy(model(part), target) * share)

    return run


def lanes(micro_batch: int, memory: str | None) -> Run:
    """Return the engine; the same one for every step of a model."""
    engines: dict[int, Engine] = {}

    def run(model: nn.Module, x: Tensor, y: Tensor) -> None:
        engine = engines.get(id(model))
        if engine is None:
            engine = Engine(model, F.cross_entropy, memory=memory, micro_batch=micro_batch)
            engines[id(model)] = engine
        engine.backward(x, y)

    return run


def peak(run: Run, model: nn.Module, x: Tensor, y: Tensor) -> int:
    """Live bytes at the peak of a step that is not the first."""
    run(model, x, y)
    model.zero_grad()
    known = {"parameters": model.parameters(), "buffers": model.buffers()}
    with Meter(x.device, known) as meter:
        run(model, x, y)
    model.zero_grad()
    return int(meter.peak)


def seconds(run: Run, model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Wall seconds of one step from empty gradients."""
    model.zero_grad()
    start = perf_counter()
    run(model, x, y)
    return perf_counter() - start


def ratio(run: Run, other: Run, model: nn.Module, x: Tensor, y: Tensor, count: int) -> list[float]:
    """Quartiles of time(run) / time(other) over pairs."""
    models = {id(run): model, id(other): copy.deepcopy(model)}
    for one in (run, other) * WARM_UP:
        seconds(one, models[id(one)], x, y)
    found = []
    for index in range(count):
        order = (run, other) if index % 2 else (other, run)
        times = {id(one): seconds(one, models[id(one)], x, y) for one in order}
        found.append(times[id(run)] / times[id(other)])
    return [round(value, 3) for value in statistics.quantiles(found, n=4)]


def one_mode(count: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """All sizes and ways in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = normalised(ResNet(10, WIDTH, (1, 1, 1, 1)))
    x, y = torch.randn(BATCH, 3, PIXELS, PIXELS), torch.randint(10, (BATCH,))
    rows = []
    ways = [(n, memory) for n in sizes for memory in (AMPLE, None)]
    for n, memory in track(ways, console=console, auto_refresh=False):
        run = lanes(n, memory)
        row: dict[str, Any] = {"micro_batch": n, "way": "stays" if memory else "leaves"}
        row["peak"] = peak(run, copy.deepcopy(model), x, y)
        row["to undivided"] = ratio(run, undivided, model, x, y, count)
        row["to local"] = ratio(lanes(n, memory), local(n), copy.deepcopy(model), x, y, count)
        rows.append(row)
    whole = peak(undivided, copy.deepcopy(model), x, y)
    alone = {n: peak(local(n), copy.deepcopy(model), x, y) for n in sizes}
    return {"environment": environment(), "rows": rows, "whole": whole, "local": alone}


def child(mode: str, count: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """The same in a new process whose malloc was set before it started."""
    console.print(f"malloc mode {mode}")
    ours = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    command = [sys.executable, "-m", "benchmarks.agbn.lanes.run", "--here", "--pairs", str(count)]
    done = subprocess.run(
        [*command, "--sizes", ",".join(map(str, sizes))],
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
    count: Annotated[int, typer.Option("--pairs", help="pairs of timings")] = 15,
    sizes: Annotated[str, typer.Option(help="micro-batches")] = ",".join(map(str, MICRO_BATCHES)),
    here: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Measure lanes in both malloc modes and write results.json."""
    chosen = tuple(map(int, sizes.split(",")))
    if quick:
        count, chosen = 2, (32,)
    if here:
        print(json.dumps(one_mode(count, chosen)))
        return
    modes = {mode: child(mode, count, chosen) for mode in MALLOC}
    size = {"batch": BATCH, "pixels": PIXELS, "width": WIDTH}
    write(out / "results.json", {"seed": 0, "pairs": count, "sizes": size, "modes": modes})


if __name__ == "__main__":
    typer.run(main)
