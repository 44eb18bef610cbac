"""Model of the seconds of a step on G GPUs: Lemma 3.1 with the overhead divided by its source.

The lemma has one constant overhead. In a real loop some of it divides, some is constant, some
grows, and some is hidden until computing is short enough to show it:

    T(G) = t_c(n / G) + T_serial + T_parallel / G + T_update + T_allreduce(G)     in the foreground
    or what hidden workers take for a mini-batch, if that is longer

    1 GPU    |cccccccccccccccccccccccc|s|pppp|u|        c computing     s, p loading that waits
    4 GPUs   |cccccccc|s|p|u|aaaa|                      u update        a summing of gradients
    hidden   |llllllllllll|                             l loading by workers

A mini-batch of n samples is divided among the GPUs; all wait for the largest share, n / G rounded
up. t_c is measured: a small share is computed less well than a large one. Summing is a ring, 2 (G -
1) messages of M / G bytes each.

With t_c(n) = b n, one serial overhead and nothing else this is the lemma.

Source: guide, Lemma 3.1, steps 1 to 7 of section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import log

from anybatch.tools.costs import Affine, GradientSum, Measured, Work
from anybatch.tools.gpus import Needed
from anybatch.tools.validation import ROUNDING, at_least, positive, positive_integer

WORTH = 0.05
"""The gain of speed by one more GPU, below which it is not worth it."""


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step by source.

    Attributes:
        compute: of the largest share of the mini-batch.
        work: of loading and the like that waits, divided as far as it can be.
        update: of the optimizer.
        summing: of gradients, as far as it is not hidden.
        waiting: for mini-batches that hidden workers have not loaded yet.
    """

    compute: float
    work: float
    update: float
    summing: float
    waiting: float

    @property
    def seconds(self) -> float:
        """Of all of it."""
        return self.compute + self.work + self.update + self.summing + self.waiting


@dataclass(frozen=True)
class Point:
    """One line of a scale-out table: GPUs, seconds of a step, speedup, and that over the GPUs."""

    gpus: int
    seconds: float
    speedup: float
    efficiency: float


@dataclass(frozen=True)
class Saturation:
    """Where more GPUs stop to pay.

    Attributes:
        worth: GPUs, after which no more of them gain 5 % of speed each. Even without any overhead
            that is at about 20.
        fastest: GPUs with which a step is fastest; the fewest of such.
    """

    worth: int
    fastest: int


@dataclass(frozen=True)
class Loop:
    """Training loop of one GPU, with a forecast of its seconds on more GPUs.

    Attributes:
        samples: n, in a mini-batch over all GPUs.
        compute: seconds of forward and backward by samples.
        work: seconds that a step waits for in addition to computing. Default none.
        hidden: seconds of workers that load while the step computes. Default none.
        update: seconds of the optimizer. Default 0.
        gradients: the bytes to sum, and the network. Default None: nothing.
    """

    samples: int
    compute: Affine | Measured
    work: Work = field(default_factory=Work)
    hidden: Work = field(default_factory=Work)
    update: float = 0.0
    gradients: GradientSum | None = None

    def __post_init__(self) -> None:
        positive_integer(samples=self.samples)
        at_least(0, update=self.update)
        positive(compute=self.compute.seconds(self.samples))

    def step(self, gpus: int) -> StepCosts:
        """Return where the seconds of a step on so many GPUs go."""
        positive_integer(gpus=gpus)
        compute = self.compute.seconds(-(-self.samples // gpus))
        work = self.work.seconds(gpus)
        summing = 0.0 if self.gradients is None else self.gradients.seconds(gpus, compute)
        foreground = compute + work + self.update + summing
        waiting = max(0.0, self.hidden.seconds(gpus) - foreground)
        return StepCosts(compute, work, self.update, summing, waiting)

    def seconds(self, gpus: int) -> float:
        """Return T(G), the seconds of a step."""
        return self.step(gpus).seconds

    def speedup(self, gpus: int) -> float:
        """Return T(1) / T(G)."""
        return self.seconds(1) / self.seconds(gpus)

    def efficiency(self, gpus: int) -> float:
        """Return the speedup over the GPUs."""
        return self.speedup(gpus) / gpus

    @property
    def overhead(self) -> float:
        """R_O, other seconds of one GPU over its seconds of computing: the lemma's measure."""
        single = self.step(1)
        return (single.seconds - single.compute) / single.compute

    def curve(self, most: int) -> list[Point]:
        """Return the points of 1, 2, ... `most` GPUs."""
        positive_integer(most=most)
        return [
            Point(g, self.seconds(g), self.speedup(g), self.efficiency(g))
            for g in range(1, most + 1)
        ]

    @cached_property
    def _all(self) -> list[float]:
        """T(1) ... T(n): more GPUs than samples have nothing to do."""
        return [self.seconds(gpus) for gpus in range(1, self.samples + 1)]

    def saturation(self) -> Saturation:
        """Return where more GPUs stop to pay, of as many as there are samples at most.

        Shares are integers of samples: one GPU more may gain nothing and two of them do. So a
        number is the last that is worth it if no larger one gains 5 % for each GPU more.
        """
        times = self._all
        fastest = times.index(min(times)) + 1
        worth = 1
        for gpus in range(1, fastest + 1):
            reach = int(log(times[gpus - 1] / times[fastest - 1]) / log(1 + WORTH)) + 1
            later = range(gpus + 1, min(gpus + reach, len(times)) + 1)
            gains = (
                times[gpus - 1] >= times[g - 1] * (1 + WORTH) ** (g - gpus) * (1 - ROUNDING)
                for g in later
            )
            worth = gpus
            if not any(gains):
                break
        return Saturation(worth, fastest)

    def gpus_for(self, speedup: float) -> Needed:
        """Return the fewest GPUs that are so many times as fast as one.

        Raises:
            ValueError: `speedup` is not above 0.
        """
        positive(speedup=speedup)
        return self._within(self._all[0] / speedup)

    def gpus_by(self, deadline: float, *, steps: int, epochs: int = 1) -> Needed:
        """Return the fewest GPUs with which the training ends before the deadline.

        Args:
            deadline: seconds for all of it.
            steps: of an epoch.
            epochs: Default 1.

        Raises:
            ValueError: a number is out of range.
        """
        positive(deadline=deadline)
        positive_integer(steps=steps, epochs=epochs)
        return self._within(deadline / steps / epochs)

    def _within(self, seconds: float) -> Needed:
        """Return the fewest GPUs with a step of at most `seconds`, plus a billionth."""
        limit = self._all[0] / min(self._all)
        there = (g for g, t in enumerate(self._all, 1) if t * (1 - ROUNDING) <= seconds)
        return Needed(next(there, None), limit)
