"""A new user's first hour: six loops from habit, in a fresh environment with the wheel.

Each of the loops is written as people write it, for a batch that fits (`loops/*_before.py`), and
again with an engine and a budget that is too small for the batch (`loops/*_after.py`). Both run in
an environment that has the wheel and nothing of this repository; the lines that differ are counted,
and the losses of all steps are compared. Then calls with arguments that people try (`habits.py`)
must work, or end in one sentence.

The engine's Trainer reports the loss of the model, so its steps are compared with a plain loop of
that loss (`loops/trainer_plain.py`), not with what transformers' own Trainer logs.
"""

import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.progress import track

from benchmarks.environment import environment
from benchmarks.results import console, write

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
LOOPS = {
    "resnet": "ResNet: bfloat16, clipping, averaged weights",
    "gpt2": "GPT-2, a loop",
    "trainer": "GPT-2, a Trainer",
    "unet": "U-Net with BatchNorm, BCE + Dice",
    "clip": "CLIP",
    "ctc": "LSTM with CTC",
}
RUN = """
import json, runpy, sys
found = runpy.run_path(sys.argv[1])
engine = found.get("engine") or getattr(found.get("trainer"), "engine", None)
if engine is not None:
    last, plan = engine.last, engine.plan
    print(json.dumps([plan.mechanism, last.micro_batches, plan.memory.budget]))
"""
"""Runs a loop, and prints how its engine has divided the batch."""

LOSS = re.compile(r"step (\d+) loss ([-\d.]+)")


def fresh(folder: Path) -> tuple[Path, float]:
    """Return the interpreter of a new environment with the wheel, and the seconds it took."""
    start = perf_counter()
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    subprocess.run([*wheel, str(folder), str(ROOT)], check=True)
    (built,) = folder.glob("*.whl")
    start = perf_counter()
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / ("Scripts" if os.name == "nt" else "bin") / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*install, f"{built}[transformers]"], check=True)
    return python, perf_counter() - start


def losses(python: Path | str, script: Path, cache: str) -> tuple[list[float], list[Any]]:
    """Run a script; return the losses that it prints, and how its engine divided the batch."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {"XDG_CACHE_HOME": cache, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(python), "-c", RUN, str(script)], check=False, capture_output=True, text=True, env=env
    )
    if done.returncode:
        raise SystemExit(f"{script.name} failed:\n{done.stderr}")
    last = done.stdout.splitlines()[-1]
    divided = json.loads(last) if last.startswith("[") else []
    return [float(loss) for _, loss in LOSS.findall(done.stdout)], divided


def changed(before: str, after: str) -> tuple[int, int]:
    """Return how many lines were taken away and added, without empty ones."""
    lines = [one for one in difflib.ndiff(before.splitlines(), after.splitlines()) if one[2:]]
    removed, added = (sum(line.startswith(mark) for line in lines) for mark in ("- ", "+ "))
    return removed, added


def loop(python: Path | str, name: str) -> dict[str, Any]:
    """Run a loop before and after, each from an empty cache."""
    before, after = (HERE / "loops" / f"{name}_{which}.py" for which in ("before", "after"))
    removed, added = changed(before.read_text(), after.read_text())
    # The losses of the model are those of the plain loop.
    plain = HERE / "loops" / "trainer_plain.py" if name == "trainer" else before
    with tempfile.TemporaryDirectory() as cache:
        want, _ = losses(python, plain, cache)
        got, (mechanism, micro_batches, budget) = losses(python, after, cache)
    if not want or len(want) != len(got):
        raise SystemExit(f"{name} has {len(got)} losses instead of {len(want)}")
    if micro_batches < 2:
        raise SystemExit(f"the batch of {name} was not divided: give a smaller budget")
    worst = max(abs(a - b) / abs(b) for a, b in zip(got, want, strict=True))
    return {
        "removed": removed,
        "added": added,
        "steps": len(want),
        "difference": worst,
        "mechanism": mechanism,
        "micro_batches": micro_batches,
        "budget": budget,
    }


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
) -> None:
    """Run the first hour in a fresh environment (quick: in this one), and write results.json."""
    with tempfile.TemporaryDirectory() as folder:
        python, seconds = (sys.executable, None) if quick else fresh(Path(folder))
        loops = {
            name: loop(python, name)
            for name in track(LOOPS, "loops", console=console)
            if not quick or name in ("clip", "ctc")
        }
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(
            [str(python), str(HERE / "habits.py")],
            check=True, capture_output=True, text=True, env=env,
        )  # fmt: skip
    calls = [json.loads(line) for line in done.stdout.splitlines()]
    found = {"install_seconds": seconds, "loops": loops, "calls": calls}
    write(out / "results.json", {**found, "environment": environment()})


if __name__ == "__main__":
    typer.run(main)
