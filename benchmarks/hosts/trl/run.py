"""The gradient of TRL's trainers, accumulated by TRL and by an engine, against the undivided batch.

Each training of `runs.CASES` takes two steps without a change of the weights: of 8 samples, and of
what the data set has left, which are 3 for SFT and DPO. The truth is TRL's own trainer with the
whole batch at once, in float64. Beside it run TRL's own accumulation, in parts of 2, and the
engine, in micro-batches of 2 or less. Errors are by the one measure, the worst of all seeds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import trl
import typer

from anybatch.integrations import trl as ours
from benchmarks.environment import environment
from benchmarks.hosts.trl.runs import CASES, PARTS, Case, in_float64, train
from benchmarks.results import console, write

HERE = Path(__file__).parent
MICRO_BATCH = 2
STILL: dict[str, Any] = {"rate": 0.0, "steps": 2}


def measure(case: Case, seeds: list[int]) -> dict[str, Any]:
    """Return the row of a case: the errors of both steps, and how the engine divided both."""
    name = f"{case.method}Trainer"
    row: dict[str, Any] = {"method": case.method, "name": case.name}
    for seed in seeds:
        want = train(case, getattr(trl, name), seed=seed, **STILL)
        its = train(case, getattr(trl, name), PARTS, seed=seed, **STILL)
        got = train(case, getattr(ours, name), PARTS, seed=seed, micro_batch=MICRO_BATCH, **STILL)
        for step, label in enumerate(("first", "second")):
            for who, found in (("trl", its), ("ours", got)):
                key = f"{who}_{label}"
                row[key] = max(row.get(key, 0.0), found.error(want, step))
        row |= {
            "mechanism": got.trainer.engine.plan.mechanism,
            "micro_batches": got.micro_batches,
        }
    return row


def main(
    out: Annotated[Path, typer.Option(help="Folder for results.json.")] = HERE,
    seeds: Annotated[int, typer.Option(help="How many seeds.")] = 3,
) -> None:
    """Measure all cases."""
    rows = []
    with in_float64():
        for case in CASES:
            rows.append(measure(case, list(range(seeds))))
            console.print(rows[-1])
    results = {
        "environment": environment() | {"trl": trl.__version__},
        "micro_batch": MICRO_BATCH,
        "parts": PARTS,
        "rows": rows,
        "seeds": list(range(seeds)),
    }
    write(out / "results.json", results)


if __name__ == "__main__":
    typer.run(main)
