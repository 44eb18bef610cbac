"""Networks of timm and torchvision, run like the honest networks: an honest one is not refused.

Two steps in float64 on 7 images of random pixels are compared with the undivided batch. One of the
networks is not honest: timm's `csatv2` computes `q @ k.T` of [n, t], so it attends over the images
of a batch. The packages are not among this project's: they need a torch that they were built for,
in an environment of its own.

    pip install timm torchvision
    python -m benchmarks.mbs.zoos.run --only resnet --show    networks whose name holds this
"""

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import track

from benchmarks.environment import environment
from benchmarks.mbs.honest import run as honest
from benchmarks.mbs.honest.subjects import ROWS, SUBJECTS
from benchmarks.mbs.jobs import Died, answers
from benchmarks.mbs.zoos import networks
from benchmarks.results import console, write

HERE = Path(__file__).parent
PATIENCE = 900.0
"""Seconds after which a network has no end."""


def answer(name: str) -> honest.Row:
    """The row of a network, by its name."""
    if name not in SUBJECTS:
        networks.register()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return honest.row_of(SUBJECTS[name])


def main(
    *,
    only: Annotated[str, typer.Option(help="networks whose name holds this; no file")] = "",
    show: Annotated[bool, typer.Option("--show", help="print each network")] = False,
    quick: bool = False,
    out: Path = HERE,
) -> None:
    """Run every network and write results.json."""
    missing = [name for name in networks.PACKAGES if find_spec(name) is None]
    if missing:
        console.print(f"left out, results stay: {' and '.join(missing)} not installed (make hosts)")
        return
    torch.set_num_threads(1)
    networks.register()
    names = [name for name in SUBJECTS if ":" in name and only in name][:: 12 if quick else 1]
    table: dict[str, honest.Row] = {}
    answered = answers(answer, names, PATIENCE)
    for name, found in track(answered, "zoos", total=len(names), console=console):
        table[name] = honest.died(name, found) if isinstance(found, Died) else found
        if show or not honest.is_exact(table[name]):
            console.print(name, table[name], highlight=False)
    groups = honest.summary(table)
    console.print(groups)
    if not only:
        results = {"seed": honest.SEED, "environment": environment(), "rows": ROWS}
        results |= {"steps": honest.STEPS, "networks": table, "groups": groups}
        write(out / "results.json", results)


if __name__ == "__main__":
    typer.run(main)
