"""The package as it is installed: files, sizes, and seconds of an import and of the command.

Wheel and source distribution are built from this checkout. The wheel is installed in a fresh
environment, first without and then with the extra `cli`; sizes are those of all files there. An
import of torch alone and one of torch and anybatch alternate, each in a process of its own, with
compiled bytecode; so do the calls of the command.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any
from zipfile import ZipFile

import typer
from rich.progress import track

from benchmarks.environment import environment
from benchmarks.results import console, write

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ROUNDS = 7
TORCH, OURS = "import torch", "import torch; from anybatch import Engine"
COUNT = f"{OURS}; import sys; print(sum(n.split('.')[0] == 'anybatch' for n in sys.modules))"
COMMANDS = ("--version", "--help", "train --help", "train --no-such-option", "plan --forget")


def built(folder: Path) -> dict[str, Any]:
    """Build wheel and source distribution; return their sizes, and the files of the wheel."""
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with ZipFile(wheel) as archive:
        files = len(archive.namelist())
    return {
        "wheel_bytes": wheel.stat().st_size,
        "source_bytes": source.stat().st_size,
        "wheel_files": files,
    }


def sizes(site: Path) -> dict[str, int]:
    """Return the bytes of the largest packages of an environment, of ours, and of all."""
    found = {
        one.name: sum(file.stat().st_size for file in one.rglob("*") if file.is_file())
        for one in site.iterdir()
        if one.is_dir() and one.name != "__pycache__" and not one.name.endswith("-info")
    }
    return {name: found[name] for name in ("anybatch", "torch", "numpy")} | {
        "everything": sum(found.values())
    }


def seconds(command: list[str], env: dict[str, str]) -> float:
    """Return the seconds of a process, and accept any exit status."""
    start = perf_counter()
    subprocess.run(command, check=False, capture_output=True, env=env)
    return perf_counter() - start


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
) -> None:
    """Build, install, measure (quick: one round, in this environment), and write results.json."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        found = built(here)
        python, installed = sys.executable, {}
        if not quick:
            venv.create(here / "env", with_pip=True)
            python = str(here / "env" / "bin" / "python")
            (site,) = (here / "env" / "lib").glob("python*/site-packages")
            (wheel,) = here.glob("*.whl")
            pins = str(ROOT / "constraints.txt")
            install = [python, "-m", "pip", "install", "--quiet", "-c", pins]
            before = sum(file.stat().st_size for file in site.rglob("*") if file.is_file())
            for extra in ("", "[cli]"):
                subprocess.run([*install, f"{wheel}{extra}"], check=True)
                installed[extra or "plain"] = sizes(site) | {"with_pip_before": before}
        rounds = []
        for _ in track(range(1 if quick else ROUNDS), "rounds", console=console):
            imports = {code: seconds([python, "-c", code], env) for code in (TORCH, OURS)}
            call = [python, "-m", "anybatch"]
            rounds.append(imports | {c: seconds([*call, *c.split()], env) for c in COMMANDS})
        loaded = subprocess.run(
            [python, "-c", COUNT], check=True, capture_output=True, text=True, env=env
        )
    found |= {
        "installed": installed,
        "modules": int(loaded.stdout),
        "seconds": {name: statistics.median(one[name] for one in rounds) for name in rounds[0]},
        "added": statistics.median(one[OURS] - one[TORCH] for one in rounds),
        "rounds": len(rounds),
    }
    write(out / "results.json", {**found, "environment": environment()})


if __name__ == "__main__":
    typer.run(main)
