"""Test half of an epoch: a metric over all test samples, and their loss."""

from __future__ import annotations

from functools import partial
from typing import Any

from anybatch import Engine
from anybatch.cli.metrics import make_metric
from anybatch.cli.reading import Reading
from anybatch.cli.views import Loader


def tested(
    reading: Reading, loader: Loader, engine: Engine, task: str, epoch: int
) -> dict[str, Any]:
    """Return the metric over all samples of all ranks, and the loss averaged over mini-batches.

    A coupled loss, such as BCE + Dice, has no exact value that does not hold all outputs. The model
    of `engine` must be in the mode of the test.
    """
    engine.model.eval()
    engine.model.zero_grad()  # the next step begins without them, and here is room for the test
    metric = make_metric(task)
    local_metric = reading.team.rank_metric(metric, partial(make_metric, task))
    total, images = 0.0, 0
    for _, batch in reading.epoch(loader, epoch):
        loss = engine.evaluate(batch.inputs, batch.targets, observe=local_metric.update)
        assert engine.last is not None
        total += float(loss) * engine.last.samples
        images += engine.last.samples
    reading.team.add(metric, local_metric)
    return {"test_loss": total / images, f"test_{metric.name}": metric.value()}
