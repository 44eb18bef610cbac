"""A step that does not fit, under a limit that the system enforces (`anybatch.offload`).

`in memory` trains without a limit, in glibc's default mode and with large thresholds; ours is
compared with the faster one. Ours has a limit, the sum of two parts: the bytes of a process with
torch and all its late modules, and half of the growth of a process that runs the step in memory,
where blocks from 1 MiB on are mapped, so that it grows least. Ours runs in that mode too, which is
the command's under a budget. RLIMIT_DATA is the limit: it counts every private page, including the
kernels' own memory, threads' stacks, copies in transit and free blocks of malloc. These are no live
bytes of tensors. They are added to those at any time, and a plan fills its budget all the time, so
`memory=` is 160 MiB less than the limit. `in memory under it` must fail, or the limit shows
nothing. The child processes run side by side and alternate step by step, in changing order; `wall`
is the median (and the quartiles) of time(ours) / time(in memory) within the rounds. `same malloc`
is the ratio to the step in memory in the same mode, which is the cost of offloading alone.
Gradients are compared bit for bit over all steps.

The second table is a step of which autograd saves more than 4 GiB, in a cgroup of 1 GiB, which
counts torch itself and the file's pages in memory too.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any, Self

import typer

from anybatch.cli.allocator import glibc, settings_of
from benchmarks.environment import MALLOC, environment
from benchmarks.outofcore.limits.cgroups import Group, group
from benchmarks.outofcore.limits.problems import LARGE, SIZES
from benchmarks.results import console, read, write

HERE = Path(__file__).parent
SHARE = 0.5
EXTRA = 160 << 20
"""Bytes of the limit that are not passed as memory=."""
CGROUP = 1 << 30
IN_CGROUP = 384 << 20
"""The budget of live bytes in it."""
TIGHT = settings_of("tight", glibc())
Results = dict[str, Any]


class Child:
    """A process that takes a step on request."""

    def __init__(self, order: Results, malloc: dict[str, str], enter: Callable[[], None]) -> None:
        ours = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.outofcore.limits.child"],
            env={**ours, **malloc, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=enter,  # noqa: PLW1509  nothing else runs in this process
            text=True,
        )
        self.base = self._ask(order)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def step(self, do: str = "step") -> Results:
        """Return what a step says, or how it has failed."""
        return self._ask({"do": do})

    def _ask(self, what: Results) -> Results:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return {"failed": self._end()}
        line = self._process.stdout.readline()
        found: Results = json.loads(line) if line else {"failed": self._end()}
        return found

    def _end(self) -> str:
        code = self._process.wait()
        return "killed" if code < 0 else f"ended with {code}"


def nothing() -> None:
    """Enter no group."""


def ordered(name: str, batch: int, spill: Path | None, **limits: int | None) -> Results:
    """Return the first order to a child."""
    fields = {"name": name, "batch": batch, "limit": None, "memory": None}
    return {**fields, "spill": None if spill is None else str(spill), **limits}


def survives(name: str, batch: int, rounds: int, spill: Path | None) -> Results:
    """Ours at a share of the memory, beside the same step in memory."""
    plain = ordered(name, batch, spill)
    with Child(plain, TIGHT, nothing) as child:
        live = child.step("peak")["peak"]
        grown = max(child.step()["high"] for _ in range(2)) - child.base["rss"]
    limit = int(SHARE * grown)
    memory = max(1, limit - EXTRA)
    with Child(plain | {"limit": limit}, TIGHT, nothing) as limited:
        outcome = limited.step() if "failed" not in limited.base else limited.base
    with ExitStack() as stack:
        modes = MALLOC | {"tight": TIGHT}
        ways = {m: stack.enter_context(Child(plain, modes[m], nothing)) for m in modes}
        order = plain | {"limit": limit, "memory": memory}
        ways["ours"] = stack.enter_context(Child(order, TIGHT, nothing))
        found = interleaved(ways, rounds)
    best = min(MALLOC, key=lambda mode: median(found["seconds"].get(mode, [0])))
    failed = found.pop("failed")
    if failed is None:
        found["wall"] = over(found["seconds"], best)
        found["same malloc"] = over(found["seconds"], "tight")
    return found | {
        "batch": batch,
        "live": live,
        "growth": grown,
        "limit": limit,
        "memory": memory,
        "best": best,
        "limited": outcome.get("failed", "trained"),
        "failed": failed,
    }


def over(seconds: dict[str, list[float]], way: str) -> list[float]:
    """Return the quartiles of time(ours) / time(way) within the rounds."""
    pairs = zip(seconds["ours"], seconds[way], strict=True)
    return [round(cut, 4) for cut in quantiles((a / b for a, b in pairs), n=4)]


def interleaved(ways: dict[str, Child], rounds: int) -> Results:
    """Let all take a step in each round; two rounds come before those that count."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    digests, last = set[str](), dict[str, Results]()
    for index in range(-2, rounds):
        names = list(ways)
        first = index % len(names)
        for way in names[first:] + names[:first]:
            last[way] = ways[way].step()
            if "failed" in last[way]:
                return {"seconds": {}, "failed": f"{way}: {last[way]['failed']}", "exact": False}
            digests.add(last[way].pop("digest"))
            if index >= 0:
                seconds[way].append(round(last[way]["seconds"], 4))
    ours = last["ours"]
    return {
        "seconds": seconds,
        "failed": None,
        "exact": len(digests) == 1,
        "out": ours["out"],
        "waited": ours["waited"],
        "kind": ours["kind"],
        "predicted": ours["predicted"],
        "grown": {way: last[way]["high"] - child.base["rss"] for way, child in ways.items()},
    }


def from_disk(batch: int, memory: int, spill: Path | None) -> Results | None:
    """A large step in a cgroup, and in memory in the same; None where none can be made."""
    name = LARGE[0]
    orders = {
        "in memory": ordered(name, batch, spill),
        "ours": ordered(name, batch, spill, memory=memory),
    }
    found: Results = {}
    for way, order in orders.items():
        with group(CGROUP) as made:
            if made is None:
                return None
            found[way] = in_group(order, made)
    return {"batch": batch, "limit": CGROUP, "memory": memory, "ways": found}


def in_group(order: Results, made: Group) -> Results:
    """Three steps of a child in a group, or how it has ended."""
    with Child(order, TIGHT, made.enter) as child:
        steps: list[Results] = [child.base]
        while len(steps) < 4 and "failed" not in steps[-1]:
            steps.append(child.step())
    figures = {key: value for key, value in steps[-1].items() if key != "high"}
    return figures | {"steps": len(steps) - 1, "peak": made.peak()}


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    rounds: Annotated[int, typer.Option(help="steps of each way that are clocked")] = 7,
    spill: Annotated[Path | None, typer.Option(help="folder of the spill file")] = None,
    only: Annotated[str, typer.Option(help="one problem, or cgroup; the others are kept")] = "",
) -> None:
    """Measure under both limits and write results.json."""
    results = read(out / "results.json") or {"steps": {}, "cgroup": None}
    for name, batch in list(SIZES.items())[: 1 if quick else None]:
        if only in ("", name):
            console.print(name)
            size, times = (16, 2) if quick else (batch, rounds)
            results["steps"][name] = survives(name, size, times, spill)
    if only in ("", "cgroup"):
        console.print(f"{LARGE[0]} in a cgroup")
        batch = 1 if quick else LARGE[1]
        results["cgroup"] = from_disk(batch, IN_CGROUP, spill)
    write(out / "results.json", {**results, "share": SHARE, "environment": environment()})


if __name__ == "__main__":
    typer.run(main)
