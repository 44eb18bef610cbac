"""Cheap results: the bytes that they hold, and the cost of recomputing them.

Five networks are traced on shapes, at the smallest batch of the schedules' benchmark. Cheap are
BatchNorm, ReLU, joins and other results that need neither a product nor a convolution, only tensors
that are in memory anyway. A share of their bytes is recomputed, those with the least cost a byte
first. Seconds are those of a roofline model, relative to the step without recomputing.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from anybatch.offloading.schedule import Trace
from benchmarks.environment import environment
from benchmarks.outofcore.schedules.cases import MACHINES, NETWORKS
from benchmarks.results import console, write
from benchmarks.simulators.recompute import cheap, cheap_recipes

HERE = Path(__file__).parent
QUICK = ("unet",)
SHARES = (0.4, 0.55, 0.75, 1.0)
"""Of the bytes of cheap results, how many are computed again."""


def one(trace: Trace) -> dict[str, Any]:
    """What a step holds with and without its cheap results."""
    recipes = cheap_recipes(trace)
    shares = {str(share): _computed(trace, cheap(trace, share)) for share in SHARES}
    return {
        "peak": trace.peak,
        "results": len(recipes),
        "bytes": trace.bytes_of(recipes),
        "shares": shares,
        **shares["1.0"],
    }


def _computed(trace: Trace, fewer: Trace) -> dict[str, Any]:
    """What a rewritten step holds and takes, beside the one it was."""
    ratios = {m.name: m.timed(fewer).seconds / m.timed(trace).seconds for m in MACHINES}
    return {"without": fewer.peak, "seconds": ratios}


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
