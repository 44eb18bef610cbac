"""A benchmark in both modes of glibc's malloc, which a process has from its start.

It starts itself again, once for each mode, with `--here`; that process measures, and prints what it
has found as JSON.
"""

import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.environment import MALLOC
from benchmarks.results import console


def in_both_modes(module: str, *words: str) -> dict[str, Any]:
    """Return mode -> what ``python -m module --here`` with these words has printed.

    Raises:
        CalledProcessError: it has failed.
    """
    return {mode: in_mode(mode, module, *words) for mode in MALLOC}


def in_mode(mode: str, module: str, *words: str) -> Any:
    """Return what ``python -m module --here`` with these words has printed in one mode.

    Raises:
        CalledProcessError: it has failed.
    """
    console.print(f"malloc mode {mode}")
    other = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-m", module, "--here", *words],
        env={**other, **MALLOC[mode], "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return json.loads(done.stdout)
