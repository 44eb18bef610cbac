"""MBS's tables 1 to 5 and its Figure 3, measured: without and with MBS under one real cap.

Without MBS, a plain loop puts the full mini-batch through the model (`plain.py`); with MBS, the
command trains in micro-batches. Both train under the same cap: on the CPU an RLIMIT_DATA that
refuses memory, on CUDA a limit on torch's allocator. "Failed" means that a training did fail under
it, with all seeds where no number of them is given.

At the size for two cores the models are ResNet-20, AmoebaNet-D (3, 32) and U-Net of width 16, on
2,000 training images an epoch of 32 pixels (64 for AmoebaNet-D, enlarged), or crops of 64 pixels of
microscope images. The recipes are those of the paper's section 4.2.4, except AmoebaNet-D's learning
rate: 0.01, because at the paper's 0.1 the small model stays at chance. The paper's models have
BatchNorm with the statistics of each micro-batch; here it is GroupNorm, which normalises each
sample by itself. The last columns of tables 3 to 5 are the same models with BatchNorm: undivided,
and in the same micro-batches with `batchnorm="exact"`, which normalises by the full mini-batch.
Tensors of waiting micro-batches are offloaded to an unlinked file. Each waiting micro-batch is a
thread, whose stack of 256 KiB is added to the cap as host memory. Offloaded memory must return to
the system at once, or it would still count. So these run in a malloc mode, "mapped", where blocks
of 256 KiB do; that alone makes GroupNorm's steps slower too. The machine had other load while these
columns ran: their seconds only say how many times longer a training is. Dice is computed over the
full mini-batch, which couples its samples: with MBS there is a second forward pass, and the time
includes it. Eight epochs at batch 1024 are 16 steps, so a figure that falls there at a fixed
learning rate says little about longer trainings.

The cap of U-Net holds the loss of 1,024 masks at once, so both of its trainings run in a malloc
mode, "tight", where blocks of 8 MiB, and a free heap above 64 MiB, return to the system.

The image sizes of Table 1 are, for classification, the full image at two sizes, and for
segmentation crops of the same part of the image at two resolutions.

`--images` is a folder with train/CLASS and test/CLASS, `--membrane` one with image and label.
Finished trainings are saved next to the run folders; an interrupted table resumes. `--full --device
cuda --cap 24GiB` is the paper's size. `--only batchnorm` runs the columns with BatchNorm and adds
them to the existing results file; `--batches`, `--models`, `--seeds` and `--epochs` run fewer of
those. The tables mark trainings that were not run.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from anybatch.cli.settings import Task
from anybatch.core.units import parse_bytes
from benchmarks.mbs.tables.curves import draw
from benchmarks.mbs.tables.data import Prepared, prepare_images, prepare_masks
from benchmarks.mbs.tables.jobs import (
    BATCHNORM,
    FULL,
    OF_TASK,
    QUICK,
    SMALL,
    TABLES,
    Job,
    Preset,
    of_table,
)
from benchmarks.mbs.tables.outcomes import Results, added, collected
from benchmarks.mbs.tables.schedule import Runs, largest_undivided
from benchmarks.mbs.tables.working import Working
from benchmarks.mbs.trainings import RUNS
from benchmarks.results import console, read, write

HERE = Path(__file__).parent


def run_tables(names: tuple[str, ...], preset: Preset, runs: Runs) -> None:
    """Run what the named tables need and the working file does not have."""
    wanted = {OF_TASK[name] for name in names if name in OF_TASK}
    all_of_them = "table2" in names or BATCHNORM in names
    searched = [case for case in preset.cases if case.task in wanted or all_of_them]
    found = runs.each(lambda case: largest_undivided(preset, case, runs.one), searched)
    initial = {case.name: size for case, size in zip(searched, found, strict=True) if size}
    for name in names:
        jobs = of_table(name, preset, initial)
        console.print(f"{name}: {len(jobs)} trainings, {runs.missing(jobs)} of them to be run")
        runs.all(jobs)


@dataclass(frozen=True)
class Fewer:
    """Which of the columns with BatchNorm to run; None and () are all."""

    batches: tuple[int, ...] = ()
    models: tuple[str, ...] = ()
    seeds: int | None = None
    epochs: int | None = None

    def preset(self, preset: Preset) -> Preset:
        """Return the preset whose trainings they are."""
        return replace(preset, epochs=self.epochs or preset.epochs)

    def takes(self, job: Job, preset: Preset) -> bool:
        """Say whether a training is one of them."""
        return (
            (not self.batches or job.batch in self.batches)
            and (not self.models or job.model.startswith(self.models))
            and job.seed in preset.seeds[: self.seeds]
        )


def add_batchnorm(before: Results, preset: Preset, runs: Runs, fewer: Fewer) -> Results:
    """Run the columns with BatchNorm for the cases of a results file, and return it with them.

    Raises:
        typer.BadParameter: when the file is of other data or caps.
    """
    caps = {case.name: case.cap for case in preset.cases}
    there = {name: case["cap"] for name, case in before["cases"].items() if name in caps}
    sizes = before["sizes"]["training images"], there
    if sizes != (preset.samples or "all", caps):
        raise typer.BadParameter(
            "the columns with BatchNorm must have the size of the tables in the results file, "
            f"{sizes}; got {(preset.samples or 'all', caps)}: name another folder with --out"
        )
    preset = fewer.preset(preset)
    initial = {name: case["initial"] for name, case in before["cases"].items() if case["initial"]}
    jobs = of_table(BATCHNORM, preset, initial)
    chosen = [job for job in jobs if fewer.takes(job, preset)]
    missing = runs.missing(chosen)
    console.print(f"{BATCHNORM}: {len(chosen)} trainings, {missing} of them to be run")
    runs.all(chosen)
    return added(before, jobs, runs.working)


def chosen_tables(only: str) -> tuple[str, ...]:
    """Return the tables named in `only`, all where it is empty.

    Raises:
        typer.BadParameter: when a name is none of them.
    """
    names = tuple(only.split(",")) if only else TABLES
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        raise typer.BadParameter(
            f"--only must name one of {', '.join(TABLES)}, with a comma between several; "
            f"got {', '.join(unknown)}"
        )
    return names


def chosen_preset(preset: Preset, device: str, cap: str, malloc: str, workers: int) -> Preset:
    """Return `preset` on a device, with another cap or malloc mode for every model where given."""
    cases = preset.cases
    if cap:
        cases = tuple(replace(case, cap=parse_bytes(cap, "cap")) for case in cases)
    if malloc or device != "cpu":
        cases = tuple(replace(case, malloc=malloc or "default") for case in cases)
    return replace(preset, cases=cases, device=device, workers=workers)


def main(
    *,
    images: Annotated[Path | None, typer.Option(help="folder of train/CLASS, test/CLASS")] = None,
    membrane: Annotated[Path | None, typer.Option(help="folder of image/*, label/*")] = None,
    only: Annotated[str, typer.Option(help="table1 ... figure3, batchnorm; comma between")] = "",
    quick: bool = False,
    full: Annotated[bool, typer.Option(help="the paper's models and image sizes")] = False,
    processes: Annotated[int, typer.Option(help="trainings at a time")] = 2,
    device: str = "cpu",
    cap: Annotated[str, typer.Option(help="of every model, such as 24GiB")] = "",
    malloc: Annotated[str, typer.Option(help="default, large or tight")] = "",
    workers: Annotated[int, typer.Option(help="processes that read images, each training")] = 0,
    batches: Annotated[str, typer.Option(help="of --only batchnorm, such as 16,128")] = "",
    models: Annotated[str, typer.Option(help="of --only batchnorm, such as resnet20")] = "",
    seeds: Annotated[
        int | None, typer.Option(help="of --only batchnorm: the first so many")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="of --only batchnorm")] = None,
    out: Path = HERE,
    folder: Annotated[Path, typer.Option("--runs", help="where run folders are made")] = RUNS,
) -> None:
    """Run the tables; write results.json and curves.png. Without a folder of images do nothing."""
    if images is None and membrane is None:
        console.print("the images are not part of this repository: give --images, --membrane DIR")
        return
    names = chosen_tables(only)
    preset = FULL if full else QUICK if quick else SMALL
    preset = chosen_preset(preset, device, cap, malloc, workers)
    at = folder / "tables"
    data: dict[Task, Prepared] = {}
    if images is not None:
        data["classification"] = prepare_images(images, preset.samples, at / "images")
    if membrane is not None:
        data["segmentation"] = prepare_masks(membrane, preset.samples)
    preset = replace(preset, cases=tuple(case for case in preset.cases if case.task in data))
    of_case = {case.name: data[case.task] for case in preset.cases}
    working = Working(at / "runs.jsonl")
    runs = Runs(working, of_case, at.resolve(), processes)
    before = read(out / "results.json") if names == (BATCHNORM,) else None
    if before is not None:
        numbers = tuple(map(int, batches.split(","))) if batches else ()
        fewer = Fewer(numbers, tuple(models.split(",")) if models else (), seeds, epochs)
        write(out / "results.json", add_batchnorm(before, preset, runs, fewer))
        return
    run_tables(names, preset, runs)
    results = collected(preset, working, processes)
    write(out / "results.json", results)
    draw(results, out / "curves.png")


if __name__ == "__main__":
    typer.run(main)
