"""What one of several ranks runs: a training by TRL, of which it keeps rows and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from benchmarks.hosts.trl import runs
from datasets import Dataset

from anybatch.integrations import trl as ours

BATCH, ROWS = 4, 16
"""Samples of a rank, and those of two batches of both ranks."""


def rows_of(case: runs.Case) -> Dataset:
    """Return rows of two batches; prompts to be completed have one length."""
    if case.method == "GRPO":
        return Dataset.from_list([{"prompt": " ".join(runs.WORDS[i : i + 3])} for i in range(ROWS)])
    return Dataset.from_list(runs.rows_of(case, 0) + runs.rows_of(case, 1)[: ROWS - runs.ROWS])


def main(folder: str, name: str, **more: Any) -> None:
    """Train on this rank, and write what was seen."""
    torch.set_num_threads(1)
    runs.BATCH = BATCH
    case = runs.BY_NAME[name]
    before: list[Any] = []
    inputs: list[Any] = []

    class Keeps(getattr(ours, f"{case.method}Trainer")):  # type: ignore[misc]
        def _split(self, rows: Any) -> Any:
            before.append({k: v.clone() for k, v in self.model.state_dict().items()})
            inputs.append(dict(rows))
            return super()._split(rows)

    options: dict[str, Any] = {"train_dataset": rows_of(case), "steps": 2, "micro_batch": 3} | more
    with runs.in_float64():
        found = runs.train(case, Keeps, runs.PARTS, **options)
    last = found.trainer.engine.last
    kept = {"before": before, "inputs": inputs, "gradients": found.gradients, "logs": found.logs}
    kept |= {"micro_batches": found.micro_batches, "samples": last.samples}
    torch.save(kept, Path(folder) / f"rank{found.trainer.args.process_index}.pt")
