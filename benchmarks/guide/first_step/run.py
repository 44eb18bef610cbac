"""The first step under a budget beside later ones, and fifty steps beside the best fixed size.

Eleven networks and three budgets each: a fifth and a half of the way from the fewest bytes to those
of an undivided step, and one in which the undivided batch fits. Each is a process of its own. A
later step is the median of the last ten of fifty. The best fixed size is the fastest of a sweep of
powers of two, planned before and counted without its planning, or the one that was chosen if it is
faster still. The second start is one of the same program in the same process, with what the first
start has kept. A process that has not ended after ten minutes is ended, and the table says so.

The cells of 1,000 steps of time are of an earlier version and of another machine, beside which
tests ran at low priority.

before.json has the cells that were measured before every trial was a step that trains, in part
beside other work.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

from benchmarks.environment import environment
from benchmarks.guide.first_step.cell import SEED
from benchmarks.guide.first_step.networks import NETWORKS
from benchmarks.results import console, read, write

HERE = Path(__file__).parent
CELL = "benchmarks.guide.first_step.cell"
SHARES = (0.2, 0.5, 1.2)
"""Of the bytes between the fewest and those of an undivided step."""
STEPS = 50
ENDED = 600
"""Seconds after which a process is ended."""


def cell(module: str, name: str, share: float, steps: int) -> dict[str, Any]:
    """Return what one process of a module found; `ended` where it had to be ended."""
    words = [sys.executable, "-m", module, name, str(share), str(steps)]
    with tempfile.TemporaryDirectory() as caches:  # what earlier starts found is not there
        env = {**os.environ, "XDG_CACHE_HOME": caches}
        try:
            done = subprocess.run(
                words, stdout=subprocess.PIPE, text=True, timeout=ENDED, check=True, env=env
            )
        except subprocess.TimeoutExpired:
            return {"ended": ENDED}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found.pop("seconds", None)
    return {k: round(v, 5) if isinstance(v, float) else v for k, v in found.items()}


def measure(
    module: str,
    names: Sequence[str],
    shares: Sequence[float],
    steps: int,
    out: Path,
    saved: dict[str, dict[str, Any]],
) -> None:
    """Run a process for each network and budget, and write results.json after each of them."""
    found = {name: saved[name] for name in NETWORKS if name in saved}
    cells = [(name, share) for name in names for share in shares]
    for name, share in track(cells, "networks and budgets", len(cells), console=console):
        found.setdefault(name, {})[str(share)] = cell(module, name, share, steps)
        write(
            out / "results.json",
            {"seed": SEED, "steps": STEPS, "networks": found, "environment": environment()},
        )


def earlier(out: Path) -> dict[str, dict[str, Any]]:
    """Return the networks of the last results."""
    found: dict[str, dict[str, Any]] = (read(out / "results.json") or {}).get("networks", {})
    return found


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    only: Annotated[str, typer.Option(help="networks whose name holds this; others are kept")] = "",
) -> None:
    """Measure first steps and write results.json."""
    names = [name for name in NETWORKS if only in name]
    names, shares = (names[:1], SHARES[1:2]) if quick else (names, SHARES)
    steps = 12 if quick else STEPS
    measure(CELL, names, shares, steps, out, earlier(out) if only else {})


if __name__ == "__main__":
    typer.run(main)
