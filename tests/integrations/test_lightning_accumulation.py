"""What Lightning's tests demand of accumulation, asked of `FullBatch`: how often, and when.

Theirs count calls of ``zero_grad`` with micro-batches in the loader; here the loader has the whole
batch, and counts, steps and schedules must be the same. docs/decisions/trainings.md says what
differs.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact
from torch import Tensor
from torch.utils.data import DataLoader

pl = pytest.importorskip(
    "lightning.pytorch", reason="pip install 'anybatch[lightning]' is needed for these tests"
)

from lightning.pytorch.callbacks import GradientAccumulationScheduler  # noqa: E402
from tests.integrations.fits import N, Net, assert_full_batch, fit, made, rows  # noqa: E402

from anybatch.integrations.lightning import FullBatch  # noqa: E402

MICRO = 4
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
    pytest.mark.filterwarnings("ignore:When using `Trainer.accumulate_grad_batches != 1.`"),
]


class Counted(torch.optim.SGD):
    """Counts what is done with it."""

    zeroed = stepped = 0

    def zero_grad(self, *arguments: Any, **named: Any) -> None:
        self.zeroed += 1
        super().zero_grad(*arguments, **named)

    def step(self, closure: Any = None) -> Any:
        self.stepped += 1
        return super().step(closure)


class Counting(Net):
    """Overrides the hooks of optimisation, and counts them too."""

    hooks = 0

    def configure_optimizers(self) -> Any:
        self.optimizer = Counted(self.parameters(), lr=0.1)
        return [self.optimizer], [torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)]

    def optimizer_step(self, *arguments: Any, **named: Any) -> Any:
        self.hooks += 1
        return super().optimizer_step(*arguments, **named)


class Batches(Counting):
    """Makes its loader again for every epoch, with a batch that follows a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule: dict[int, int] = {}

    def train_dataloader(self) -> Any:
        past = [first for first in self.schedule if first <= self.trainer.current_epoch]
        windows = self.schedule[max(past)] if past else 1
        return DataLoader(rows(), batch_size=MICRO * windows)


@pytest.mark.large(few=1)
@pytest.mark.parametrize("windows", [1, 2, 3])
def test_gradients_are_emptied_and_steps_made_once_for_a_window(windows: int) -> None:
    theirs, ours = made(Counting), made(Counting)
    options: dict[str, Any] = {"max_epochs": 2}
    few = DataLoader(rows(), batch_size=MICRO)
    one = fit(theirs, loader=few, accumulate_grad_batches=windows, **options)
    many = DataLoader(rows(), batch_size=MICRO * windows)
    other = fit(ours, FullBatch(micro_batch=MICRO), loader=many, **options)
    count = 2 * ceil(ceil(N / MICRO) / windows)
    assert theirs.optimizer.zeroed == ours.optimizer.zeroed == count
    assert theirs.optimizer.stepped == ours.optimizer.stepped == count
    assert len(one.after) == len(other.after) == count
    assert theirs.optimizer.param_groups[0]["lr"] == ours.optimizer.param_groups[0]["lr"]
    assert ours.hooks == count
    assert_full_batch(other, least=count)


SCHEDULES = {"grows": ({1: 2, 3: 4}, 6 + 3 + 3 + 2), "shrinks": ({0: 2, 2: 1}, 3 + 3 + 6 + 6)}


@pytest.mark.large(few=1)
@pytest.mark.parametrize("variant", SCHEDULES)
def test_a_batch_that_follows_a_schedule(variant: str) -> None:
    """We differ: the loader makes such batches, and GradientAccumulationScheduler is refused."""
    schedule, count = SCHEDULES[variant]
    theirs, ours = made(Counting), made(Batches)
    loader = DataLoader(rows(), batch_size=MICRO)
    fit(theirs, GradientAccumulationScheduler(schedule), loader=loader, max_epochs=4)
    ours.schedule = schedule
    fit_own(ours, FullBatch(micro_batch=MICRO))
    assert theirs.optimizer.zeroed == ours.optimizer.zeroed == count
    with pytest.raises(ValueError, match="is scheduled: leave it out"):
        fit(made(), FullBatch(), GradientAccumulationScheduler(schedule))


def fit_own(module: Any, full: FullBatch) -> None:
    pl.Trainer(
        callbacks=[full],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        max_epochs=4,
        reload_dataloaders_every_n_epochs=1,
    ).fit(module)


class Line(Net):
    """A loss without weights, so that equal micro-batches accumulate to what the batch gives."""

    def lose(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.body[-1](x.flatten(1)[:, :1].expand(-1, 144))
        return torch.nn.functional.mse_loss(out[:, 0], y.to(out.dtype)), out


def test_a_last_window_that_is_not_full_is_divided_by_what_came() -> None:
    """We differ: Lightning divides each micro-batch of it by the whole window's count."""
    one, other = made(Line), made(Line)
    few = DataLoader(torch.utils.data.Subset(rows(), range(20)), batch_size=MICRO)
    many = DataLoader(torch.utils.data.Subset(rows(), range(20)), batch_size=2 * MICRO)
    options: dict[str, Any] = {"max_epochs": 1}
    theirs = fit(one, loader=few, accumulate_grad_batches=2, **options).after
    ours = fit(other, FullBatch(micro_batch=MICRO), loader=many, **options)
    assert_full_batch(ours, least=3)
    weights = [n for n in ours.after[0] if n.startswith("body.4") and n.endswith("grad")]
    for got, want in zip(theirs[:2], ours.after[:2], strict=True):
        assert_exact({n: got[n] for n in weights}, {n: want[n] for n in weights})
    assert_exact({n: 2 * theirs[2][n] for n in weights}, {n: ours.after[2][n] for n in weights})
