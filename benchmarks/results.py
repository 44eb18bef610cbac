"""Where results files lie and how they are written: sorted keys, one line per small thing."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

HERE = Path(__file__).parent
MECHANISMS = {"gathering": "two-pass", "lanes": "lockstep"}
"""Names of mechanisms in results of earlier versions, and their names today."""
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
    found: dict[str, Any] = json.loads(path.read_text(), object_hook=_renamed)
    return found


def _renamed(found: dict[str, Any]) -> dict[str, Any]:
    """Give a mechanism the name that it has today."""
    name = found.get("mechanism")
    return found | {"mechanism": MECHANISMS[name]} if name in MECHANISMS else found
