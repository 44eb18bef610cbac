"""accelerate's own accumulation, as its documentation has it: two loops, each a step of a batch.

The first is that of the guide to gradient accumulation. The second is that guide's recipe for
losses over tokens: what counts is counted over the whole batch and all processes beforehand, and
each micro-batch's sum is divided by it, times what accelerate and DistributedDataParallel divide
by. Source: accelerate's documentation, "Performing gradient accumulation with Accelerate".
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.integrations.problems import MICRO_BATCH, Problem, Rows


def loader_of(rows: Rows, size: int) -> Any:
    return DataLoader(TensorDataset(*rows), batch_size=size)


def accumulated(accelerator: Any, problem: Problem, rows: Rows, model: Any) -> None:
    """Leave the gradient of a step by ``accelerator.accumulate``."""
    model, loader = accelerator.prepare(model, loader_of(rows, MICRO_BATCH))
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(problem.loss(model(x), y))


def counted(accelerator: Any, problem: Problem, rows: Rows, model: Any) -> None:
    """Leave the gradient of a step by the recipe that counts beforehand."""
    assert problem.total is not None
    model, loader = accelerator.prepare(model, loader_of(rows, MICRO_BATCH))
    batches = [*loader]
    here = sum((problem.counts(y) for _, y in batches), torch.tensor(0))
    items = accelerator.gather(here.reshape(1)).sum()
    steps, processes = accelerator.gradient_accumulation_steps, accelerator.num_processes
    for i, (x, y) in enumerate(batches):
        last = i == len(batches) - 1
        with accelerator.no_sync(model) if not last else nullcontext():
            loss = problem.total(model(x), y) * steps * processes / items
            accelerator.backward(loss)
