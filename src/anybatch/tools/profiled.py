"""Profile of a training loop: seconds of the guide's seven steps, and the part not hidden.

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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from anybatch.core.units import show_samples
from anybatch.tools.remedies import Conditions, Remedy, Waits, remedies
from anybatch.tools.stages import COMPUTE, LOAD, PREPARE, STAGES, LoopStage

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


@dataclass(frozen=True)
class Profile:
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
