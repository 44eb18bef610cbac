"""A training by a Lightning Trainer as people write it, and its ``accumulate_grad_batches``."""

import logging
import os
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.integrations.problems import Rows

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "max_epochs": 1,
}


class Module(pl.LightningModule):  # type: ignore[misc]
    """A model and its loss.

    Args:
        body: the model.
        loss: of outputs and targets.
        rate: of SGD.
    """

    def __init__(self, body: nn.Module, loss: Any, rate: float) -> None:
        super().__init__()
        self.body, self.loss, self.rate = body, loss, rate

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        del batch_idx
        x, y = batch
        loss: Tensor = self.loss(self.body(x), y)
        return loss

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def fit(module: pl.LightningModule, rows: Rows, size: int, **options: Any) -> None:
    """Fit a module for an epoch, in this process, or as one of those that were launched."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    several = int(os.environ.get("WORLD_SIZE", "1"))
    if several > 1:
        strategy = DDPStrategy(process_group_backend="gloo")
        options |= {"strategy": strategy, "devices": several}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl.Trainer(**QUIET, **options).fit(
            module, DataLoader(TensorDataset(*rows), batch_size=size)
        )
