"""MBS's tables 1 to 5 and its Figure 3, measured: without and with MBS under one real cap.

Without MBS is a plain loop that puts the whole mini-batch through the model (`plain.py`); with MBS
is the command's own training in micro-batches. Both train under the same cap: on the CPU an
RLIMIT_DATA that refuses memory, on CUDA a limit on torch's allocator. "Failed" stands where a
training did fail under it, with all seeds where no number of them is said.

At the size for two cores the models are ResNet-20, AmoebaNet-D (3, 32) and U-Net of width 16, on
2,000 training images an epoch of 32 pixels (64 for AmoebaNet-D, enlarged), or crops of 64 pixels of
microscope images. The recipes are those of the paper's section 4.2.4, but for AmoebaNet-D's
learning rate: 0.01, because at the paper's 0.1 the small model stays at chance. The paper's models
have BatchNorm; here it is GroupNorm, which keeps each sample to itself.
Dice is computed over the whole mini-batch, which joins its samples: with MBS there is a second
forward pass, and the time holds it. Eight epochs at batch 1024 are 16 steps, so a figure that falls
there at a fixed learning rate says little about longer trainings.

The cap of U-Net holds the loss of 1,024 masks at once, so both of its trainings run in a malloc
mode, "tight", where blocks of 8 MiB, and a free heap above 64 MiB, return to the system.

The image sizes of Table 1 are, for classification, the whole image at two sizes, and for
segmentation crops of the same part of the image at two resolutions.

`--images` is a folder with train/CLASS and test/CLASS, `--membrane` one with image and label.
Finished trainings are kept in a file beside the run folders: a table that was stopped goes on
where it stopped. `--full --device cuda --cap 24GiB` is the paper's size.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from anybatch.apps.settings import Task
from anybatch.units import parse_bytes
from benchmarks.mbs.tables.curves import draw
from benchmarks.mbs.tables.data import Prepared, prepare_images, prepare_masks
from benchmarks.mbs.tables.jobs import FULL, OF_TASK, QUICK, SMALL, TABLES, Preset, of_table
from benchmarks.mbs.tables.outcomes import collected
from benchmarks.mbs.tables.schedule import Runs, largest_undivided
from benchmarks.mbs.tables.working import Working
from benchmarks.mbs.trainings import RUNS
from benchmarks.results import console, write

HERE = Path(__file__).parent


def run_tables(names: tuple[str, ...], preset: Preset, runs: Runs) -> None:
    """Run what the named tables need and the working file does not have."""
    wanted = {OF_TASK[name] for name in names if name in OF_TASK}
    searched = [case for case in preset.cases if case.task in wanted or "table2" in names]
    found = runs.each(lambda case: largest_undivided(preset, case, runs.one), searched)
    initial = {case.name: size for case, size in zip(searched, found, strict=True) if size}
    for name in names:
        jobs = of_table(name, preset, initial)
        console.print(f"{name}: {len(jobs)} trainings, {runs.missing(jobs)} of them to be run")
        runs.all(jobs)


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
    only: Annotated[str, typer.Option(help="table1 ... table5, figure3; comma between")] = "",
    quick: bool = False,
    full: Annotated[bool, typer.Option(help="the paper's models and image sizes")] = False,
    processes: Annotated[int, typer.Option(help="trainings at a time")] = 2,
    device: str = "cpu",
    cap: Annotated[str, typer.Option(help="of every model, such as 24GiB")] = "",
    malloc: Annotated[str, typer.Option(help="default, large or tight")] = "",
    workers: Annotated[int, typer.Option(help="processes that read images, each training")] = 0,
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
    run_tables(names, preset, Runs(working, of_case, at.resolve(), processes))
    results = collected(preset, working, processes)
    write(out / "results.json", results)
    draw(results, out / "curves.png")


if __name__ == "__main__":
    typer.run(main)
