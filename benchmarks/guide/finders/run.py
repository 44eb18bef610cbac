"""Fifty steps under a budget by an engine, and by a loop whose size a finder has found.

Lightning's `Tuner.scale_batch_size` runs three steps at 2, 4, 8, ... rows until memory runs out.
(Its other mode, a search between the last two sizes, did not end here: the size may stay at the
rows of the data.) Accelerate's `find_executable_batch_size` begins with the whole batch, and takes
a tenth off until it fits. Then a loop by hand accumulates gradients in micro-batches of that size.
A search and fifty steps are counted, and so are those of an engine, its planning among them.

A host has no allocator with a budget. So a trial asks first whether its rows fit, which a meter has
measured for a second micro-batch, and fails in the words of the host's allocator if not. What that
takes, and all steps that fail, are left out, in favour of the finders. The loops are not exact:
BatchNorm normalises each micro-batch, and a loss of all samples is one of each micro-batch.

Networks and budgets are those of `benchmarks/guide/first_step`, without the one of 1,000 steps of
time. Each cell is a process of its own, which runs all of these one after the other.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

from benchmarks.environment import environment
from benchmarks.guide.first_step.cell import SEED
from benchmarks.guide.first_step.networks import NETWORKS
from benchmarks.results import console, read, write

HERE = Path(__file__).parent
SHARES = (0.2, 0.5)
"""Of the bytes between the fewest and those of an undivided step."""
STEPS = 50
LEFT_OUT = ("unrolled, T=1000",)


def cell(name: str, share: float, steps: int) -> dict[str, Any]:
    """Return the answer of one process."""
    words = [sys.executable, "-m", "benchmarks.guide.finders.cell", name, str(share), str(steps)]
    with tempfile.TemporaryDirectory() as caches:
        env = {**os.environ, "XDG_CACHE_HOME": caches}
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=env)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    only: Annotated[str, typer.Option(help="networks whose name holds this; others are kept")] = "",
) -> None:
    """Measure fifty steps of each and write results.json."""
    names = [name for name in NETWORKS if only in name and name not in LEFT_OUT]
    names, shares = (names[:1], SHARES[1:]) if quick else (names, SHARES)
    saved = (read(out / "results.json") or {}).get("networks", {}) if only else {}
    found: dict[str, dict[str, Any]] = {n: saved[n] for n in NETWORKS if n in saved}
    cells = [(name, share) for name in names for share in shares]
    for name, share in track(cells, "networks and budgets", len(cells), console=console):
        found.setdefault(name, {})[str(share)] = cell(name, share, 5 if quick else STEPS)
        write(
            out / "results.json",
            {"seed": SEED, "steps": STEPS, "networks": found, "environment": environment()},
        )


if __name__ == "__main__":
    typer.run(main)
