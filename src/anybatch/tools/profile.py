"""`profile`: a real training loop, a few steps of it, and where its time goes.

The loop is run as it would be, with its loader, its engine and its optimizer
(`anybatch.tools.watched`), and all state is restored.

Source: Zou et al. (the guide), sections 2.1 and 3.2: "profile the training program for a couple of
epochs".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from inspect import signature
from math import inf
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from anybatch.core import accelerator
from anybatch.core.modules import Modules, parameters
from anybatch.core.pace import Pace
from anybatch.core.prepared import bare
from anybatch.distributed.group import group_of
from anybatch.engine.engine import Engine
from anybatch.engine.rank_session import several
from anybatch.errors import NotYetError
from anybatch.execution.as_it_was import as_it_was
from anybatch.planner.probe import finish, median_seconds
from anybatch.tools.loaders import Clock, generators_of, length_of
from anybatch.tools.profiled import Profile, profiled
from anybatch.tools.remedies import Conditions
from anybatch.tools.watched import SYSTEM, WatchedLoop


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
    setup = engine._inputs
    modules = setup.modules()
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


def pair(batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets of a mini-batch as loaders yield it."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    return batch, None


def step_seconds(
    engine: Engine, optimizer: torch.optim.Optimizer | None, inputs: Any, targets: Any
) -> float:
    """Run a mini-batch as an engine's plan has it, a few times, and return its seconds.

    Args:
        engine: with a plan.
        optimizer: whose parameters are restored; None where there is none.
        inputs: of the mini-batch.
        targets: of the mini-batch.
    """
    setup = engine._inputs

    def once() -> float:
        start = perf_counter()
        engine.backward(inputs, targets)
        finish(setup.device)
        return perf_counter() - start

    modules = setup.modules()
    with as_it_was(modules, trained(modules, optimizer), None):  # it does not step
        once()  # kernels are chosen, and what leaves is recorded
        return median_seconds(once)


def trained(modules: Modules, optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """Return every parameter that a step may change, once: trained, or the optimizer's."""
    groups = [] if optimizer is None else optimizer.param_groups
    every = [p for p in parameters(modules) if p.requires_grad]
    every += [p for group in groups for p in group["params"]]
    return list({id(p): p for p in every}.values())


def pace_of(found: Profile, loader: Iterable[Any]) -> Pace:
    """Return how fast a training is of which some steps have been profiled.

    Args:
        found: of the steps.
        loader: of the mini-batches, which may know how many an epoch has.
    """
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
