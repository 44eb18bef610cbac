"""The tests that a version could break, with each Python and torch that anybatch says it is for.

Each pair gets an environment of its own below a folder that stays, so that a second run installs
nothing; a Python that is not on the path, or a torch that cannot be installed, is a row that says
so. What is run are the tests of what depends most on them: exactness, lanes (threads and modes of
torch), losses (watched functions), draws, offload (hooks), ranks (gloo), the command; of large
counts a part. Warnings are errors. The results are in benchmarks/platforms/matrix/results.json.

    python -m scripts.matrix [--cell 3.12:2.12.0] [--folder .matrix]

A torch from a package index comes with its CUDA libraries: some gigabytes for each pair.
"""

import json
import os
import shutil
import signal
from pathlib import Path
from subprocess import CompletedProcess, run
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from xml.etree import ElementTree

import typer
from benchmarks.results import folder, read, write

ROOT = Path(__file__).parents[1]
CELLS = ["3.11:2.11.0", "3.11:2.13.0", "3.12:2.12.0", "3.13:2.13.0", "3.13:2.14.1"]
RESULTS = folder("platforms/matrix") / "results.json"
TESTS = (
    "tests/exactness/test_exactness.py",
    "tests/exactness/test_contrastive.py",
    "tests/exactness/test_coupled.py",
    "tests/exactness/test_encoders.py",
    "tests/exactness/test_dice_attacked.py",
    "tests/exactness/test_lanes.py",
    "tests/exactness/test_late_batch_norm.py",
    "tests/exactness/test_algorithm1.py",
    "tests/integrations/test_chunked_families.py",
    "tests/limits/test_chunked_budget.py",
    "tests/limits/test_platforms.py",
    "tests/exactness/test_ranks.py",
    "tests/repository/test_tiers.py",
    "tests/cli/test_cli.py",
    "tests/unit/loss/test_chunked.py",
    "tests/unit/loss/test_functionals.py",
    "tests/unit/loss/test_terms.py",
    "tests/unit/lockstep/test_batchnorm_statistics.py",
    "tests/unit/offloading/test_recompute_recipes.py",
    "tests/unit/offloading/test_sharing_storage.py",
    "tests/unit/engine/test_engine.py",
    "tests/unit/execution/test_inspection.py",
    "tests/unit/core/test_modules.py",
    "tests/unit/memory/test_stores_nameless.py",
    "tests/unit/offloading/test_offload.py",
    "tests/unit/core/test_rng.py",
    "tests/unit/tools/test_scripted.py",
    "tests/unit/memory/test_stores.py",
    "tests/unit/execution/proof/test_declared.py",
    "tests/unit/execution/proof/test_meeting.py",
)
TEST_PACKAGES = ("hypothesis", "pytest", "pytest-xdist", "scipy", "transformers")
ASK = """
import json, platform, torch
print(json.dumps({
    "python": platform.python_version(), "torch": torch.__version__, "system": platform.system(),
}))
"""


def pins() -> str:
    """Return the constraints but for torch and what is for one Python alone."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return "\n".join(line for line in lines if not line.startswith(("torch==", "#"))) + "\n"


def installed(python: str, torch: str, within: Path) -> Path | str:
    """Return the Python of an environment with that torch, or why there is none."""
    here = within / f"py{python}-torch{torch}"
    found = here / "bin" / "python"
    if not found.exists():
        base = shutil.which(f"python{python}")
        if base is None or _called([base, "--version"], check=False).returncode:
            return f"no python{python} here"  # or a name that stands for one that is not installed
        _called([base, "-m", "venv", str(here)])
    with TemporaryDirectory() as scratch:
        constraints = Path(scratch) / "constraints.txt"
        constraints.write_text(pins())
        pip = [str(found), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        wanted = [f"torch=={torch}", "-e", f"{ROOT}[demo]", *TEST_PACKAGES]
        completed = _called([*pip, "-c", str(constraints), *wanted], check=False)
    return found if completed.returncode == 0 else "cannot be installed"


def outcome(python: Path, tests: tuple[str, ...] = TESTS) -> dict[str, Any]:
    """Run the tests and return versions and counts."""
    with TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        completed = _called(
            [str(python), "-m", "pytest", "-n", "0", "-q", f"--junitxml={report}", *tests],
            check=False,
        )
        if not report.exists():
            return {"reason": "the tests did not start"}
        counts = counted(report.read_text())
    answer = json.loads(_called([str(python), "-c", ASK]).stdout)
    if counts["failed"]:
        print(completed.stdout[-3000:])
    return {**answer, **counts, "files": len(tests)}


def counted(report: str) -> dict[str, int]:
    """Return what a report in JUnit's form counts."""
    suites = list(ElementTree.fromstring(report).iter("testsuite"))
    found = {key: sum(int(one.get(key, 0)) for one in suites) for key in COUNTED}
    failed = found["failures"] + found["errors"]
    passed = found["tests"] - failed - found["skipped"]
    return {"passed": passed, "failed": failed, "skipped": found["skipped"]}


COUNTED = ("tests", "failures", "errors", "skipped")


def merged(before: list[dict[str, Any]], row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows with one of them new, in the order of their versions."""

    def key(one: dict[str, Any]) -> tuple[str, str]:
        return (
            ".".join(str(one["python"]).split(".")[:2]),
            ".".join(str(one["torch"]).partition("+")[0].split(".")[:2]),
        )

    return sorted([*(one for one in before if key(one) != key(row)), row], key=key)


def main(
    *,
    cell: Annotated[list[str] | None, typer.Option(help="PYTHON:TORCH, again and again")] = None,
    within: Annotated[Path, typer.Option("--folder")] = ROOT / ".matrix",
    out: Annotated[Path, typer.Option(hidden=True)] = RESULTS,
) -> None:
    """Run the tests with each pair of versions and write what passed."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where this is in background
    failed = False
    for one in cell or CELLS:
        python, _, torch = one.partition(":")
        print(f"Python {python}, torch {torch}")
        found = installed(python, torch, within.resolve())
        result = {"reason": found} if isinstance(found, str) else outcome(found)
        row = {"python": python, "torch": torch, **result}
        failed = failed or bool(row.get("failed"))
        before = (read(out) or {"cells": []})["cells"]
        write(out, {"cells": merged(before, row)})
    raise typer.Exit(1 if failed else 0)


def _called(command: list[str], *, check: bool = True) -> CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV",)}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    return run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=check)


if __name__ == "__main__":
    typer.run(main)
