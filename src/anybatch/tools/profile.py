"""`profile`: a real training loop, a few steps of it, and where its time goes.

The loop runs as it would, with its loader, its engine and its optimizer; all state is restored.

Source: Zou et al. (the guide), sections 2.1 and 3.2: "profile the training program for a couple of
epochs".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from inspect import signature
from math import inf
from statistics import median
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset, IterableDataset

from anybatch.core import accelerator, pytree
from anybatch.core.accelerator import finish
from anybatch.core.batch import count_micro_batches
from anybatch.core.modules import Modules, parameters
from anybatch.core.optimizers import bare
from anybatch.core.plan_sections import Pace
from anybatch.distributed.process_group import group_of
from anybatch.engine.engine import Engine
from anybatch.engine.rank_session import several
from anybatch.errors import NotYetError
from anybatch.execution.attempts import as_it_was
from anybatch.execution.signature import bytes_of
from anybatch.tools.profiled import (
    COMPUTE,
    EXCHANGE,
    LOAD,
    PREPARE,
    TRANSFER,
    UPDATE,
    Conditions,
    Passed,
    Profile,
    profiled,
)

# Facts about a user's data loader: length, RNG generators, a worker's seconds a mini-batch.
#
# Loading that workers hide is measured in a worker: opened files belong to the process that has
# opened them, and a data set read here before its workers are forked would pass them its own.

REPEATS = 3
"""Measurements of which the median counts: loaded mini-batches, sums of gradients, steps."""


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
    """Return one worker's seconds for a mini-batch; None without workers, or if it loads none."""
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


# A training loop that is watched: the host's clock is read between its parts.
#
# Loading that workers hide is measured outside of the loop, in a worker: its time on a core is
# preparation, the rest is waiting for the storage.
#
#    wait for a mini-batch │ zero_grad, backward     │ step
#    load, prepare         │ host to device, compute │ parameter update      each until it has ended
#                          │ and what ranks exchange │
#
# Source: Zou et al. (the guide), section 2.1, Figure 1.

WARM = 2
"""Steps before the first that counts: the engine plans, workers start, kernels are chosen."""

SYSTEM = Clock(perf_counter, thread_time)


