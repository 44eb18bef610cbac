"""Contrastive training compared with GradCache and sentence-transformers, and why to be exact.

All compute one loss, InfoNCE at one temperature, and take its gradient in the same micro-batches:
plain torch *undivided*; *naive* accumulation, whose negatives are those of the micro-batch;
GradCache by its authors; sentence-transformers' CachedMultipleNegativesRankingLoss, which has one
encoder for both sides; and the engine: with one module that returns both embeddings and a
hand-written loss (*matrix*), with `anybatch.contrastive` (*joint*), and with `Encoders`. The error
is that of Law 1 (docs/why.md) in float64, against torch undivided; the last micro-batch is smaller.
With dropout each way has its own random draws, which is as good; only `rng="batch"` has the draws
of the undivided batch. Peaks are of live tensor bytes; memory that a kernel allocates and frees
inside itself is not counted. A module that returns both embeddings holds the graphs of both
encoders at once; `Encoders` and GradCache run one after the other. Seconds are ratios of
alternating steps. A table splits them into the encoders' forwards, backward, and all else, which is
a way's own work. Three hand-written loops measure the cost of the order alone.

The largest batch has a budget: the bytes that plain torch holds for 64 pairs of images of 32x32
(ResNet-20 with GroupNorm) and texts of 32 tokens (four layers of a transformer of width 128),
embeddings of 128. Only embeddings and their gradients grow with the batch; with the matrix the plan
says the bytes that a micro-batch of one sample would need.

In the training an image of four digits finds its number among a thousand that it was not trained
with; curves are the mean of the seeds, and their range.
"""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

from benchmarks.environment import environment
from benchmarks.integrations.contrastive.curves import draw
from benchmarks.integrations.contrastive.encoders import SUBJECTS
from benchmarks.integrations.contrastive.large import large
from benchmarks.integrations.contrastive.learns import ARMS, Recipe, train
from benchmarks.integrations.contrastive.orders import orders
from benchmarks.integrations.contrastive.rest import rest
from benchmarks.integrations.contrastive.steps import errors, peaks, speed
from benchmarks.results import console, read, write

HERE = Path(__file__).parent
SEEDS = (0, 1, 2)
MEASURED = ("sentences", "images and texts")
BATCH, MICRO_BATCH = 512, 32
PARTS = ("errors", "peaks", "speed", "rest", "orders", "large", "learns")
QUICK = Recipe(batch=32, micro_batch=8, steps=4, every=2, tests=20)


def part(name: str, count: int, *, quick: bool) -> Any:
    """Measure one part."""
    batch = 64 if quick else BATCH
    if name == "errors":
        return errors(list(SUBJECTS)[:1] if quick else list(SUBJECTS), 40, 7)
    if name == "peaks":
        return {subject: peaks(subject, batch, MICRO_BATCH) for subject in MEASURED}
    if name == "speed":
        return {subject: speed(subject, batch, MICRO_BATCH, count) for subject in MEASURED}
    if name == "rest":
        return {subject: rest(subject, batch, MICRO_BATCH, count) for subject in MEASURED}
    if name == "orders":
        return {subject: orders(subject, batch, MICRO_BATCH, count) for subject in MEASURED}
    if name == "large":
        return large((64,) if quick else (64, 1024, 32768))
    recipe, seeds = (QUICK, SEEDS[:1]) if quick else (Recipe(), SEEDS)
    jobs = [(arm, recipe, seed) for seed in seeds for arm in ARMS]
    return [train(*job) for job in track(jobs, "learns", console=console)]


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    count: Annotated[int, typer.Option("--pairs", help="rounds of steps")] = 9,
    only: Annotated[str, typer.Option(help="one of the parts; others stay as they are")] = "",
) -> None:
    """Measure all parts, or one, and write results.json and the picture."""
    torch.set_num_threads(1)
    found = (read(out / "results.json") or {}) if only else {}
    found |= {"environment": environment(), "seeds": SEEDS[:1] if quick else SEEDS, "pairs": count}
    found["sizes"] = {"batch": BATCH, "micro_batch": MICRO_BATCH}
    for name in [only] if only else PARTS:
        found[name] = part(name, count, quick=quick)
        write(out / "results.json", found)
    if "learns" in found:
        draw(found["learns"], out / "curves.png")


if __name__ == "__main__":
    typer.run(main)
