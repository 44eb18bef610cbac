"""What one of several ranks runs: a fit of which every rank keeps batches, loss and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from tests.integrations.fits import Net, fit, made, rows
from torch.utils.data import DataLoader

from anybatch.integrations.lightning import FullBatch


class Logs(Net):
    """Logs what the person wants of all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, out = self.lose(*batch)
        self.log("loss", loss, sync_dist=True)
        self.log("mean", out.mean(), sync_dist=True)
        return loss


def main(folder: str, micro_batch: str) -> None:
    """Fit on this rank, and write what was seen."""
    torch.set_num_threads(1)
    observed = fit(
        *(made(Logs), FullBatch(micro_batch=int(micro_batch))),
        loader=DataLoader(rows(), batch_size=7),
        max_epochs=1,
        strategy=DDPStrategy(process_group_backend="gloo"),
        devices=2,
    )
    found = {
        "before": [module.state_dict() for module in observed.before],
        "batches": observed.batches,
        "after": observed.after,
        "outputs": observed.outputs,
        "logged": observed.logged,
    }
    torch.save(found, Path(folder) / f"rank{torch.distributed.get_rank()}.pt")
