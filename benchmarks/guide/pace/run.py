"""Seconds of a full run: the forecast of `anybatch plan --measure`, and those of `anybatch train`.

The plan measures a few steps of the real loop and forecasts the seconds of an epoch. Then the same
options train as many epochs as should last a few minutes. The forecast is of training alone. The
table compares it with these seconds, and adds those of the full command with its own planning and
the tests between epochs.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from benchmarks.environment import environment
from benchmarks.results import console, write

HERE = Path(__file__).parent
COMMON = ("--data", "digits", "--batch-size", "512", "--threads", "1", "--memory", "8MiB")
CASES = {
    "resnet20, GroupNorm": ("--model", "resnet20"),
    "resnet20, BatchNorm in lanes": ("--model", "resnet20", "--norm", "batch"),
    "cnn:32": ("--model", "cnn:32"),
}
QUICK = {"cnn:8": ("--model", "cnn:8", "--batch-size", "96")}
SECONDS = {"resnet20, GroupNorm": 180.0, "resnet20, BatchNorm in lanes": 60.0, "cnn:32": 60.0}
"""What the runs are to take."""


def anybatch(*words: str) -> str:
    """Return what the command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "anybatch", *words], check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def one(words: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Return what was foreseen of a run, and what it took."""
    found = json.loads(anybatch("plan", *COMMON, *words, "--measure", "--json"))
    pace = found["pace"]
    epochs = max(1, round(seconds / pace["seconds"] / pace["epoch"]))
    steps = epochs * pace["epoch"]
    with tempfile.TemporaryDirectory() as folder:
        out, start = Path(folder) / "run", perf_counter()
        anybatch("train", *COMMON, *words, "--epochs", str(epochs), "--out", str(out))
        elapsed = perf_counter() - start
        summary = json.loads((out / "summary.json").read_text())
        plan = json.loads((out / "plan.json").read_text())
    return {
        "epochs": epochs,
        "steps": steps,
        "measured_steps": pace["steps"],
        "foreseen": [steps * one for one in (pace["interval"][0], pace["seconds"])]
        + [steps * pace["interval"][1]],
        "trained": summary["train_seconds"],
        "whole": elapsed,
        "micro_batch": [found["micro_batch"], plan["micro_batch"]],
    }


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
) -> None:
    """Plan and train, and write results.json."""
    cases = QUICK if quick else CASES
    found = {}
    for name, words in cases.items():
        found[name] = one(words, SECONDS.get(name, 1.0))
        console.print(f"{name}: {found[name]}")
    write(out / "results.json", {"environment": environment(), "runs": found})


if __name__ == "__main__":
    typer.run(main)
