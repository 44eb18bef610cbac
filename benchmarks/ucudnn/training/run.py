"""Two full trainings with large and long windows: torch's convolutions, and ours within 64 MiB.

Images: a small network in the manner of RepLKNet (depthwise windows of 31, 29 and 27 pixels) on
images of CIFAR-10. Sequences: two blocks in the manner of Hyena (a gated depthwise convolution with
a long window) on a synthetic task: noise recurs after one of four delays, the class. SGD with
momentum, float32. A seed has the same initial weights and mini-batches in both arms. Few images and
steps give far less than the usual accuracy: the comparison is between the arms.

The first 20 steps, on a smaller mini-batch, show whether both are the same training: in float64
every tensor must be within 1e-9, and in float32 within the distance of two trainings by torch that
differ only in the order of rows. The table adds each one's distance from torch in float64, because
another kernel rounds differently. The figures at the end are compared with the seeds' spread.
`wall` is a full training with its evaluations, in ours with measuring for the choice too: the first
seed measures, later ones read its file. It runs in glibc's large malloc mode. `--images` is a
folder with train/CLASS and test/CLASS, 32x32 pixels.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any

import torch
import typer

from benchmarks.environment import environment
from benchmarks.modes import in_mode
from benchmarks.results import console, write
from benchmarks.ucudnn.device import refusal
from benchmarks.ucudnn.training.arms import ARMS, agreement, train
from benchmarks.ucudnn.training.curves import draw
from benchmarks.ucudnn.training.tasks import IMAGES, QUICK, SEQUENCES, Task, images, sequences

HERE = Path(__file__).parent
SEEDS = (0, 1, 2)
STEPS = 20
Found = dict[str, Any]


def one_task(task: Task, steps: int, seeds: tuple[int, ...], cache: Path, device: str) -> Found:
    """Compare first steps, then train every seed by both arms in turns."""
    start = perf_counter()
    found: Found = {"title": task.title, "lr": task.lr, "size": asdict(task.size)}
    found["agreement"] = agreement(task, steps, cache, device)
    console.print(f"first steps: {perf_counter() - start:.0f} s")
    found["runs"] = []
    for seed in seeds:
        for arm in ARMS:
            run = train(task, arm, seed, cache, device)
            found["runs"].append(run)
            console.print(f"seed {seed}, {arm}: {run['wall']:.0f} s, loss {run['loss'][-1]:.3f}")
    return found


def measured(
    made: dict[str, Callable[[], Task]], steps: int, seeds: tuple[int, ...], device: str
) -> Found:
    """Train everything in this process."""
    torch.set_num_threads(1)
    found: Found = {"environment": environment(), "seeds": list(seeds), "device": device}
    with TemporaryDirectory() as folder:
        cache = Path(folder) / "costs.sqlite"
        found["tasks"] = {
            name: one_task(make(), steps, seeds, cache, device) for name, make in made.items()
        }
    return found


def main(
    *,
    images_: Annotated[
        Path | None, typer.Option("--images", help="folder of train/CLASS, test/CLASS")
    ] = None,
    quick: bool = False,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    tasks: Annotated[str, typer.Option(help="names, comma between")] = "images,sequences",
    here: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Train; write results.json and curves.png. Without --images only sequences."""
    refused = refusal(device)
    if refused is not None:
        console.print(refused)
        return
    names = tasks.split(",")
    if images_ is None and "images" in names:
        console.print("the images are not part of this repository: give --images DIR to train")
        if not quick:
            return
        names.remove("images")
    if here:
        made: dict[str, Callable[[], Task]] = {
            "sequences": partial(sequences, QUICK if quick else SEQUENCES)
        }
        if images_ is not None:
            made["images"] = partial(images, images_, QUICK if quick else IMAGES)
        steps, seeds = (2, SEEDS[:1]) if quick else (STEPS, SEEDS)
        print(json.dumps(measured({name: made[name] for name in names}, steps, seeds, device)))
        return
    words = ["--device", device, "--tasks", ",".join(names), *(["--quick"] if quick else [])]
    words += ["--images", str(images_)] if images_ is not None else []
    found = in_mode("large", "benchmarks.ucudnn.training.run", *words)
    write(out / "results.json", found)
    draw(found, out / "curves.png")


if __name__ == "__main__":
    typer.run(main)
