"""transformers.Trainer compared with ours: errors of a step's gradient, and seconds of a step.

The reference is one forward of the undivided batch: the loss that the model itself returns for all
its rows. Models are small, with random weights; rows have uneven lengths, prompts and tokens that
are not predicted. *Undivided* is transformers.Trainer with the full batch at once, *accumulated*
the same batch in micro-batches of two. It counts labels before it knows whether the model shifts
them. Judged by its class name, GPT-2 does not, so even the undivided gradient is too small there. A
model that accepts that count and ignores it is not divided at all: four times one micro-batch's
mean. A model whose labels have other names is divided by the number of micro-batches.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import track

from benchmarks.environment import environment
from benchmarks.integrations.transformers.errors import errors
from benchmarks.integrations.transformers.families import FAMILIES
from benchmarks.integrations.transformers.speed import SUBJECTS, pairs
from benchmarks.results import console, write

HERE = Path(__file__).parent
SEEDS = (0, 1, 2)


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    count: Annotated[int, typer.Option("--pairs", help="pairs of trainings")] = 7,
) -> None:
    """Measure errors and seconds, and write results.json."""
    torch.set_num_threads(1)
    families = FAMILIES[:2] if quick else FAMILIES
    subjects = {} if quick else SUBJECTS
    found = {
        "environment": environment(),
        "seeds": SEEDS[:1] if quick else SEEDS,
        "pairs": count,
        "errors": errors(families, SEEDS[:1] if quick else SEEDS),
        "overhead": {
            name: pairs(subject, count)
            for name, subject in track(subjects.items(), "overhead", console=console)
        },
    }
    write(out / "results.json", found)


if __name__ == "__main__":
    typer.run(main)
