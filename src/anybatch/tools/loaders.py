"""Facts about a user's data loader: length, RNG generators, a worker's seconds a mini-batch.

Loading that workers hide is measured in a worker: opened files belong to the process that has
opened them, and a data set read here before its workers are forked would pass them its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

REPEATS = 3
"""Measurements of which the median counts: loaded mini-batches, sums of gradients."""


class Clock(NamedTuple):
    """Seconds: of the wall, and of this thread on a core."""

    wall: Callable[[], float]
    core: Callable[[], float]


class Loading(NamedTuple):
    """Seconds of a mini-batch: waiting for the storage, and on a core."""

    load: float
    prepare: float


def length_of(loader: Any) -> int | None:
    """Return the mini-batches of an epoch; None where the loader does not say."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def queue_of(loader: Any) -> int:
    """Return how many mini-batches may lie ready, loaded by workers."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return 0
    return int(loader.num_workers * (loader.prefetch_factor or 2))


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that the loader and its samplers have for themselves."""
    sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    owners = loader, sampler, batches, getattr(batches, "sampler", None)
    found = [getattr(owner, "generator", None) for owner in owners]
    every = {id(one): one for one in found if isinstance(one, torch.Generator)}
    return list(every.values())


def hidden_of(loader: Any, clock: Clock) -> Loading | None:
    """Return one worker's seconds for a mini-batch; None without workers, or if it loads none.

    Args:
        loader: of the training.
        clock: is read in the worker.
    """
    if not queue_of(loader):
        return None
    try:
        rows = [one for one, _ in zip(_timed(loader, clock), range(REPEATS), strict=False)]
    except Exception:  # it needs what only its own workers have
        return None
    if not rows:
        return None
    walls, cores = zip(*rows, strict=True)
    wall, core = sorted(walls)[len(walls) // 2], sorted(cores)[len(cores) // 2]
    return Loading(max(0.0, wall - core), min(core, wall))


def _timed(loader: DataLoader[Any], clock: Clock) -> DataLoader[tuple[float, float]]:
    """Return a loader with one worker that yields its own seconds instead of mini-batches."""
    common: dict[str, Any] = {
        "num_workers": 1,
        "collate_fn": _Collated(loader.collate_fn, clock),
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
    }
    data = loader.dataset
    if isinstance(data, IterableDataset):
        return DataLoader(_Stream(data, clock), batch_size=loader.batch_size, **common)
    if loader.batch_sampler is None:
        return DataLoader(_Rows(data, clock), batch_size=None, sampler=loader.sampler, **common)
    return DataLoader(_Rows(data, clock), batch_sampler=loader.batch_sampler, **common)


class _Rows(Dataset[Any]):
    """Data set that returns each sample with the wall and core seconds of its loading."""

    def __init__(self, data: Any, clock: Clock) -> None:
        self._data, self._clock = data, clock

    def __getitem__(self, index: Any) -> Any:
        wall, core = self._clock.wall(), self._clock.core()
        one = self._data[index]
        return one, self._clock.wall() - wall, self._clock.core() - core


class _Stream(IterableDataset[Any]):
    """Stream that yields each sample with the wall and core seconds of its loading."""

    def __init__(self, data: Any, clock: Clock) -> None:
        self._data, self._clock = data, clock

    def __iter__(self) -> Iterator[Any]:
        rows = iter(self._data)
        while True:
            wall, core = self._clock.wall(), self._clock.core()
            try:
                one = next(rows)
            except StopIteration:
                return
            yield one, self._clock.wall() - wall, self._clock.core() - core


class _Collated:
    """Collates as the user's function does, and returns the seconds of all."""

    def __init__(self, collate: Callable[[Any], Any], clock: Clock) -> None:
        self._collate, self._clock = collate, clock

    def __call__(self, items: Any) -> tuple[float, float]:
        rows = items if isinstance(items, list) else [items]
        wall, core = self._clock.wall(), self._clock.core()
        self._collate([one for one, _, _ in rows] if isinstance(items, list) else items[0])
        wall, core = self._clock.wall() - wall, self._clock.core() - core
        return wall + sum(row[1] for row in rows), core + sum(row[2] for row in rows)
