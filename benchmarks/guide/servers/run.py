"""Lemma 3.2 beside its simulation and beside real processes.

In the simulation links are such that the lemma asks for just N servers; workers then have N - 1, N
and N + 1. Utilisation is the part of the time in which a worker computes, from when all have warmed
up to when the first is ready; (N - 1) / N is what a fluid would leave at N - 1. Computing varies
evenly by the jitter. Links serve pieces in the order in which they were asked for.

The real processes are parameter servers and workers in network namespaces of one machine, joined by
a bridge; a token bucket shapes the wire of every server to 32 Mbit/s each way. Workers compute by
sleeping, so that cores do not matter. A server handles one transfer at a time, as the lemma counts,
or one each way. All predictions follow from numbers in `real.py`, which were there before the run.
"""

from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from anybatch.tools.servers import Cluster
from benchmarks.environment import environment
from benchmarks.guide.servers.real import JITTER, ROUNDS, WARM, all_cases
from benchmarks.results import console, read, write
from benchmarks.simulators.parameter_servers import simulate

HERE = Path(__file__).parent
WORKERS, SERVERS, JITTERS, SEEDS = (2, 4, 8, 16), (2, 4, 8), (0.0, 0.1, 0.5), (0, 1, 2)
PARAMETERS = 10**8


def tight(workers: int, servers: int) -> Cluster:
    """A cluster for which the lemma asks for just so many servers."""
    return Cluster(workers, 1.0, PARAMETERS, 2 * PARAMETERS * workers / servers)


def grid(*, quick: bool) -> list[dict[str, Any]]:
    """The simulation of every cell."""
    found = []
    cells = product(WORKERS[:2] if quick else WORKERS, SERVERS[:1] if quick else SERVERS, JITTERS)
    for workers, servers, jitter in cells:
        cluster = tight(workers, servers)
        asked = cluster.servers_for().count
        assert asked == servers
        row: dict[str, Any] = {"workers": workers, "servers": servers, "jitter": jitter}
        for name, count in (("fewer", servers - 1), ("just", servers), ("more", servers + 1)):
            runs = [simulate(cluster, count, jitter=jitter, seed=seed) for seed in SEEDS]
            row[name] = [one.utilisation for one in runs]
        found.append(row)
    return found


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    simulation: Annotated[bool, typer.Option(help="simulate again")] = True,
    real: Annotated[bool, typer.Option(help="run real processes again")] = True,
) -> None:
    """Simulate, run, and write results.json; what is not done again is kept."""
    results = read(out / "results.json") or {}
    results["environment"] = environment()
    if simulation:
        results["simulated"] = grid(quick=quick)
        console.print(f"simulated {len(results['simulated'])} cells")
    if real:
        results["real"] = all_cases(quick=quick)
    results["sizes"] = {"seeds": len(SEEDS), "rounds": ROUNDS, "warm": WARM, "jitter": JITTER}
    write(out / "results.json", results)


if __name__ == "__main__":
    typer.run(main)
