"""How far a step's gradient is from that of its batch, undivided, in float64: theirs and ours."""

import os
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from anybatch import LossError
from anybatch.exactness import error_of
from anybatch.integrations.lightning import WholeBatch
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


def error(problem: Problem, way: str, seed: int) -> float | str:
    """The worst error of the gradients of a step, by the measure of Law 1."""
    processes, watching = int(os.environ.get("WORLD_SIZE", "1")), Watching()
    rows = problem.rows(problem.samples * processes, seed)
    module = Module(made(problem), problem.loss, 0.0)
    if way == "accumulated":
        steps = BATCH // MICRO_BATCH
        fit(module, rows, MICRO_BATCH, accumulate_grad_batches=steps, callbacks=[watching])
    else:
        whole = WholeBatch(micro_batch=MICRO_BATCH)
        try:
            fit(module, rows, BATCH, callbacks=[whole, watching])
        except LossError:
            return "refused"
    return float(max(error_of(watching.gradients, truth(problem, rows)).values()))


def errors(seeds: tuple[int, ...]) -> dict[str, dict[str, float | str]]:
    """The worst of several seeds, by problem and way."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, float | str]] = {}
    for problem in PROBLEMS:
        found[problem.name] = {way: _worst(problem, way, seeds) for way in WAYS}
    return found


def _worst(problem: Problem, way: str, seeds: tuple[int, ...]) -> float | str:
    every = [error(problem, way, seed) for seed in seeds]
    said = [one for one in every if isinstance(one, str)]
    return said[0] if said else max(one for one in every if not isinstance(one, str))
