"""Errors and seconds of a library's loop, in one process and in several that torch starts."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.environment import environment
from benchmarks.results import console, read, write

SEEDS = (0, 1, 2)
PROCESSES = (1, 2)
HERE = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


def launched(module: str, processes: int, *words: str) -> Any:
    """Return what ``python -m module OUT words`` writes to OUT, run by so many processes.

    Raises:
        CalledProcessError: it has failed.
    """
    start = ["-m", module]
    if processes > 1:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        start += ["-m", module]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, *start, str(out), *words]
        subprocess.run(command, env={**os.environ, **HERE}, check=True)
        return json.loads(out.read_text())


def answer(errors: Callable[[tuple[int, ...]], Any], pairs: Callable[[int], Any]) -> None:
    """Do in such a process what it was started for: OUT, "errors" or "speed", and its numbers."""
    out, name, *words = sys.argv[1:]
    numbers = tuple(map(int, words))
    found = errors(numbers) if name == "errors" else pairs(*numbers)
    if os.environ.get("RANK", "0") == "0":
        Path(out).write_text(json.dumps(found))
    if dist.is_initialized():  # one that is left to the end of Python may end it by a fault
        dist.destroy_process_group()


def measure(child: str, out: Path, part: str, count: int, *, quick: bool) -> None:
    """Measure both parts, or one, on one process and on two, and write results.json.

    Args:
        child: the module that each process runs.
        out: folder of the results.
        part: "errors" or "speed"; "" is both.
        count: pairs.
        quick: one seed, one pair, one process.
    """
    seeds = SEEDS[:1] if quick else SEEDS
    processes = PROCESSES[:1] if quick else PROCESSES
    found: dict[str, Any] = read(out / "results.json") or {}
    found |= {"environment": environment() | {"threads": 1}, "seeds": seeds}
    for name, numbers in (("errors", seeds), ("speed", (1 if quick else count,))):
        if part in ("", name):
            console.print(name)
            words = [name, *map(str, numbers)]
            found[name] = {str(n): launched(child, n, *words) for n in processes}
            found |= {"pairs": count} if name == "speed" else {}
    write(out / "results.json", found)
