"""Where results files lie and how they are written: sorted keys, one line per small thing."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

HERE = Path(__file__).parent
console = Console(stderr=True)


def folder(table: str) -> Path:
    """The folder of a table, such as `mbs/speed`."""
    return HERE / table


def write(path: Path, results: dict[str, Any]) -> None:
    """Write one results file; the folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    console.print(f"wrote {path.name}")


def read(path: Path) -> dict[str, Any] | None:
    """The results of a file, None where nobody has run its command yet."""
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found
