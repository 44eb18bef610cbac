"""AGBN's Figure 4: the accuracy that global BatchNorm gains over local BatchNorm.

ResNet-20 trains on 2,000 images of CIFAR-10 (200 of each class) and is tested on 1,000, at total
batch sizes of 8 to 64 on 4 and on 8 devices. Global normalises by the full batch, the same training
for any number of devices; local by each device's share. One reshaped operation in one process
stands for the devices (`ghost.py`); a test compares it with processes under
DistributedDataParallel. A seed has the same initial weights, images, order, crops and mirrorings
everywhere. A gain is the difference between two trainings of one seed, in points, with the sample
deviation over seeds. The recipe of both is that of ResNet-20's paper, its learning rate in
proportion to the batch.

The paper speaks of training accuracy: the share that a step itself gets right, in train mode, over
the last epoch. Test accuracy is measured in eval mode after the last epoch, with the running
statistics, for local those of the first device. The paper trained 50 epochs on 50,000 images, so
its figures are not those of this size. Notes name the results that do not reproduce.

`--images` is a folder with train/CLASS and test/CLASS. Finished trainings are saved below the run
folders; an interrupted table resumes.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.agbn.accuracy.curves import draw
from benchmarks.agbn.accuracy.jobs import Table, run_all
from benchmarks.environment import environment
from benchmarks.mbs.tables.working import Working, busy_seconds
from benchmarks.mbs.trainings import RUNS
from benchmarks.results import console, write

HERE = Path(__file__).parent
FULL = Table(batches=(8, 16, 32, 64), devices=(4, 8), seeds=(0, 1, 2, 3), epochs=6, rise=1)
QUICK = Table((8, 16), (4, 8), (0,), epochs=2, rise=1, samples=64, tests=16)


def collected(table: Table, working: Working, processes: int) -> dict[str, Any]:
    """Return the results of a table whose trainings are all finished."""
    runs = [found for job in table.jobs() if (found := working.get(job)) is not None]
    recipe = asdict(table.recipe(table.batches[0]))
    del recipe["batch"]
    return {
        "environment": environment(),
        "seeds": list(table.seeds),
        "sizes": {"batch": list(table.batches), "devices": list(table.devices)},
        "recipe": recipe,
        "processes": processes,
        "seconds": busy_seconds(runs),
        "runs": [{name: run[name] for name in run if name not in ("from", "to")} for run in runs],
    }


def main(
    *,
    images: Annotated[Path | None, typer.Option(help="folder of train/CLASS, test/CLASS")] = None,
    quick: bool = False,
    processes: Annotated[int, typer.Option(help="trainings at a time")] = 2,
    seeds: Annotated[int | None, typer.Option(help="train with fewer seeds")] = None,
    out: Path = HERE,
    folder: Annotated[Path, typer.Option("--runs", help="where trainings are kept")] = RUNS,
) -> None:
    """Train all; write results.json and curves.png. Without --images do nothing."""
    if images is None:
        console.print("the images are not part of this repository: give --images DIR to train")
        return
    torch.set_num_threads(1)
    table = QUICK if quick else FULL
    table = replace(table, seeds=table.seeds[:seeds])
    working = Working(folder / "agbn" / "accuracy.jsonl")
    left = [job for job in table.jobs() if working.get(job) is None]
    console.print(f"{len(table.jobs())} trainings, {len(left)} of them to be run")
    for job, found in run_all(left, images.resolve(), processes):
        working.add(job, found)
        said = f"batch {job.recipe.batch}, {job.devices} devices, seed {job.seed}"
        console.print(f"{said}: {100 * found['test_accuracy'][-1]:.1f} %", highlight=False)
    results = collected(table, working, processes)
    write(out / "results.json", results)
    draw(results, out / "curves.png")


if __name__ == "__main__":
    typer.run(main)
