"""accelerate's own accumulation compared with an engine: errors of a step's gradient, and seconds.

Both loops are accelerate's documented ones on the same prepared model, in micro-batches of four, on
one process and on two over gloo. *Accumulated* is `accelerator.accumulate`. *Counted* is its recipe
for tokens, which counts the predicted tokens of the full batch beforehand. With an engine the
loader yields the full batch. The reference is one forward of all rows of all processes in float64;
shown is the worst of three seeds. A loss that is no sum over samples has no recipe.
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
    count: Annotated[int, typer.Option("--pairs", help="pairs of epochs")] = 15,
) -> None:
    """Measure errors and seconds, and write results.json."""
    measure("benchmarks.integrations.accelerate.child", out, part, count, quick=quick)


if __name__ == "__main__":
    typer.run(main)
