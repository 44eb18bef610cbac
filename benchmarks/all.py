"""Every benchmark in turn, then the pages: `python -m benchmarks.all`.

Those of other packages are run by `make hosts`, in an environment that has the packages.
"""

import subprocess
import sys
from typing import Annotated

import typer

from benchmarks import report
from benchmarks.results import HERE, console


def modules() -> list[str]:
    """The run modules under benchmarks, by name, but for those of `benchmarks.hosts`."""
    found = sorted(set(HERE.glob("*/*/run.py")) - set(HERE.glob("hosts/*/run.py")))
    return [
        ".".join(("benchmarks", *path.relative_to(HERE).with_suffix("").parts)) for path in found
    ]


def main(
    *,
    quick: bool = False,
    only: Annotated[str, typer.Option(help="run modules whose name holds this")] = "",
) -> None:
    """Run all benchmarks, each in its own process, and write README and docs pages."""
    chosen = [name for name in modules() if only in name]
    for index, name in enumerate(chosen, 1):
        console.rule(f"{index} of {len(chosen)}: {name}")
        folder = HERE.joinpath(*name.split(".")[1:-1])
        options = ["--quick"] if quick else ["--out", str(folder)]
        subprocess.run([sys.executable, "-m", name, *options], check=True)
    report.main()


if __name__ == "__main__":
    typer.run(main)
