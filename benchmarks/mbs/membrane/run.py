"""30 microscope images of cells and membranes: U-Net, BCE + Dice, batch 16 in micro-batches of 4.

`--data` is a folder with `image/*` and `label/*`; the results here are of 30 grey images of 512x512
pixels, of which the command holds out 6. An epoch has 8 random crops of 128 pixels from each
training image; the test is on all of the 6 images, in tiles of the same size. The foreground is the
cells, three quarters of all pixels, so IoU begins high: the answer of foreground everywhere is the
constant answer of the table. Dice is a ratio of sums over the mini-batch, which couples the
samples: the engine gathers the outputs and runs a second forward, and the time includes it.

IoU counts the sign of a logit. While every logit is above 0 it equals the constant answer, although
the loss falls. It changes when the logits of membranes pass below 0.
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
SEEDS = (0,)
MEMBRANE = Settings(
    task="segmentation",
    model="unet:16",
    loss="bce+dice",
    batch_size=16,
    micro_batch=4,
    epochs=36,
    crop=128,
    crops=8,
)


def main(
    *,
    data: Annotated[Path | None, typer.Option(help="folder of image/*, label/*")] = None,
    quick: bool = False,
    out: Path = HERE,
    runs: Annotated[Path, typer.Option(help="where run folders are made")] = RUNS,
) -> None:
    """Train; write results.json and curves.png. Without --data do nothing."""
    if data is None:
        console.print("the images are not part of this repository: give --data DIR to train")
        return
    torch.set_num_threads(1)
    settings = replace(MEMBRANE, data=str(data), epochs=2 if quick else MEMBRANE.epochs)
    if quick:
        settings = replace(settings, model="unet:2", crop=16, crops=1)
    found = trainings("membrane images", settings, runs / "membrane", SEEDS)
    write(out / "results.json", found)
    draw(found, out / "curves.png")


if __name__ == "__main__":
    typer.run(main)
