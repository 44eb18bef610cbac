"""Remedies of the guide for a training loop that waits, each with its condition.

Advice without a measurement is folklore ("use more workers"). Here every remedy names the figures
that call for it and how much of a step it could bring at most, and none is given below a few
percent. Remedies that the guide gives and that hold by construction are not repeated: batches are
copied page-locked and double-buffered, and ranks sum their gradients among themselves.

Source: Zou et al. (the guide), sections 3.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import NamedTuple

from anybatch.core.units import show_bytes, show_samples
from anybatch.tools.stages import COMPUTE, EXCHANGE, LOAD, PREPARE, TRANSFER, UPDATE, LoopStage

WORTH = 0.05
"""Share of a step below which nothing is advised."""

BURST = 3.0
"""Times the median, from which on a wait for a batch is a burst."""


@dataclass(frozen=True)
class Conditions:
    """Conditions of a remedy other than seconds: hardware, loader, optimizer and budget.

    Attributes:
        cores: CPUs that this process may use.
        workers: processes that load; None where the loader is no DataLoader.
        cuda: the model is on a GPU.
        persistent: they live longer than an epoch.
        pinned: the loader hands out page-locked memory.
        fused: the optimizer updates in one kernel, or has no such kernel.
        ranks: processes that train together.
        gradient_bytes: that they sum in a step.
        budget: bytes a step may hold; None where nothing was planned.
        times: samples in a micro-batch -> seconds of a step, of those that fit and were timed.
        micro_batch: samples, as is run.
        samples: of a mini-batch.
    """

    cores: int
    workers: int | None = None
    persistent: bool = False
    cuda: bool = False
    pinned: bool = False
    fused: bool = True
    ranks: int = 1
    gradient_bytes: int = 0
    budget: int | None = None
    times: tuple[tuple[int, float], ...] = ()
    micro_batch: int = 0
    samples: int = 0


class Waits(NamedTuple):
    """Seconds that steps have waited for their mini-batches.

    Attributes:
        first: of the first ones of an epoch.
        later: of the others.
    """

    first: tuple[float, ...]
    later: tuple[float, ...]


@dataclass(frozen=True)
class Remedy:
    """Advice, with the figures behind it and its largest gain.

    Attributes:
        what: the remedy, as an imperative.
        because: the figures that call for it.
        gain: share of a step's seconds, 0 to 1, that it can save at most.
    """

    what: str
    because: str
    gain: float

    def __str__(self) -> str:
        return f"{self.what}: {self.because} (at most {self.gain:.0%} of a step)"


def remedies(
    stages: Mapping[str, LoopStage], seconds: float, waits: Waits, conditions: Conditions
) -> tuple[Remedy, ...]:
    """Return the remedies that make the loop faster, the largest gain first.

    Args:
        stages: total and visible seconds of each of the seven steps.
        seconds: of a step, mean.
        waits: of each step for its mini-batch.
        conditions: of the loop.
    """
    if seconds <= 0:
        return ()
    every = [
        *_loading(stages, seconds, waits, conditions),
        *_transfer(stages[TRANSFER], conditions),
        *_update(stages[UPDATE], conditions),
        *_exchange(stages[EXCHANGE], stages[COMPUTE], conditions),
        *_memory(stages[COMPUTE], conditions),
    ]
    worth = [one for one in every if one.gain >= WORTH]
    return tuple(sorted(worth, key=lambda one: -one.gain))


def _loading(
    stages: Mapping[str, LoopStage], seconds: float, waits: Waits, now: Conditions
) -> Iterator[Remedy]:
    load, prepare = stages[LOAD], stages[PREPARE]
    shows, takes = load.share + prepare.share, load.takes + prepare.takes
    rest = seconds - load.shows - prepare.shows
    figures = (
        f"a mini-batch takes {takes:.3g} s to load and prepare, the rest of a step {rest:.3g} s"
    )
    if now.workers is None:
        yield Remedy(
            "load mini-batches ahead, such as by torch.utils.data.DataLoader(num_workers=...)",
            figures,
            shows,
        )
        return
    needed = ceil(takes / rest) if rest > 0 else now.cores + 1
    busy = 0 if now.cuda else 1
    if now.workers < needed <= max(now.cores - busy, 0):
        yield Remedy(
            f"num_workers={needed} in the DataLoader", f"{figures}, and {now.workers} work", shows
        )
    elif now.workers < needed:
        what = "a faster disk, or files that hold many samples in the order they are read"
        if prepare.takes >= load.takes:
            what = "prepare samples once and keep them, or make them smaller"
        yield Remedy(what, f"{figures}: {needed} workers, and there are {now.cores} cores", shows)
    else:
        enough = f"{figures}, so workers={now.workers} is enough, but "
        yield from _late(waits, seconds, enough, persistent=now.persistent)


def _late(waits: Waits, seconds: float, enough: str, *, persistent: bool) -> Iterator[Remedy]:
    """Yield remedies for late mini-batches where workers are fast enough."""
    usual = median(waits.later or waits.first)
    every = seconds * (len(waits.first) + len(waits.later))
    if waits.first and not persistent:
        yield Remedy(
            "persistent_workers=True in the DataLoader",
            f"{enough}the first mini-batch of an epoch comes after {median(waits.first):.3g} s",
            sum(max(0.0, wait - usual) for wait in waits.first) / every,
        )
    if waits.later and max(waits.later) > BURST * usual:
        yield Remedy(
            "a larger prefetch_factor in the DataLoader",
            f"{enough}some come late: {max(waits.later):.3g} s where the median is {usual:.3g} s",
            sum(wait - usual for wait in waits.later if wait > BURST * usual) / every,
        )


def _transfer(stage: LoopStage, now: Conditions) -> Iterator[Remedy]:
    if now.cuda and not now.pinned:
        yield Remedy(
            "pin_memory=True in the DataLoader",
            f"copies to the GPU take {stage.takes:.3g} s a step, from memory that may be paged out",
            stage.share,
        )


def _update(stage: LoopStage, now: Conditions) -> Iterator[Remedy]:
    if not now.fused:
        yield Remedy(
            "fused=True in the optimizer",
            f"it takes {stage.shows:.3g} s a step, parameter by parameter or list by list",
            stage.share,
        )


def _exchange(stage: LoopStage, computing: LoopStage, now: Conditions) -> Iterator[Remedy]:
    if now.ranks > 1:
        yield Remedy(
            "a larger mini-batch, so that ranks sum gradients less often, or a faster link",
            f"{now.ranks} ranks sum {show_bytes(now.gradient_bytes)} in {stage.shows:.3g} s, and "
            f"compute {computing.shows:.3g} s between",
            stage.share,
        )


def _memory(stage: LoopStage, now: Conditions) -> Iterator[Remedy]:
    """Advise more memory where the largest micro-batch that fits is the fastest by far."""
    times = sorted(now.times)
    if now.budget is None or len(times) < 2 or times[-1][0] != now.micro_batch:
        return
    if now.micro_batch >= now.samples:
        return
    (below, slower), (n, fastest) = times[-2:]
    gain = 1 - fastest / slower
    yield Remedy(
        "more memory for larger micro-batches",
        f"the largest that was timed within {show_bytes(now.budget)} is the fastest: a step takes "
        f"{fastest:.3g} s in micro-batches of {show_samples(n)}, {slower:.3g} s with {below}",
        gain * stage.share,
    )
