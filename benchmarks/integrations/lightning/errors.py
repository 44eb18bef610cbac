"""How far a step's gradient is from that of its batch, undivided, in float64: theirs and ours."""

import os
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from anybatch import coupled
from anybatch.integrations.lightning import FullBatch
from anybatch.tools.exactness import error_of
from benchmarks.integrations.lightning.theirs import Module, fit
from benchmarks.integrations.problems import (
    BATCH,
    MICRO_BATCH,
    PROBLEMS,
    Problem,
    gradients,
    made,
    truth,
)

WAYS = ("accumulated", "anybatch")


class Watching(pl.Callback):  # type: ignore[misc]
    """Keeps the gradient of the only step."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Keep them."""
        del trainer, optimizer
        self.gradients = gradients(pl_module.body)


def error(problem: Problem, way: str, seed: int) -> float:
    """The worst error of the gradients of a step, by the measure of Law 1."""
    processes, watching = int(os.environ.get("WORLD_SIZE", "1")), Watching()
    rows = problem.rows(problem.samples * processes, seed)
    meets = way == "anybatch" and problem.total is None
    module = Module(made(problem), coupled(problem.loss) if meets else problem.loss, 0.0)
    if way == "accumulated":
        steps = BATCH // MICRO_BATCH
        fit(module, rows, MICRO_BATCH, accumulate_grad_batches=steps, callbacks=[watching])
    else:
        fit(module, rows, BATCH, callbacks=[FullBatch(micro_batch=MICRO_BATCH), watching])
    return float(max(error_of(watching.gradients, truth(problem, rows)).values()))


def errors(seeds: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """The worst of several seeds, by problem and way."""
    torch.set_num_threads(1)
    return {
        problem.name: {way: max(error(problem, way, seed) for seed in seeds) for way in WAYS}
        for problem in PROBLEMS
    }
