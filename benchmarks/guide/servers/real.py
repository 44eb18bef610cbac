"""Lemma 3.2 on real processes: servers and workers in namespaces, their links shaped."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isinf
from statistics import median

from benchmarks.guide.servers.wires import Wires, wired
from benchmarks.results import console
from benchmarks.simulators.parameter_servers import Cluster, simulate

RATE = 32e6
"""Bits a second of a server's wire each way."""
PAYLOAD = 1448 / 1514
"""Of a full Ethernet frame with TCP and timestamps; a bucket counts all of it."""
JITTER, ROUNDS, WARM = 0.1, 30, 6
LONGEST = 240
"""Seconds after which a run is given up."""

LEMMA = Cluster(4, 0.5, 930_000, RATE / 8 * PAYLOAD)
"""2 S_p N_w / (B_ps T_C) is 3.89: four servers."""
WIDE = replace(LEMMA, duplex=True)


@dataclass(frozen=True)
class Case:
    """A cluster and its servers, with what is special of it."""

    name: str
    cluster: Cluster
    servers: int


CASES = (
    *(Case("as in the lemma", LEMMA, servers) for servers in (2, 3, 4, 5)),
    *(Case("both ways at once", WIDE, servers) for servers in (1, 2, 3)),
    Case("half of the parameters on one server", replace(LEMMA, hottest=0.5), 4),
    Case("workers' own links narrow", replace(LEMMA, worker=2 * 930_000 / 0.75), 5),
    Case("nothing pulled ahead", replace(LEMMA, pipelined=False), 4),
)


def shards(cluster: Cluster, servers: int) -> list[int]:
    """Bytes for each server, the hottest first."""
    largest = cluster.largest_share(servers)
    rest = (1 - largest) / (servers - 1) if servers > 1 else 0.0
    return [round(cluster.parameters * one) for one in [largest] + [rest] * (servers - 1)]


def predicted(case: Case) -> dict[str, float]:
    """What the formulas and the simulation say, before anything is run."""
    found = simulate(case.cluster, case.servers, jitter=JITTER, rounds=ROUNDS, warm=WARM)
    return {
        "formula": case.cluster.utilisation(case.servers),
        "simulated": found.utilisation,
        "round": case.cluster.round_seconds(case.servers),
    }


@contextmanager
def _started(wires: Wires, node: str, *words: str) -> Iterator["subprocess.Popen[str]"]:
    program = [*wires.command(node), sys.executable, "-m", "benchmarks.guide.servers.node"]
    pipe = subprocess.PIPE
    process = subprocess.Popen([*program, *words], stdin=pipe, stdout=pipe, text=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise OSError(f"{node} has not started")
        yield process
    finally:
        process.kill()
        process.wait()


def measured(case: Case, *, rounds: int = ROUNDS, seed: int = 0) -> dict[str, float]:
    """Run a case.

    Raises:
        OSError: the kernel refuses, or a process has not started.
    """
    cluster, count = case.cluster, case.servers
    own = None if isinf(cluster.worker) else cluster.worker * 8 / PAYLOAD
    servers = [f"server{k}" for k in range(count)]
    workers = [f"worker{k}" for k in range(cluster.workers)]
    rates: dict[str, float | None] = dict.fromkeys(servers, RATE)
    rates |= dict.fromkeys(workers, own)
    both = ["--duplex"] if cluster.duplex else []
    waits = [] if cluster.pipelined else ["--waits"]
    with ExitStack() as stack:
        wires = stack.enter_context(wired(rates))
        for name in servers:
            at = wires.addresses[name]
            stack.enter_context(_started(wires, name, "server", "--at", at, *both))
        sizes = dict(
            zip((wires.addresses[s] for s in servers), shards(cluster, count), strict=True)
        )
        words = ["--shards", json.dumps(sizes), "--compute", str(cluster.compute), *waits]
        words += ["--jitter", str(JITTER), "--rounds", str(rounds)]
        started = [
            stack.enter_context(_started(wires, name, "worker", *words, "--seed", str(seed + k)))
            for k, name in enumerate(workers)
        ]
        for process in started:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [process.communicate(timeout=LONGEST)[0] for process in started]
    return _between([json.loads(answer) for answer in answers])


def _between(runs: list[list[tuple[float, float]]]) -> dict[str, float]:
    """From when all have warmed up to when the first is ready."""
    begin = max(run[WARM - 1][1] for run in runs)
    end = min(run[-1][1] for run in runs)
    busy = sum(max(0.0, min(b, end) - max(a, begin)) for run in runs for a, b in run)
    rounds = [b[1] - a[1] for run in runs for a, b in pairwise(run[WARM:])]
    return {
        "utilisation": busy / len(runs) / (end - begin),
        "round": median(rounds),
        "seconds": end - begin,
    }


def all_cases(*, quick: bool) -> dict[str, object]:
    """Every case with what was predicted and measured; the error where the kernel refuses."""
    found = []
    for case in CASES[2:3] if quick else CASES:
        one: dict[str, object] = {"name": case.name, "servers": case.servers}
        one["predicted"] = predicted(case)
        try:
            one["measured"] = measured(case, rounds=WARM + 4 if quick else ROUNDS)
        except OSError as error:
            return {"refused": str(error)}
        console.print(f"{case.name}, {case.servers}: {one}")
        found.append(one)
    return {"rate": RATE, "cluster": {**vars(LEMMA), "worker": "not shaped"}, "cases": found}
