"""What a GPU has seen: the tests in `tests/gpu`, the honest networks, and the adversary's cases.

All three run at the same time, in processes with one thread each, and are those that run on the
CPU. A network or a case that is not exact is named with what it came to.
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from xml.etree import ElementTree

import torch
import typer

from benchmarks.results import console, read, write

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
Results = dict[str, Any]


def commands(scratch: Path, jobs: int, device: str, *, quick: bool) -> dict[str, list[str]]:
    """The three programs, each with a third of the processes."""
    each = str(max(1, jobs // 3))
    tests = [
        "pytest",
        "tests/gpu",
        "-n",
        each,
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
    ]
    run = [*(["--quick"] if quick else []), "--device", device, "--jobs", each, "--out"]
    return {
        "tests": [*tests, f"--junitxml={scratch / 'tests.xml'}"],
        "honest": ["benchmarks.mbs.honest.run", *run, str(scratch / "honest")],
        "adversary": ["benchmarks.mbs.adversary.run", *run, str(scratch / "adversary")],
    }


def tested(report: Path) -> Results:
    """Counts of a report in JUnit's form."""
    found = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ElementTree.parse(report).iter("testsuite"):
        found = {key: count + int(suite.get(key, 0)) for key, count in found.items()}
    failed = found["failures"] + found["errors"]
    passed = found["tests"] - failed - found["skipped"]
    return {"passed": passed, "failed": failed, "skipped": found["skipped"]}


def of_networks(results: Results) -> Results:
    """Networks by group and outcome, and each that is not exact, with its message."""
    others = {}
    for name, row in results["networks"].items():
        for one in row.get("splits", {}).values():
            if one["outcome"] != "exact":
                others[name] = f"{one['outcome']}: {one.get('message', '')}"
    return {"groups": results["groups"], "others": others}


def of_cases(results: Results) -> Results:
    """Cases by outcome, and each that must not be."""
    keys = ("coupled", "twins", "silently wrong", "crashes", "twins refused", "named", "seed")
    return {key: results[key] for key in keys}


def main(
    *,
    jobs: Annotated[int, typer.Option(help="processes")] = os.cpu_count() or 1,
    device: str = "cuda",
    quick: bool = False,
    out: Path = HERE,
) -> None:
    """Run all three and write results.json."""
    if device == "cuda" and not torch.cuda.is_available():
        console.print("no CUDA device here: nothing was run")
        return
    with TemporaryDirectory() as folder:
        scratch = Path(folder)
        ours = {**os.environ, "OMP_NUM_THREADS": "1"}
        running = {
            name: subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, env=ours)
            for name, command in commands(scratch, jobs, device, quick=quick).items()
        }
        for name, process in running.items():
            console.print(f"{name} ended with {process.wait()}")
        honest, adversary = (
            read(scratch / name / "results.json") for name in ("honest", "adversary")
        )
        if honest is None or adversary is None:
            raise typer.Exit(1)
        found = {
            "environment": honest["environment"],
            "tests": tested(scratch / "tests.xml"),
            "honest": of_networks(honest),
            "adversary": of_cases(adversary),
        }
    write(out / "results.json", found)


if __name__ == "__main__":
    typer.run(main)
