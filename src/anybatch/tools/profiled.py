"""Profile of a training loop: seconds of the guide's seven steps, and remedies for the rest.

A profiler lists kernels; a user wants to know what the loop waits for. Steps overlap: workers load
while the device computes, so what a step *takes* is not what it *costs*. Only what the loop waits
for counts as overhead, and only that limits what more GPUs can bring.

    takes   ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓  loading, by two workers
            ░░░░░░░░░░░░▓▓▓▓  hidden behind computing │ shows
    R_O = T_O / T_C           all that shows but computing, to computing

Source: Zou et al. (the guide), section 2.1, Figure 1, and section 3.2, Lemma 3.1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from statistics import median
from typing import NamedTuple

import numpy as np

from anybatch.core.plan import Printed
from anybatch.core.units import show_bytes, show_samples

RESAMPLED = 2000
"""Draws of the bootstrap."""
LEVEL = 0.95
"""Of the interval."""
FEW = 6
"""Steps below which no interval is stated: a resample of so few says too little."""


@dataclass(frozen=True)
class Passed:
    """Observed step of the loop: its samples, and its seconds by stage.

    Attributes:
        samples: of the mini-batch.
        shows: stage -> seconds that the loop waited for it; a stage that is not there took none.
        takes: stage -> seconds of work, wherever it was done, where that is more than shows.
        first: of an epoch.
    """

    samples: int
    shows: dict[str, float]
    takes: dict[str, float]
    first: bool = False


@dataclass(frozen=True, repr=False)
class Profile(Printed):
    """Profile of a training loop: seconds by stage, overhead and remedies.

    Attributes:
        stages: the seven stages in order.
        steps: number of measured steps.
        samples: samples of a mini-batch, median.
        seconds: seconds of a step, mean.
        spread: interval of that mean, computed like `interval`.
        overhead: R_O: seconds that the loop waits for all but computing, over those of computing.
        interval: interval of R_O, 95 %, by resampling the steps; of few steps it is too narrow.
        workers: processes that load while the step computes; 0 for none.
        remedies: changes that would lower the overhead, the largest gain first.
    """

    stages: tuple[LoopStage, ...]
    steps: int
    samples: int
    seconds: float
    spread: tuple[float, float]
    overhead: float
    interval: tuple[float, float]
    workers: int = 0
    remedies: tuple[Remedy, ...] = ()

    @property
    def bottleneck(self) -> LoopStage:
        """The stage with the largest share of the loop's time."""
        return max(self.stages, key=lambda one: one.share)

    def stage(self, name: str) -> LoopStage:
        """Return one of the stages.

        Args:
            name: name of the stage, as in the guide: "data loading", "computing" ...

        Raises:
            ValueError: no stage has that name.
        """
        for one in self.stages:
            if one.name == name:
                return one
        raise ValueError(f"a stage must be one of {STAGES}, and it is {name!r}")

    def __str__(self) -> str:
        rate = self.samples / self.seconds if self.seconds else 0.0
        low, high = self.interval
        between = f" ({low:.3g} to {high:.3g})" if self.steps >= FEW else ""
        rows = [
            f"  {number} {one.name:<20} {one.takes:>10.4g} {one.shows:>10.4g} {one.share:>7.1%}"
            for number, one in enumerate(self.stages, 1)
        ]
        first = self.bottleneck
        lines = [
            f"profile        {self.steps} steps of {show_samples(self.samples)}, "
            f"{self.seconds:.4g} s each, {rate:.4g} samples a second",
            f"    {'seconds a step':<20} {'takes':>10} {'shows':>10} {'share':>7}",
            *rows,
            f"  R_O          {self.overhead:.3g}{between}: what shows and is not computing, to "
            "computing",
            f"  bottleneck   {first.name}, {first.share:.1%} of the time",
            *(f"  remedy       {one}" for one in self.remedies),
        ]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the profile as a JSON object."""
        return json.dumps(asdict(self), indent=2)


def profiled(passed: Sequence[Passed], conditions: Conditions, *, seed: int = 0) -> Profile:
    """Return the profile of these steps.

    Args:
        passed: the measured steps, at least one.
        conditions: of the loop, for its remedies.
        seed: of the resampling. Default 0.

    Raises:
        ValueError: no step was measured.
    """
    if not passed:
        raise ValueError(
            "a profile needs at least one step, and none was measured: give more steps"
        )
    shows = np.array([[one.shows.get(name, 0.0) for name in STAGES] for one in passed])
    takes = np.array([[one.takes.get(name, 0.0) for name in STAGES] for one in passed])
    takes = np.maximum(takes, shows)
    draws = np.random.default_rng(seed).integers(len(shows), size=(RESAMPLED, len(shows)))
    every = max(float(shows.sum()), np.finfo(float).tiny)
    stages = tuple(
        LoopStage(
            name,
            takes=float(takes[:, column].mean()),
            shows=float(shows[:, column].mean()),
            share=float(shows[:, column].sum()) / every,
        )
        for column, name in enumerate(STAGES)
    )
    found = Profile(
        stages=stages,
        steps=len(passed),
        samples=int(np.median([one.samples for one in passed])),
        seconds=float(shows.sum(axis=1).mean()),
        spread=_bounds(shows.sum(axis=1)[draws].mean(axis=1)),
        overhead=float(_overhead(shows.sum(axis=0))),
        interval=_bounds(_overhead(shows[draws].sum(axis=1))),
        workers=conditions.workers or 0,
    )
    waited = [one.shows.get(LOAD, 0.0) + one.shows.get(PREPARE, 0.0) for one in passed]
    waits = Waits(
        tuple(w for w, one in zip(waited, passed, strict=True) if one.first),
        tuple(w for w, one in zip(waited, passed, strict=True) if not one.first),
    )
    by_name = {one.name: one for one in stages}
    return replace(found, remedies=remedies(by_name, found.seconds, waits, conditions))


def _bounds(found: np.ndarray) -> tuple[float, float]:
    """Return the interval of a statistic of resampled steps."""
    low, high = np.quantile(found, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _overhead(sums: np.ndarray) -> np.ndarray:
    """Return R_O of sums of seconds by stage, which are the last dimension."""
    computing = np.maximum(sums[..., STAGES.index(COMPUTE)], np.finfo(float).tiny)
    overhead: np.ndarray = (sums.sum(axis=-1) - computing) / computing
    return overhead


# Remedies of the guide for a training loop that waits, each with its condition.
#
# Advice without a measurement is folklore ("use more workers"). Here every remedy names the figures
# that call for it and how much of a step it could bring at most, and none is given below a few
# percent. Remedies that the guide gives and that hold by construction are not repeated: batches are
# copied page-locked and double-buffered, and ranks sum their gradients among themselves.
#
# Source: Zou et al. (the guide), sections 3.2 and 3.3.

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


# The seven steps of a mini-batch, by the guide's names.
#
# Source: Zou et al. (the guide), section 2.1, Figure 1.

REFRESH = "parameter refresh"
LOAD = "data loading"
PREPARE = "data preparation"
TRANSFER = "host to device"
COMPUTE = "computing"
UPDATE = "parameter update"
EXCHANGE = "distributed update"
STAGES = (REFRESH, LOAD, PREPARE, TRANSFER, COMPUTE, UPDATE, EXCHANGE)
"""In their order; all but `COMPUTE` are overhead where they are not hidden behind it."""


@dataclass(frozen=True)
class LoopStage:
    """Seconds of one of the seven steps.

    Attributes:
        name: one of `STAGES`.
        takes: mean seconds of work in a step, hidden or not.
        shows: mean seconds that the loop waits for it.
        share: of all the time of the loop, 0 to 1.
    """

    name: str
    takes: float
    shows: float
    share: float
