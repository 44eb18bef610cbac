"""AGBN's Figure 5: the speed of adaptive BatchNorm compared with always-global BatchNorm.

ResNet-20 trains on 2,000 images of CIFAR-10 (200 of each class) over 4 and 8 real processes on
gloo, one thread each, at one total batch size. Each process passes its rows of a mini-batch to
`Engine.backward`, in three trainings. With `batchnorm="local"` each process normalises by its own
rows, with `"exact"` (global) by the rows of all. An `Adaptive` is local until the loss on 500
validation images has not fallen by 1 % for as many epochs in a row as its patience, and global from
the next epoch on. All three have the same initial weights, images and order, and alternate epoch by
epoch in the same processes, so that other load on the machine affects them alike. Seconds are those
of the slowest process.

A speed is a ratio of seconds. Global and local are compared within an epoch (median and quartiles
over epochs and seeds), adaptive and global over the full training (mean and sample deviation over
the seeds). Until it switches, adaptive equals the local training bit for bit. So the validation
losses of local show when another patience would have switched. Its speed is composed of measured
epochs: local's before the switch, global's after it. The last table gives these speeds, and as a
check also that of the patience that was run.

The learning rate is that of ResNet-20's paper in proportion to the batch. It is reached over the
first epoch and stays: with a rate that falls to zero by the last epoch, the loss falls until then.
The patience of one epoch was chosen after two trainings in one process, because in so few epochs a
longer patience seldom ends.

An epoch of 8 processes on 2 cores shows how often they wait for each other and for a core, not the
time of 8 devices. The paper trained 50 epochs of 50,000 images on GPUs. Training accuracy is the
share that the steps of the last epoch got right. Test accuracy is that of 1,000 images in eval mode
with the running statistics of rank 0.

`--images` is a folder with train/CLASS and test/CLASS. Finished trainings are saved below the run
folders; an interrupted run resumes.
"""

import json
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import time
from typing import Annotated, Any

import torch
import torch.multiprocessing as mp
import typer
from rich.progress import track

from benchmarks.agbn.adaptive_speed.ranks import Data, Job, Steady, train
from benchmarks.agbn.images import Images, read
from benchmarks.environment import environment
from benchmarks.mbs.tables.working import Outcome, Working
from benchmarks.mbs.trainings import RUNS
from benchmarks.results import console, write

HERE = Path(__file__).parent
EVERY = 5  # of so many images that are read for training, the last is for validation


@dataclass(frozen=True)
class Size:
    """How much is run."""

    ranks: tuple[int, ...]
    seeds: tuple[int, ...]
    recipe: Steady
    patience: int = 1

    def jobs(self) -> list[Job]:
        """Return all trainings, seed by seed, so that what was stopped has whole seeds."""
        return [
            Job(ranks, seed, self.patience, self.recipe)
            for seed in self.seeds
            for ranks in self.ranks
        ]


FULL = Size((4, 8), (0, 1, 2, 3), Steady(batch=64, epochs=8, rise=1))
QUICK = Size((2,), (0,), Steady(batch=16, epochs=2, rise=1, samples=40, tests=10))


def prepare(folder: Path, recipe: Steady) -> Data:
    """Read the images; of every class the last of `EVERY` ones is for validation."""
    both, test = read(folder, recipe.samples * EVERY // (EVERY - 1), recipe.tests)
    held = torch.arange(len(both)) % EVERY == EVERY - 1
    train, validation = (Images(both.inputs[which], both.targets[which]) for which in (~held, held))
    return Data(train, validation, test)


def trained(job: Job, data: Data) -> Outcome:
    """Train in new processes; return what rank 0 has found."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        work = (job, str(Path(folder) / "meet"), data, str(answer))
        start = time()
        mp.spawn(_serve, args=work, nprocs=job.ranks)  # type: ignore[attr-defined, no-untyped-call]
        arms = json.loads(answer.read_text())
    elapsed = round(time() - start, 1)
    return {"ranks": job.ranks, "seed": job.seed, "arms": arms, "whole_seconds": elapsed}


def _serve(rank: int, job: Job, meet: str, data: Data, answer: str) -> None:
    found = train(rank, job, meet, data)
    if rank == 0:
        Path(answer).write_text(json.dumps(found))


def collected(size: Size, working: Working) -> dict[str, Any]:
    """Return the results of what is finished."""
    recipe = asdict(size.recipe)
    del recipe["batch"], recipe["look"]
    return {
        "environment": environment(),
        "seeds": list(size.seeds),
        "sizes": {"batch": size.recipe.batch, "ranks": list(size.ranks)},
        "recipe": recipe,
        "patience": size.patience,
        "runs": [found for job in size.jobs() if (found := working.get(job)) is not None],
    }


def chosen(
    size: Size,
    batch: int | None,
    epochs: int | None,
    seeds: int | None,
    ranks: str,
    patience: int | None,
) -> Size:
    """Return `size` with what was named in its place."""
    recipe = size.recipe
    recipe = replace(recipe, batch=batch or recipe.batch, epochs=epochs or recipe.epochs)
    return Size(
        tuple(map(int, ranks.split(","))) if ranks else size.ranks,
        size.seeds if seeds is None else tuple(range(seeds)),
        recipe,
        patience or size.patience,
    )


def main(
    *,
    images: Annotated[Path | None, typer.Option(help="folder of train/CLASS, test/CLASS")] = None,
    quick: bool = False,
    batch: Annotated[int | None, typer.Option(help="of all ranks, a multiple of each")] = None,
    epochs: Annotated[int | None, typer.Option(help="of each training")] = None,
    seeds: Annotated[int | None, typer.Option(help="how many")] = None,
    ranks: Annotated[str, typer.Option(help="numbers of processes, such as 2,4,8")] = "",
    patience: Annotated[int | None, typer.Option(help="epochs; of the adaptive one")] = None,
    out: Path = HERE,
    folder: Annotated[Path, typer.Option("--runs", help="where trainings are kept")] = RUNS,
) -> None:
    """Train all; write results.json. Without --images do nothing."""
    if images is None:
        console.print("the images are not part of this repository: give --images DIR to train")
        return
    torch.set_num_threads(1)
    size = chosen(QUICK if quick else FULL, batch, epochs, seeds, ranks, patience)
    working = Working(folder / "agbn" / "adaptive_speed.jsonl")
    left = [job for job in size.jobs() if working.get(job) is None]
    console.print(f"{len(size.jobs())} times three trainings, {len(left)} of them to be run")
    data = prepare(images, size.recipe) if left else None
    for job in track(left, description="trainings", console=console):
        assert data is not None
        found = trained(job, data)
        working.add(job, found)
        said = f"{job.ranks} ranks, seed {job.seed}: {found['whole_seconds']:.0f} s"
        console.print(said, highlight=False)
    write(out / "results.json", collected(size, working))


if __name__ == "__main__":
    typer.run(main)
