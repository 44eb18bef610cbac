"""5,000 colour images of CIFAR-10: ResNet-20 at batch 256 in micro-batches of 64.

`--data` is a folder with `train/CLASS/*` and `test/CLASS/*`, 32x32 pixels; the results here are of
500 training and 100 test images of each of the ten classes, as JPEG files. A tenth of the usual
training set, in 20 steps an epoch, gives a far lower accuracy than the usual one: the benchmark
shows that a full training runs and learns. GroupNorm and AdamW with a cosine schedule are the
command's defaults. Images are padded by 4 pixels, cropped and mirrored at random. Cross-entropy is
a sum over samples, so one pass over each micro-batch is enough.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from anybatch.cli.settings import Settings
from benchmarks.mbs.trainings import RUNS, draw, trainings
from benchmarks.results import console, write

HERE = Path(__file__).parent
SEEDS = (0, 1)
CIFAR = Settings(
    task="classification", model="resnet20", batch_size=256, micro_batch=64, epochs=40, pad=4
)


def main(
    *,
    data: Annotated[Path | None, typer.Option(help="folder of train/CLASS, test/CLASS")] = None,
    quick: bool = False,
    out: Path = HERE,
    runs: Annotated[Path, typer.Option(help="where run folders are made")] = RUNS,
) -> None:
    """Train once for each seed; write results.json and curves.png. Without --data do nothing."""
    if data is None:
        console.print("the images are not part of this repository: give --data DIR to train")
        return
    torch.set_num_threads(1)
    settings = replace(CIFAR, data=str(data), epochs=2 if quick else CIFAR.epochs)
    found = trainings("CIFAR-10 images", settings, runs / "cifar", SEEDS[: 1 if quick else None])
    write(out / "results.json", found)
    draw(found, out / "curves.png")


if __name__ == "__main__":
    typer.run(main)
