"""The trainings of the table as data, and one of them in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from time import time

import torch

from benchmarks.agbn.accuracy.ghost import ghosted
from benchmarks.agbn.images import Images, read
from benchmarks.agbn.training import Outcome, Recipe, initial, train, undivided_step

GLOBAL = 1  # devices: BatchNorm over the whole batch is that of one device


@dataclass(frozen=True)
class Job:
    """One training: over how many devices its BatchNorm is split, 1 for the global one."""

    devices: int
    seed: int
    recipe: Recipe


@dataclass(frozen=True)
class Table:
    """What is trained: every batch size, globally and on every number of devices."""

    batches: tuple[int, ...]
    devices: tuple[int, ...]
    seeds: tuple[int, ...]
    epochs: int
    rise: int
    samples: int = 2000
    tests: int = 1000

    def recipe(self, batch: int) -> Recipe:
        """Return the recipe of a batch size."""
        sizes = self.samples, self.tests
        return Recipe(batch, self.epochs, self.rise, *sizes, look=self.epochs)

    def jobs(self) -> list[Job]:
        """Return all trainings, seed by seed, so that a table that was stopped has whole seeds."""
        return [
            Job(devices, seed, self.recipe(batch))
            for seed in self.seeds
            for batch in self.batches
            for devices in (GLOBAL, *self.devices)
        ]


@cache
def _images(folder: Path, samples: int, tests: int) -> tuple[Images, Images]:
    return read(folder, samples, tests)


def trained(job: Job, folder: Path) -> Outcome:
    """Train once, and say which training it was."""
    torch.set_num_threads(1)
    data = _images(folder, job.recipe.samples, job.recipe.tests)
    model = initial(job.seed)
    if job.devices != GLOBAL:
        model = ghosted(model, job.devices)
    start = time()
    found = train(model, undivided_step(model), job.recipe, data, job.seed)
    said = {"batch": job.recipe.batch, "devices": job.devices, "seed": job.seed}
    return said | {"from": start, "to": time()} | found


def run_all(jobs: list[Job], folder: Path, processes: int) -> Iterator[tuple[Job, Outcome]]:
    """Yield each job with its outcome as it ends, `processes` at a time."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(trained, job, folder): job for job in jobs}
        try:
            for done in as_completed(futures):
                yield futures[done], done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
