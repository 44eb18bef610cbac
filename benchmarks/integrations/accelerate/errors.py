"""How far a step's gradient is from that of its batch, undivided, in float64: theirs and ours."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState

from anybatch import Engine
from anybatch.tools.exactness import error_of
from benchmarks.integrations.accelerate.theirs import accumulated, counted, loader_of
from benchmarks.integrations.problems import (
    BATCH,
    MICRO_BATCH,
    PROBLEMS,
    Problem,
    Rows,
    gradients,
    made,
    truth,
)

Way = Callable[[Any, Problem, Rows, Any], None]
STEPS = BATCH // MICRO_BATCH


def by_engine(accelerator: Any, problem: Problem, rows: Rows, model: Any) -> None:
    """Leave the gradient of a step by an engine."""
    model, loader = accelerator.prepare(model, loader_of(rows, BATCH))
    engine = Engine(model, problem.loss, micro_batch=MICRO_BATCH)
    for x, y in loader:
        engine.backward(x, y)


WAYS: dict[str, tuple[Way, int]] = {
    "accumulated": (accumulated, STEPS),
    "counted": (counted, STEPS),
    "anybatch": (by_engine, 1),
}
"""The loop, and the steps that accelerate is told to accumulate."""


@contextmanager
def accelerated(steps: int) -> Iterator[Any]:
    """Make an Accelerator as if it were the first of the process; no rows are repeated."""
    config = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, dataloader_config=config)
    try:
        yield accelerator
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def error(problem: Problem, way: str, seed: int) -> float | str:
    """The worst error of the gradients of a step, by the measure of Law 1."""
    loop, steps = WAYS[way]
    if way == "counted" and problem.total is None:
        return "is no sum"
    model = made(problem)
    with accelerated(steps) as accelerator:
        rows = problem.rows(problem.samples * accelerator.num_processes, seed)
        loop(accelerator, problem, rows, model)
    return float(max(error_of(gradients(model), truth(problem, rows)).values()))


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
