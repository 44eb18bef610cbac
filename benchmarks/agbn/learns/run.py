"""The gain of a training from BatchNorm over the full batch, where only 8 samples fit at once.

ResNet-20 with BatchNorm, float32, trains on 5,000 images of CIFAR-10 (500 of each class) at batch
512 in three ways: plain torch with the undivided batch; the engine in micro-batches of 8 with
`batchnorm="exact"`, which normalises by all 512; and with `batchnorm="local"`, which normalises
each 8 by themselves, like a hand-written loop. All three have the same initial weights, images,
order, crops and mirrorings for a seed. The learning rate is in proportion to the batch and reached
over the first epochs. It was chosen for the undivided batch only: of the published rate, 0.1 at
batch 128, and half of it, half ended with the lower training loss.

Test figures are measured in eval mode, so with the running statistics of each way. torch updates
them once a forward, so `local` has 64 updates a step, of 8 samples each. Figures are of the last
epoch, mean and sample deviation over the seeds. The second table compares 20 steps, at batch 64
because torch is ten times slower in float64. In float32 the allowed distance is that between
undivided trainings with other orders of rows. Another order runs the same kernels, micro-batches
kernels of another size. So the last row is the distance from undivided in float64, of exact and of
all undivided trainings: it shows where rounding has the larger effect. Seconds are those of the
median step of the fastest seed, because other load can only add to them. The peak is that of live
tensor bytes, of one step; with exact, waiting micro-batches are offloaded to an unlinked file.

A tenth of the usual training set and few epochs give a far lower accuracy than usual; the
comparison is between the ways. `--images` is a folder with train/CLASS and test/CLASS, 32x32
pixels. Finished trainings are saved below the run folders; an interrupted run resumes.
"""

from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from pathlib import Path
from time import time
from typing import Annotated, Any

import torch
import typer

from anybatch.memory.meter import Meter
from benchmarks.agbn.images import Images, mini_batches, read
from benchmarks.agbn.learns.arms import ARMS, ORDERS, Arm, agreement, backward_of
from benchmarks.agbn.learns.curves import draw
from benchmarks.agbn.training import Outcome, Recipe, initial, train
from benchmarks.environment import environment
from benchmarks.mbs.tables.working import Working
from benchmarks.mbs.trainings import RUNS
from benchmarks.results import console, write

HERE = Path(__file__).parent
Data = tuple[Images, Images]


@dataclass(frozen=True)
class Training:
    """One training of an arm."""

    arm: Arm
    seed: int
    micro_batch: int
    recipe: Recipe


@dataclass(frozen=True)
class Agreement:
    """The first steps of all arms, in both types."""

    steps: int
    micro_batch: int
    orders: int
    recipe: Recipe


@dataclass(frozen=True)
class Peaks:
    """One step of each arm, in live bytes; what leaves for a file does so in its own time."""

    micro_batch: int
    recipe: Recipe


@dataclass(frozen=True)
class Size:
    """How much is run."""

    recipe: Recipe
    micro_batch: int
    seeds: tuple[int, ...]
    steps: int  # that are compared
    compared: Recipe


LONG = Recipe(batch=512, epochs=8, rise=2, samples=5000, lr=0.05)
SHORT = Recipe(batch=32, epochs=2, rise=1, samples=64, tests=16)
FULL = Size(LONG, 8, (0, 1, 2), steps=20, compared=replace(LONG, batch=64))
QUICK = Size(SHORT, 8, (0,), steps=2, compared=replace(SHORT, batch=16))


def trained(job: Training, data: Data) -> Outcome:
    """Train once, and say which training it was."""
    model = initial(job.seed)
    start = time()
    found = train(model, backward_of(job.arm, model, job.micro_batch), job.recipe, data, job.seed)
    return {"arm": job.arm, "seed": job.seed, "seconds": time() - start} | found


def peak_of(arm: Arm, size: Size, images: Images) -> int:
    """Return the live bytes at the peak of a step of an arm that is not the first."""
    model = initial(0)
    backward = backward_of(arm, model, size.micro_batch)
    inputs, targets = next(mini_batches(images, size.recipe.batch, 0, 0))
    backward(inputs, targets, lambda *_: None)
    model.zero_grad()
    existing = {"parameters": model.parameters(), "buffers": model.buffers()}
    with Meter(inputs.device, existing) as meter:
        backward(inputs, targets, lambda *_: None)
    return int(meter.peak)


def run(size: Size, data: Data, working: Working) -> dict[str, Any]:
    """Run what the working file does not have, and return the results."""

    def cached(job: Training | Agreement | Peaks, do: Callable[[], Outcome]) -> Outcome:
        found = working.get(job)
        if found is None:
            found = do()
            working.add(job, found)
            console.print(f"{' '.join(map(str, astuple(job)[:-1]))}: done", highlight=False)
        return found

    def peaks() -> Outcome:
        return {arm: peak_of(arm, size, data[0]) for arm in ARMS}

    recipe, micro_batch = size.recipe, size.micro_batch
    first = Agreement(size.steps, micro_batch, len(ORDERS), size.compared)
    compare = partial(agreement, size.compared, micro_batch, data[0], size.steps)
    found: dict[str, Any] = {
        "agreement": cached(first, compare),
        "peaks": cached(Peaks(micro_batch, recipe), peaks),
    }
    jobs = [Training(arm, seed, micro_batch, recipe) for seed in size.seeds for arm in ARMS]
    found["runs"] = [cached(job, partial(trained, job, data)) for job in jobs]
    return found | {
        "environment": environment(),
        "seeds": list(size.seeds),
        "sizes": {"batch": recipe.batch, "micro_batch": micro_batch},
        "recipe": asdict(recipe),
    }


def main(
    *,
    images: Annotated[Path | None, typer.Option(help="folder of train/CLASS, test/CLASS")] = None,
    quick: bool = False,
    out: Path = HERE,
    folder: Annotated[Path, typer.Option("--runs", help="where trainings are kept")] = RUNS,
) -> None:
    """Train all arms; write results.json and curves.png. Without --images do nothing."""
    if images is None:
        console.print("the images are not part of this repository: give --images DIR to train")
        return
    torch.set_num_threads(1)
    size = QUICK if quick else FULL
    data = read(images, size.recipe.samples, size.recipe.tests)
    results = run(size, data, Working(folder / "agbn" / "learns.jsonl"))
    write(out / "results.json", results)
    draw(results, out / "curves.png")


if __name__ == "__main__":
    typer.run(main)
