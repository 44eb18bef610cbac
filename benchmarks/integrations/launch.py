"""A part of a benchmark in one process, or in several that torch's launcher starts."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def answer(parts: dict[str, Callable[..., Any]]) -> None:
    """Do in such a process what it was started for: OUT, the name of a part, and its words."""
    out, name, *words = sys.argv[1:]
    found = parts[name](*words)
    if os.environ.get("RANK", "0") == "0":
        Path(out).write_text(json.dumps(found))
