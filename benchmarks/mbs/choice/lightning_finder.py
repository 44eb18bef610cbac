"""Lightning's BatchSizeFinder, run by its Tuner on a LightningModule around the problem.

At its best setting: one step for each trial (more would only take longer), manual optimisation,
and two micro-batches in a step, because a finder that tries one alone does not see the gradients
that accumulation holds. Its data set is four times the batch: where a size reaches the length of
the data, the finder returns the size that has just failed. Its largest size is twice the batch,
since it does not try the largest itself. The margin of `binsearch` is its own 5 %.
"""

import logging
import tempfile
import warnings
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from benchmarks.mbs.choice.finders import Attempts, Finder, Found
from benchmarks.mbs.problem import Problem


def _module(attempts: Attempts) -> Any:
    """A LightningModule whose batches are row numbers: only how many there are counts."""
    from lightning.pytorch import LightningModule

    class Step(LightningModule):  # type: ignore[misc]
        """Two micro-batches of the problem, then an update that changes nothing."""

        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            self.automatic_optimization = False
            self.model = attempts.problem.model

        def training_step(self, batch: Any, _index: int) -> None:
            attempts.first(2, min(len(batch), attempts.problem.batch))
            self.optimizers().step()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

        def train_dataloader(self) -> Any:
            return DataLoader(range(4 * attempts.problem.batch), self.batch_size)  # type: ignore[arg-type]

    return Step()


def _trainer(folder: str, device: str) -> Any:
    from lightning.pytorch import Trainer

    return Trainer(
        accelerator=device,
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def lightning_finder(
    problem: Problem, budget: int, *, mode: Literal["power", "binsearch"]
) -> Found:
    """What `Tuner.scale_batch_size` returns, no more than the batch."""
    from lightning.pytorch.tuner import Tuner

    attempts, device = Attempts(problem, budget), next(problem.model.parameters()).device.type
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")  # advice on loaders and loggers
        tuner, module = Tuner(_trainer(folder, device)), _module(attempts)
        try:
            size = tuner.scale_batch_size(
                module, mode=mode, steps_per_trial=1, max_val=2 * problem.batch
            )
        except ValueError as error:  # it halves 1 to 0, and a loader refuses 0
            return attempts.found(None, str(error))
    size = min(size, problem.batch)
    tried = {entry[0] for entry in attempts.tried}
    return attempts.found(size, "" if size in tried else "the size it returns was never tried")


LIGHTNING: dict[str, Finder] = {
    f"lightning_{mode}": partial(lightning_finder, mode=mode) for mode in ("power", "binsearch")
}
