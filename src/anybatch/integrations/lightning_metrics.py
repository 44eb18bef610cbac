"""torchmetrics inside a `training_step` that is called with parts of a batch.

A metric has state between calls, and rows may be run more than once: in an inspection, on a copy
without data, or again after memory ran out. So while micro-batches run, the arguments of a metric
of the module are stored, and it is called once, with all rows, when the step is over. Inside the
step its call returns the value of its own rows. Source: torchmetrics 1.9, ``Metric.forward``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from anybatch.core import tree
from anybatch.core.accelerator import wide
from anybatch.core.meeting import looks_here
from anybatch.integrations.lightning_step import Log
from anybatch.memory.fakes import is_fake

WAYS = ("forward", "update")


class MetricCall:
    """Recorder in place of a metric's ``forward`` or ``update``; copies of the module share it."""

    def __init__(self, path: str, way: str, metric: Metric, log: Log) -> None:
        self._path, self._way, self._log = path, way, log
        fresh = metric.clone()
        fresh.reset()
        self._fresh = fresh

    def __deepcopy__(self, memo: dict[int, Any]) -> MetricCall:
        return self

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Take the arguments aside."""
        places = {str(i): value for i, value in enumerate(arguments)}
        self._log.call(self._path, self._way, [places, named])
        if self._way == "update":
            return None
        tensors = [t for _, t in tree.tensors((arguments, named))]
        if any(is_fake(t) for t in tensors):
            return torch.zeros((), device=tensors[0].device)
        with torch.no_grad():
            self._fresh.reset()
            value = self._fresh(*tree.map_tensors(Tensor.detach, arguments), **named)
            self._fresh.reset()
            return _of_samples(value, tensors) if looks_here() else value


def _of_samples(value: Any, arguments: list[Tensor]) -> Any:
    """Return the value, made to depend on all samples of the arguments.

    A metric may read numbers, and make a tensor of them: samples cannot be traced through that.
    """
    if not arguments:
        return value
    every = torch.stack([wide(one.detach().sum().real).cpu() for one in arguments]).sum()

    def marked(one: Tensor) -> Tensor:
        always = torch.ones((), dtype=torch.bool, device=one.device)
        return torch.where(always, one, every.to(one))

    return tree.map_tensors(marked, value)


@contextmanager
def recorded_metrics(module: nn.Module, log: Log) -> Iterator[None]:
    """Record arguments of the module's metrics in the body, without a change of their state."""
    metrics = [(path, one) for path, one in module.named_modules() if isinstance(one, Metric)]
    before = [(one, way, vars(one).get(way)) for _, one in metrics for way in WAYS]
    calls = [(one, way, MetricCall(path, way, one, log)) for path, one in metrics for way in WAYS]
    for one, way, call in calls:
        vars(one)[way] = call
    try:
        yield
    finally:
        for one, way, own in before:
            del vars(one)[way]
            if own is not None:
                vars(one)[way] = own
