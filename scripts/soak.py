"""Run every test with a large count in full, file by file, and write what was counted.

A soak takes hours. So a file's counts are written as soon as it has ended, with the commit that it
ran at, and a soak that was interrupted goes on where it was. When all files are there the soak is
whole, and the next one begins anew.

    python -m scripts.soak          go on, or begin
    python -m scripts.soak --anew   begin
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from benchmarks.environment import environment

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "mbs" / "soak" / "results.json"
PASSED, FAILED = 0, 1
"""What pytest returns where it has come to its end."""
PYTEST = (sys.executable, "-m", "pytest", "--soak")
ON_STAND_IN = ("tests/devices", "tests/gpu")
PLUGIN = ("-p", "tests.devices.stand_in")


def files() -> list[str]:
    """Return the test files that hold a large count."""
    found = subprocess.run(
        [*PYTEST, *PLUGIN, "--collect-only", "-q", "-n", "0"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    lines = [line.partition("::") for line in found.stdout.splitlines()]
    return sorted({file for file, colons, _ in lines if colons})


def soaked(file: str) -> dict[str, Any]:
    """Run one file in full; return its outcomes and counts."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "found.json"
        plugin = PLUGIN if file.startswith(ON_STAND_IN) else ()
        words = (*PYTEST, *plugin, "-n", "2", f"--soak-results={target}", file)
        ended = subprocess.run(words, cwd=ROOT, check=False).returncode
        if ended not in (PASSED, FAILED):
            raise typer.Exit(ended)
        found: dict[str, Any] = json.loads(target.read_text())
    return found | {"commit": _git("rev-parse", "--short", "HEAD")}


def begun(*, anew: bool) -> dict[str, Any]:
    """Return the soak to go on with, or an empty one."""
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() and not anew else {"whole": True}
    return {"files": {}} if found["whole"] else dict(found)


def main(
    anew: Annotated[bool, typer.Option(help="begin a new soak, whatever was done before")] = False,  # noqa: FBT002
) -> None:
    """Run what is left of a soak."""
    results, every = begun(anew=anew), files()
    left = [file for file in every if file not in results["files"]]
    print(f"soak: {len(left)} of {len(every)} test files are to be run", flush=True)
    for number, file in enumerate(left, 1):
        print(f"soak: {number} of {len(left)}, {file}", flush=True)
        results["files"][file] = soaked(file)
        current = {name: one for name, one in results["files"].items() if name in every}
        results |= {"files": current, "of": len(every), "whole": len(current) == len(every)}
        results["environment"] = environment()
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    outcomes = [one["outcomes"] for one in results["files"].values()]
    if any(found["failed"] or found["error"] for found in outcomes):
        raise typer.Exit(code=1)


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


if __name__ == "__main__":
    typer.run(main)
