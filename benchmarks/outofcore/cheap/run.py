"""What cheap results hold, and what computing them again costs.

Five networks are traced on shapes, at the smallest batch of the schedules' benchmark. Cheap are
BatchNorm, ReLU, joins and other results that need neither a product nor a convolution, and can be
had from what is kept anyway. Seconds are those of a roofline, beside those without.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from anybatch.outofcore.recompute import cheap, cheap_recipes
from anybatch.outofcore.trace import Trace
from benchmarks.environment import environment
from benchmarks.outofcore.schedules.cases import MACHINES, NETWORKS
from benchmarks.results import console, write

HERE = Path(__file__).parent
QUICK = ("unet",)


def one(trace: Trace) -> dict[str, Any]:
    """What a step holds with and without its cheap results."""
    fewer = cheap(trace)
    recipes = cheap_recipes(trace)
    return {
        "peak": trace.peak,
        "without": fewer.peak,
        "results": len(recipes),
        "bytes": trace.bytes_of(recipes),
        "seconds": {m.name: m.timed(fewer).seconds / m.timed(trace).seconds for m in MACHINES},
    }


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
) -> None:
    """Trace, rewrite, and write results.json."""
    found = {}
    for name in QUICK if quick else NETWORKS:
        network = NETWORKS[name]
        n = network.sizes[0]
        found[name] = {"batch": n, **one(network.trace(network.make(), n))}
        console.print(name)
    write(out / "results.json", {"environment": environment(), "networks": found})


if __name__ == "__main__":
    typer.run(main)
