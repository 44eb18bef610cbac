"""Digits at batch 1024 in micro-batches of 64: the run of `make demo`, and its results file.

scikit-learn's handwritten digits (1,437 to train on, 360 to test) and a small convolutional network
with GroupNorm are trained by the command line's own function with its defaults. The table holds the
test accuracy; the target is 97 % in under three minutes on two cores, without set-up.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from anybatch.cli.settings import Settings
from benchmarks.mbs.trainings import RUNS, trainings
from benchmarks.results import write

SEEDS = (0,)
DIGITS = Settings(data="digits", batch_size=1024, micro_batch=64)


def main(
    *,
    quick: bool = False,
    out: Annotated[Path | None, typer.Option(help="folder of results.json")] = None,
    runs: Annotated[Path, typer.Option(help="where run folders are made")] = RUNS,
) -> None:
    """Train, show the table, and write results.json where --out says."""
    settings = replace(DIGITS, epochs=2) if quick else DIGITS
    found = trainings("handwritten digits", settings, runs / "demo", SEEDS)
    if out is not None:
        write(out / "results.json", found)


if __name__ == "__main__":
    typer.run(main)
