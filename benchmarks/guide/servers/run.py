"""Lemma 3.2 compared with its simulation and with real processes.

In the simulation the lemma requires exactly N servers for the links; workers then have N - 1, N and
N + 1. Utilisation is the part of the time in which a worker computes, between the last warm-up and
the first finish; (N - 1) / N is that of a fluid at N - 1. Computing time varies uniformly by the
jitter. Links serve pieces in the order of requests.

The real processes are parameter servers and workers in network namespaces of one machine, joined by
a bridge; a token bucket limits the link of every server to 32 Mbit/s each way. Workers sleep
instead of computing: cores do not matter. A server handles one transfer at a time, as the lemma
counts, or one each way. All predictions follow from numbers in `real.py`, written before the run.
"""

from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.environment import environment
from benchmarks.guide.servers.real import JITTER, ROUNDS, WARM, all_cases
from benchmarks.results import console, read, write
from benchmarks.simulators.parameter_servers import Cluster, simulate

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
        recommended = cluster.servers_for().count
        assert recommended == servers
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
