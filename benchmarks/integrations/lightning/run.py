"""Lightning's own accumulation beside `WholeBatch`: the error of a step's gradient, its seconds.

The same module and Trainer, in micro-batches of four, on one process and on two that gloo connects.
*Accumulated* is `accumulate_grad_batches`, with micro-batches in the loader; with `WholeBatch` the
loader has the whole batch. The truth is one forward of all rows of all processes in float64, and
the worst of three seeds is shown. Dice and InfoNCE are marked with `anybatch.coupled`: a loss
inside of `training_step` that is no weighted sum of torch's own is refused without it.
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