class WatchedLoop:
    """Training loop with the host's clock read between its parts.

    Args:
        loader: as for `anybatch.profile`, and so are `engine`, `optimizer`, `split` and `clock`.
        engine: runs mini-batches.
        optimizer: steps after each.
        split: mini-batch -> inputs, targets.
        clock: seconds.

    Attributes:
        exchanged: bytes of gradients that ranks sum in a step; 0 until it has passed.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        split: Callable[[Any], tuple[Any, Any]],
        clock: Clock,
    ) -> None:
        self._loader, self._engine, self._optimizer = loader, engine, optimizer
        self._split, self._clock = split, clock
        self._device = engine._inputs.device
        self._group = group_of() if several() else None
        self.exchanged = 0

    def pass_through(
        self, steps: int, progress: Callable[[int, int], None], enough: float
    ) -> list[Passed]:
        """Run the steps that do not count, then those that do; one that plans is none of them.

        Args:
            steps: that count, at most.
            progress: called with the steps done and all of them.
            enough: seconds after which no further step is begun.
        """
        hidden, wall = hidden_of(self._loader, self._clock), self._clock.wall
        batches = again_and_again(self._loader)
        for _ in range(WARM):
            self._step(batches, hidden, None)
        begun = wall()
        for _ in range(queue_of(self._loader)):  # what lay ready is no measure of a loader
            if wall() - begun >= enough:
                break
            self._step(batches, hidden, None)
        takes, spent, planned = self._exchange_seconds(), 0.0, 0
        found = list[Passed]()
        while len(found) < steps and (not found or spent < enough):
            before, begun = self._engine._decisions, wall()
            passed = self._step(batches, hidden, takes)
            single_process = (
                self._group is None
            )  # ranks must go on together, and may not all have planned
            if single_process and self._engine._decisions != before and planned < steps:
                planned += 1  # a mini-batch of another signature, as the last one of an epoch is
                continue
            spent += wall() - begun
            found.append(passed)
            progress(len(found), steps)
        return found

    def _step(
        self, batches: Iterator[tuple[bool, Any]], hidden: Loading | None, exchange: float | None
    ) -> Passed:
        wall, core = self._clock
        start, busy = wall(), core()
        first, batch = next(batches)
        inputs, targets = self._split(batch)
        busy, loaded = core() - busy, wall()
        waited = 0.0 if self._group is None else self._group.waited
        self._optimizer.zero_grad()
        self._engine.backward(inputs, targets)
        finish(self._device)
        computed = wall()
        if self._group is not None:
            waited = self._group.waited - waited
        self._optimizer.step()
        finish(self._device)
        ended = wall()
        shows = _loading(loaded - start, busy, hidden)
        takes = {} if hidden is None else {LOAD: hidden.load, PREPARE: hidden.prepare}
        if not accelerator.of(
            self._device
        ).host:  # its copies and its sums are waited for by no host
            shows[TRANSFER], takes[TRANSFER] = self._transfer(inputs, targets)
            waited = exchange or 0.0
        shows[EXCHANGE], takes[EXCHANGE] = waited, exchange or 0.0
        used = shows.get(TRANSFER, 0.0) + waited
        shows |= {COMPUTE: max(0.0, computed - loaded - used), UPDATE: ended - computed}
        last = self._engine.last
        return Passed(0 if last is None else last.samples, shows, takes, first)

    def _transfer(self, inputs: Any, targets: Any) -> tuple[float, float]:
        """Return the seconds of copies to the GPU: of the first micro-batch (shown), and of all.

        The others are copied while the one before them computes.
        """
        last = self._engine.last
        assert last is not None
        n, wall = last.micro_batch, self._clock.wall
        rows = [t for _, t in pytree.tensors((inputs, targets)) if t.dim()]
        size = max((len(t) for t in rows), default=0)
        start = wall()
        for tensor in rows:
            tensor[:n].to(self._device)
        finish(self._device)
        first = wall() - start
        return first, first * count_micro_batches(size, n)

    def _exchange_seconds(self) -> float | None:
        """Return the seconds in which ranks sum as many bytes as the gradients have."""
        if self._group is None:
            return None
        parameters = [p for g in self._optimizer.param_groups for p in g["params"]]
        gradients = [p.grad for p in parameters if isinstance(p.grad, Tensor)]
        self.exchanged = sum(bytes_of(gradient) for gradient in gradients)
        flat = torch.zeros(max(1, self.exchanged // 4), device=self._group.device)
        times = []
        for _ in range(REPEATS):
            self._group.sum(torch.zeros(1))  # all are here
            finish(self._device)
            start = self._clock.wall()
            self._group.sum(flat)
            finish(self._device)
            times.append(self._clock.wall() - start)
        return median(times)


def _loading(waited: float, busy: float, hidden: Loading | None) -> dict[str, float]:
    """Return the seconds of loading and of preparation in a wait for a mini-batch.

    With workers both are hidden by the same time, so the visible parts have the same ratio.
    """
    if hidden is None:
        prepare = min(busy, waited)
        return {LOAD: waited - prepare, PREPARE: prepare}
    every = hidden.load + hidden.prepare
    share = hidden.load / every if every else 0.0
    return {LOAD: share * waited, PREPARE: (1 - share) * waited}


def again_and_again(loader: Iterable[Any]) -> Iterator[tuple[bool, Any]]:
    """Yield mini-batches, epoch after epoch, and whether each is the first of one."""
    if iter(loader) is loader:
        raise ValueError(
            "loader must be one that can be started again, and it is an iterator, which ends: "
            "give the iterable it was made from"
        )
    while True:
        first = True
        for batch in loader:
            yield first, batch
            first = False
        if first:
            raise ValueError("loader must yield mini-batches, and it yields none")


def profile(
    loader: Iterable[Any],
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = 20,
    enough: float = inf,
    split: Callable[[Any], tuple[Any, Any]] | None = None,
    progress: Callable[[int, int], None] | None = None,
    clock: Clock = SYSTEM,
) -> Profile:
    """Run a few steps of a training loop, and return where the time goes; nothing is trained.

    Afterwards parameters, gradients, buffers, the optimizer's state and RNG states are as before.
    Copies are in host memory; copies of buffers, and of gradients that exist, are on the device.
    The engine keeps its new plan. Over ranks, all must call `profile`. Each stage ends before the
    next begins, so times do not show a GPU's overlap with the optimizer or the loader in Python.

    Args:
        loader: yields mini-batches; started again when it ends. If it has workers, one more reads
            some mini-batches, to measure their seconds.
        engine: runs them.
        optimizer: steps after each.
        steps: number of measured steps, after two that are not measured. Default 20.
        enough: seconds after which no further step begins; one is always measured. Over ranks it
            must be infinite, which is the default.
        split: mini-batch -> ``(inputs, targets)`` of `Engine.backward`. Default: a pair is these,
            any other mini-batch is inputs without targets.
        progress: called with the number of steps done and of all steps. Default None.
        clock: seconds. Default: the system's.

    Returns:
        Seconds that each of the seven stages takes and shows, R_O with its interval, and remedies.

    Raises:
        ValueError: `steps` is less than 1, `enough` is finite over ranks, or `loader` yields
            nothing.
        NotYetError: the optimizer's state is offloaded, its step needs a closure, or a parameter is
            lazy.
        AnybatchError: `Engine.backward` would raise it.

    Example:
        >>> print(anybatch.profile(loader, engine, optimizer))

    Source: Zou et al. (the guide), section 2.1, Figure 1; section 3.2.
    """
    optimizer = _profiled_optimizer(engine, optimizer, steps, enough)
    modules = engine._inputs.modules()
    leaves = trained(modules, optimizer)
    if any(is_lazy(leaf) for leaf in leaves):
        raise NotYetError(
            "parameters must have data before a loop is profiled, since all state is restored, "
            "and some are still lazy: run the model on one sample first"
        )
    with _sampled_as_before(loader), as_it_was(modules, leaves, optimizer):
        watched = WatchedLoop(loader, engine, optimizer, split or pair, clock)
        passed = watched.pass_through(steps, progress or (lambda _done, _all: None), enough)
    return profiled(passed, _conditions(loader, engine, optimizer, watched.exchanged))


def _profiled_optimizer(
    engine: Engine, optimizer: torch.optim.Optimizer, steps: int, enough: float
) -> torch.optim.Optimizer:
    """Return the optimizer without wrappers; raise where the loop cannot be profiled with it."""
    if type(steps) is not int or steps < 1:
        raise ValueError(f"steps must be an integer of at least 1, and it is {steps!r}")
    if enough != inf and several():
        raise ValueError(
            f"enough must be infinite over ranks, whose clocks differ, and it is {enough!r}: "
            "give steps"
        )
    if engine.states is not None:
        raise NotYetError(
            "a loop cannot be profiled today with offloaded optimizer state: profile with a plan "
            "without states"
        )
    optimizer = bare(optimizer)
    step = signature(optimizer.step).parameters.get("closure")
    if step is not None and step.default is step.empty:
        raise NotYetError(
            f"a loop is profiled that calls optimizer.step() today, and {type(optimizer).__name__} "
            "needs a closure: profile with another optimizer"
        )
    return optimizer


def pair(batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets of a mini-batch as loaders yield it."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    return batch, None


def step_seconds(
    engine: Engine, optimizer: torch.optim.Optimizer | None, inputs: Any, targets: Any
) -> float:
    """Run a mini-batch as an engine's plan has it, a few times, and return its seconds."""
    setup = engine._inputs

    def once() -> float:
        start = perf_counter()
        engine.backward(inputs, targets)
        finish(setup.device)
        return perf_counter() - start

    modules = setup.modules()
    with as_it_was(modules, trained(modules, optimizer), None):  # it does not step
        once()  # kernels are chosen, and what leaves is recorded
        return median(once() for _ in range(REPEATS))


