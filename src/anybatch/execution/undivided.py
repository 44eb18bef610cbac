"""The undivided mechanism: the full batch at once, where it is no larger than a micro-batch.

The loss is called as the user wrote it, so the step is bit for bit torch's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anybatch.core.batch import MicroBatch
from anybatch.execution.step import Step, check_trains


def undivided(step: Step) -> Tensor:
    """Run forward, loss and backward once.

    Args:
        step: the mini-batch and the model; see `anybatch.execution.step`.

    Returns:
        The loss, a detached 0-dim tensor.
    """
    step.found = step.loss.name
    (micro,) = step.feed()
    found: list[tuple[Any, Tensor]] = []

    def train(micro: MicroBatch) -> None:
        outputs = step.forward(micro)
        loss = step.loss.full_batch(outputs, micro)
        if step.gradients is not None:
            check_trains(step.backward([loss], [torch.ones_like(loss)]))
        step.compare(outputs, micro, once=True)  # when the step's graph has gone
        found.append((outputs, loss.detach()))

    step.under(train)(micro)
    step.finish()
    ((outputs, loss),) = found
    step.show(outputs, micro)
    return loss
