"""Run the scripts of docs/lies as a person would, and record their output."""

import subprocess
import sys
from pathlib import Path

import typer
from rich.progress import track

from benchmarks.environment import environment
from benchmarks.results import console, write

HERE = Path(__file__).parent
SCRIPTS = Path(__file__).parents[3] / "docs" / "lies"


def printed(script: Path) -> str:
    """What one script prints; a script that fails stops the run."""
    done = subprocess.run(
        [sys.executable, str(script)], stdout=subprocess.PIPE, check=True, text=True
    )
    return done.stdout


def main(*, quick: bool = False, out: Path = HERE) -> None:
    """Run the five scripts, or the first alone, and write results.json."""
    scripts = sorted(SCRIPTS.glob("[0-9]_*.py"))[: 1 if quick else None]
    table = {script.stem: printed(script) for script in track(scripts, "lies", console=console)}
    write(out / "results.json", {"environment": environment(), "scripts": table})


if __name__ == "__main__":
    typer.run(main)
