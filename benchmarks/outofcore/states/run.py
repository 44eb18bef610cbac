"""A deep network trained by AdamW with its states in memory, and in a file (`offload_states`).

Every training is a process of its own. First each way runs without a limit: seconds a step are a
median without the first step, and the parameters after the last one are compared bit for bit. Then
each runs under RLIMIT_DATA, the kernel's own limit on the memory that a process may allocate: half
of all states above the memory that the process holds before the network is made, plus memory for
stacks and buffers of threads. All run in malloc mode tight, which gives freed blocks back to the
system at once: in the default mode glibc keeps them, and no limit would hold. The file is in
`--spill`, or in the system's folder, and bypasses the page cache where the system can.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from anybatch.cli.allocator import glibc, settings_of
from benchmarks.outofcore.states.trial import LAYER, STATES
from benchmarks.results import console, write

HERE = Path(__file__).parent
EXTRA = 64 << 20
"""Bytes of the stacks of threads, of their buffers, and of what kernels allocate for themselves."""


def trial(settings: dict[str, Any]) -> dict[str, Any]:
    """Run one training in a new process."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.outofcore.states.trial", json.dumps(settings)],
        env={**os.environ, **settings_of("tight", glibc()), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    depth: Annotated[int, typer.Option(help="layers of 4 MiB")] = 40,
    steps: Annotated[int, typer.Option(help="steps that are clocked")] = 5,
    spill: Annotated[Path | None, typer.Option(help="folder of the file")] = None,
) -> None:
    """Train in every way, free and limited, and write results.json."""
    depth, steps = (8, 1) if quick else (depth, steps)
    total = STATES * depth * LAYER
    ways: list[tuple[str, int | None]] = [
        ("in memory", None),
        ("optimizer's state away", total // 8),
        ("all away", total // 2),
        ("all away", total // 4),
        ("all away", total // 8),
    ]
    ways = [ways[0], ways[3]] if quick else ways
    limit, rows, environment = total // 2 + EXTRA, [], None
    for way, memory in ways:
        console.print(f"{way}, {memory}")
        settings = {"depth": depth, "way": way, "memory": memory, "steps": steps}
        settings |= {"spill": None if spill is None else str(spill)}
        free = trial(settings | {"limit": None})
        environment = free.pop("environment")
        limited = trial(settings | {"limit": limit})
        del limited["environment"]
        rows.append({"way": way, "memory": memory, "free": free, "limited": limited})
    found = {"environment": environment, "states": total, "limit": limit, "ways": rows}
    write(out / "results.json", found | {"steps": steps, "seed": 0})


if __name__ == "__main__":
    typer.run(main)