def trained(modules: Modules, optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """Return every parameter that a step may change, once: trained, or the optimizer's."""
    groups = [] if optimizer is None else optimizer.param_groups
    every = [p for p in parameters(modules) if p.requires_grad]
    every += [p for group in groups for p in group["params"]]
    return list({id(p): p for p in every}.values())


def pace_of(found: Profile, loader: Iterable[Any]) -> Pace:
    """Return how fast a training is of which some steps have been profiled."""
    return Pace(found.seconds, found.spread, found.steps, found.overhead, length_of(loader))


@contextmanager
def _sampled_as_before(loader: Iterable[Any]) -> Iterator[None]:
    """Restore the RNG state of a loader and its samplers after the body."""
    states = [(generator, generator.get_state()) for generator in generators_of(loader)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def _conditions(
    loader: Iterable[Any], engine: Engine, optimizer: torch.optim.Optimizer, exchanged: int
) -> Conditions:
    plan, last = engine.plan, engine.last
    assert last is not None
    memory = None if plan is None else plan.memory
    timed = () if memory is None else memory.candidates
    stays = [c for c in timed if c.seconds is not None and not c.offloaded]
    data = loader if isinstance(loader, DataLoader) else None
    options, there = optimizer.defaults, accelerator.of(engine._inputs.device)
    return Conditions(
        cores=_cores(),
        workers=None if data is None else data.num_workers,
        cuda=not there.host,
        persistent=data is not None and data.persistent_workers,
        pinned=not there.facts.pins or (data is not None and data.pin_memory),
        fused="fused" not in options or bool(options["fused"]),
        ranks=group_of().size if several() else 1,
        gradient_bytes=exchanged,
        budget=None if memory is None else memory.budget,
        times=tuple((c.micro_batch, c.seconds) for c in stays if c.seconds is not None),
        micro_batch=last.micro_batch,
        samples=last.samples,
    )


def _cores() -> int:
    """Return the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
