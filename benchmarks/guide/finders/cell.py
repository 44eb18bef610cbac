"""Fifty steps within one budget, by an engine and by two finders, as JSON: a process of its own."""

import json
import logging
import sys
import warnings
from collections.abc import Callable
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from accelerate.utils import find_executable_batch_size
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.tuner.tuning import Tuner
from torch import Tensor
from torch.utils.data import DataLoader

from anybatch.core.modules import call_model
from anybatch.loss.base import loss_inside
from anybatch.memory.meter import Meter
from benchmarks.guide.first_step.cell import SEED, edges, engine_of, made, steps
from benchmarks.guide.first_step.networks import Subject
from benchmarks.mbs.problem import rows

LATER = 5
"""Steps of a loop, whose median but for the first is a later step."""
NO_MEMORY = "DefaultCPUAllocator: can't allocate memory: these rows would pass the budget"
"""The words by which both finders know that memory ran out on a host."""


class Loop:
    """Training by hand: a batch in micro-batches of one size, each with its share of the loss."""

    def __init__(self, subject: Subject, budget: int) -> None:
        self.subject, self._budget = subject, budget
        self._fit: dict[int, bool] = {}

    def loss(self, n: int) -> Tensor:
        """Return the loss of the first n rows."""
        subject, first = self.subject, torch.arange(n)
        outputs = call_model(subject.model, rows(subject.inputs, first))
        if subject.loss_fn is None:
            return loss_inside(outputs)
        targets = [] if subject.targets is None else [rows(subject.targets, first)]
        return subject.loss_fn(outputs, *targets)

    def fits(self, n: int) -> bool:
        """Say whether a second micro-batch of n rows holds no more than the budget."""
        if n not in self._fit:
            model = self.subject.model
            owners = {"parameters": model.parameters(), "buffers": model.buffers()}
            with Meter(torch.device("cpu"), owners) as meter:
                for _ in range(2):
                    self.loss(n).backward()  # type: ignore[no-untyped-call]
            model.zero_grad()
            self._fit[n] = meter.peak <= self._budget
        return self._fit[n]

    def refuse(self, n: int) -> None:
        """Fail as an allocator does that has only the budget; the time of such a trial is left out.

        Raises:
            RuntimeError: n rows hold more.
        """
        if not self.fits(n):
            raise RuntimeError(NO_MEMORY)

    def later(self, n: int) -> float:
        """Return the seconds of a step in micro-batches of n rows."""
        subject, seconds = self.subject, list[float]()
        optimizer = torch.optim.SGD(subject.model.parameters(), lr=1e-3)
        sizes = [n] * (subject.size // n) + [subject.size % n] * (subject.size % n > 0)
        for _ in range(LATER):
            start = perf_counter()
            optimizer.zero_grad()
            for size in sizes:
                (self.loss(size) * (size / subject.size)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            seconds.append(perf_counter() - start)
        return median(seconds[1:])


class Searched(LightningModule):  # type: ignore[misc]
    """The loop as Lightning's finder wants it."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.model, self.batch_size, self._loop = loop.subject.model, 2, loop
        self.refused = 0.0

    def train_dataloader(self) -> DataLoader[int]:
        """Return the numbers of the rows."""
        every: Any = range(self._loop.subject.size)
        return DataLoader(every, self.batch_size, collate_fn=torch.tensor)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        """Return the loss of so many rows."""
        del index
        start = perf_counter()
        try:
            self._loop.refuse(len(batch))
        finally:  # what it takes to know that is no part of the search
            self.refused += perf_counter() - start
        return self._loop.loss(len(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of the loop."""
        return torch.optim.SGD(self.model.parameters(), lr=1e-3)


def by_lightning(loop: Loop) -> tuple[float, int]:
    """Return the seconds of a search by `Tuner.scale_batch_size`, and the size it has found."""
    with TemporaryDirectory() as folder:
        start = perf_counter()
        options: Any = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        trainer = Trainer(accelerator="cpu", max_epochs=1, default_root_dir=folder, **options)
        module = Searched(loop)
        size = Tuner(trainer).scale_batch_size(module)
        return perf_counter() - start - module.refused, size or 1


def by_accelerate(loop: Loop) -> tuple[float, int]:
    """Return the seconds of a search by `find_executable_batch_size`, and the size it has found."""
    refused = 0.0

    def run(batch_size: int) -> int:
        nonlocal refused
        start = perf_counter()
        try:
            loop.refuse(batch_size)
        finally:
            refused += perf_counter() - start
        return batch_size

    start = perf_counter()
    size = find_executable_batch_size(run, starting_batch_size=loop.subject.size)()
    return perf_counter() - start - refused, size


FINDERS: dict[str, Callable[[Loop], tuple[float, int]]] = {
    "Lightning": by_lightning,
    "Accelerate": by_accelerate,
}


def measured(name: str, budget: int, count: int) -> dict[str, Any]:
    """Return the seconds of so many steps, for each; those of a search are among them."""
    subject = made(name)
    engine = engine_of(subject, memory=budget, cache=None)
    seconds, _ = steps(engine, subject, count)
    assert engine.last is not None
    ours = {"total": sum(seconds), "size": engine.last.micro_batch, "search": None}
    found: dict[str, Any] = {"anybatch": ours}
    for finder, search in FINDERS.items():
        loop = Loop(made(name), budget)
        try:
            searched, size = search(loop)
        except RuntimeError as error:  # no size fits, or none that it tries
            found[finder] = {"error": str(error)[:100]}
            continue
        later = loop.later(size)
        total = searched + count * later
        found[finder] = {"total": total, "size": size, "search": searched}
    return {"budget": budget, **found}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    torch.manual_seed(SEED)
    network, share, count = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    least, most = edges(network)
    print(json.dumps(measured(network, round(least + share * (most - least)), count)))
