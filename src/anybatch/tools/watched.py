"""A training loop that is watched: the host's clock is read between its parts.

Loading that workers hide is measured outside of the loop, in a worker: its time on a core is
preparation, the rest is waiting for the storage.

    wait for a mini-batch │ zero_grad, backward     │ step
    load, prepare         │ host to device, compute │ parameter update      each until it has ended
                          │ and what ranks exchange │

Source: Zou et al. (the guide), section 2.1, Figure 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor

from anybatch.core import accelerator, tree
from anybatch.core.batch import count_micro_batches
from anybatch.distributed.group import group_of
from anybatch.engine.engine import Engine
from anybatch.engine.rank_session import several
from anybatch.execution.signature import bytes_of
from anybatch.planner.probe import finish
from anybatch.tools.loaders import REPEATS, Clock, Loading, hidden_of, queue_of
from anybatch.tools.profiled import Passed
from anybatch.tools.stages import COMPUTE, EXCHANGE, LOAD, PREPARE, TRANSFER, UPDATE

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
        rows = [t for _, t in tree.tensors((inputs, targets)) if t.dim()]
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
    """Yield mini-batches, epoch after epoch, and whether each is the first of one.

    Raises:
        ValueError: there are none, or it can be passed through once only.
    """
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
