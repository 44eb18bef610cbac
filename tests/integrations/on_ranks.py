"""What one of several ranks runs: a training of which every rank keeps rows, loss and gradients."""

from __future__ import annotations

from pathlib import Path

import torch
from benchmarks.integrations.transformers.families import FAMILIES
from tests.integrations.trainings import train

from anybatch.integrations.transformers import Trainer


def main(folder: str, name: str, micro_batch: str) -> None:
    """Train a family on this rank, and write what was seen."""
    torch.set_num_threads(1)
    (family,) = [family for family in FAMILIES if family.name == name]
    trainer, observed = train(
        Trainer,
        family.model().double(),
        family.rows(22, 0),
        Path(folder) / "run",
        {"micro_batch": int(micro_batch)},
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
    )
    before = [model.state_dict() for model in observed.before]
    found = {"rows": observed.rows, "after": observed.after, "before": before}
    torch.save(found, Path(folder) / f"rank{trainer.args.process_index}.pt")
