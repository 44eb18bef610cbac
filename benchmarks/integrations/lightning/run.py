"""Lightning's own accumulation compared with `FullBatch`: errors of a step's gradient, seconds.

The same module and Trainer run in micro-batches of four, on one process and on two over gloo.
*Accumulated* is `accumulate_grad_batches`, with micro-batches in the loader; with `FullBatch` the
loader yields the full batch. The reference is one forward of all rows of all processes in float64;
shown is the worst of three seeds. Dice and InfoNCE are marked with `anybatch.coupled`: without it,
a loss inside `training_step` that is no weighted sum of torch's own is refused.
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.integrations.launch import measure

HERE = Path(__file__).parent


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    part: Annotated[str, typer.Option(help="errors or speed alone; the other stays")] = "",
    count: Annotated[int, typer.Option("--pairs", help="pairs of trainings")] = 9,
) -> None:
    """Measure errors and seconds, and write results.json."""
    measure("benchmarks.integrations.lightning.child", out, part, count, quick=quick)


if __name__ == "__main__":
    typer.run(main)
