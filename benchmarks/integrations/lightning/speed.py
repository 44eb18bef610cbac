"""Seconds of a step of both at equal micro-batch, run in turn: the whole loop counts."""

import os
import statistics
import time
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch

from anybatch.integrations.lightning import FullBatch
from benchmarks.integrations.accelerate.speed import SUBJECTS, Subject, loss, summary
from benchmarks.integrations.lightning.theirs import Module, fit

STEPS, SETTLED = 8, 2


class Clock(pl.Callback):  # type: ignore[misc]
    """The seconds between the ends of steps, on the wall and of the processor.

    Args:
        batches: of the loader, to a step.
    """

    def __init__(self, batches: int) -> None:
        self.ends: list[tuple[float, float]] = []
        self._batches = batches

    def on_train_batch_end(self, *arguments: Any) -> None:
        if (arguments[-1] + 1) % self._batches == 0:
            self.ends.append((time.perf_counter(), time.process_time()))

    def seconds(self) -> tuple[float, float]:
        """Medians, without the first steps."""
        steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(self.ends[SETTLED:])]
        wall = statistics.median(wall for wall, _ in steps)
        return wall, statistics.median(processor for _, processor in steps)


def seconds(subject: Subject, way: str) -> tuple[float, float]:
    """Seconds of a step of a training."""
    torch.manual_seed(0)
    module = Module(subject.model(), loss, 1e-3)
    rows = subject.rows(subject.batch * STEPS * int(os.environ.get("WORLD_SIZE", "1")))
    steps = subject.batch // subject.micro_batch
    if way == "theirs":
        clock = Clock(steps)
        options = {"accumulate_grad_batches": steps, "callbacks": [clock]}
        fit(module, rows, subject.micro_batch, **options)
    else:
        clock = Clock(1)
        full_batch = FullBatch(micro_batch=subject.micro_batch)
        fit(module, rows, subject.batch, callbacks=[full_batch, clock])
    return clock.seconds()


def pairs(count: int) -> dict[str, dict[str, float]]:
    """Median ratios of ours to theirs, both ways in turn, by subject."""
    torch.set_num_threads(1)
    found = {}
    for name, subject in SUBJECTS.items():
        both = []
        for index in range(count):
            order = ["ours", "theirs"] if index % 2 else ["theirs", "ours"]
            both.append({way: seconds(subject, way) for way in order})
        found[name] = summary(both)
    return found
