"""The baseline: a training loop as people write it, the whole mini-batch in one forward.

Data order, augmentation, first weights, loss, optimizer and schedule are those of the command, made
by the same functions, so that the step is all that differs. The library's engine has no part in it.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from anybatch import Loss
from anybatch.cli.build import RunParts, build, make_optimizer, make_schedule, seeded
from anybatch.cli.faults import TrainingError
from anybatch.cli.metrics import Metric, make_metric
from anybatch.cli.settings import Settings

Row = dict[str, Any]
LossFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def train_undivided(settings: Settings, ready: Callable[[], None]) -> list[Row]:
    """Train every mini-batch undivided; return a row of figures for each epoch.

    `ready` is called once, when model, optimizer and data are there and no step was taken.

    Raises:
        TrainingError: when the loss is no longer a finite number.
    """
    with seeded(settings.seed, settings.threads):
        parts = build(settings)
        model, loss_fn, device = parts.model, parts.loss, parts.device
        assert not isinstance(loss_fn, Loss), "the recipes' losses are functions"
        train_loader = parts.loader(settings, shuffle=True)
        optimizer = make_optimizer(parts.recipe, model.parameters())
        steps = parts.recipe.epochs * len(train_loader)
        schedule = make_schedule(parts.recipe, optimizer, steps)
        ready()
        rows = []
        for epoch in range(1, parts.recipe.epochs + 1):
            model.train()
            tally = Tally(make_metric(parts.data.task))
            started = time.perf_counter()
            for batch in train_loader.epoch(epoch):
                x, y = batch.inputs.to(device), batch.targets.to(device)
                optimizer.zero_grad()
                outputs = model(x)
                loss = loss_fn(outputs, y)
                loss.backward()  # type: ignore[no-untyped-call]
                tally.add(loss, outputs.detach(), y)
                optimizer.step()
                schedule.step()
                del outputs, loss
            row = tally.row("train") | {"seconds": time.perf_counter() - started}
            rows.append(row | _test(model, loss_fn, parts, settings))
        return rows


class Tally:
    """The mean loss and the metric of all batches that were added."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.total, self.images = 0.0, 0

    def add(self, loss: torch.Tensor, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Add one mini-batch."""
        value = float(loss.detach())
        if not math.isfinite(value):
            raise TrainingError(f"the loss must be a finite number; got {value}.")
        self.total += value * len(targets)
        self.images += len(targets)
        self.metric.update(outputs, targets)

    def row(self, part: str) -> Row:
        """Return the figures of "train" or "test"."""
        return {f"{part}_loss": self.total / self.images, f"{part}_metric": self.metric.value()}


@torch.no_grad()
def _test(model: nn.Module, loss_fn: LossFn, parts: RunParts, settings: Settings) -> Row:
    model.eval()
    tally = Tally(make_metric(parts.data.task))
    for batch in parts.loader(settings, shuffle=False).epoch(0):
        x, y = batch.inputs.to(parts.device), batch.targets.to(parts.device)
        outputs = model(x)
        tally.add(loss_fn(outputs, y), outputs, y)
    return tally.row("test")
