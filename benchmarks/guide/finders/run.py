"""Fifty steps under a budget by an engine, and by a loop whose size a finder has found.

Lightning's `Tuner.scale_batch_size` runs three steps at 2, 4, 8, ... rows until memory runs out.
(Its other mode, a search between the last two sizes, did not end here: the size may stay at the
rows of the data.) Accelerate's `find_executable_batch_size` begins with the whole batch, and takes
a tenth off until it fits. Then a loop by hand accumulates gradients in micro-batches of that size.
A search and fifty steps are counted, and so are those of an engine, its planning among them.

A host has no allocator with a budget. So a trial asks first whether its rows fit, which a meter has
measured for a second micro-batch, and fails in the words of the host's allocator if not. What that
takes, and all steps that fail, are left out, in favour of the finders. The loops are not exact:
BatchNorm normalises each micro-batch, and a loss of all samples is one of each micro-batch.

Networks and budgets are those of `benchmarks/guide/first_step`, without the one of 1,000 steps of
time. Each cell is a process of its own, which runs all of these one after the other.
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.guide.first_step.networks import NETWORKS
from benchmarks.guide.first_step.run import STEPS, earlier, measure

HERE = Path(__file__).parent
CELL = "benchmarks.guide.finders.cell"
SHARES = (0.2, 0.5)
"""Of the bytes between the fewest and those of an undivided step."""
LEFT_OUT = ("unrolled, T=1000",)


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    only: Annotated[str, typer.Option(help="networks whose name holds this; others are kept")] = "",
) -> None:
    """Measure fifty steps of each and write results.json."""
    names = [name for name in NETWORKS if only in name and name not in LEFT_OUT]
    names, shares = (names[:1], SHARES[1:]) if quick else (names, SHARES)
    measure(CELL, names, shares, 5 if quick else STEPS, out, earlier(out) if only else {})


if __name__ == "__main__":
    typer.run(main)
