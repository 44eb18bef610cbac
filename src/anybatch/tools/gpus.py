"""Number of GPUs worth using: Lemma 3.1, and a model of a step's seconds on G GPUs.

A step is computing, T_C, and overhead that nothing hides, T_O; R_O = T_O / T_C. On G GPUs computing
takes T_C / G and the overhead does not change:

    1 GPU    |cccccccccccccccc|oo|
    4 GPUs   |cccc|oo|                speedup 18 / 6 = 3, efficiency 3 / 4

    efficiency = (1 + R_O) / (1 + G R_O)          speedup = G * efficiency < 1 + 1 / R_O

It needs one measurement. It ignores that summing gradients takes longer the more GPUs there are,
and that a small share of a mini-batch is computed less well: see `Loop`.

Source: guide, Lemma 3.1 and its proof, Equations 9 to 13.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, isfinite, log


@dataclass(frozen=True)
class Needed:
    """How many GPUs a goal takes.

    Attributes:
        gpus: the fewest; None where no number of them reaches it.
        limit: the speedup that more and more GPUs come to, or the best there is; may be infinite.
    """

    gpus: int | None
    limit: float

    def __str__(self) -> str:
        if self.gpus is not None:
            return f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}"
        return f"no number of GPUs: none gets beyond a speedup of {self.limit:.3g}"


def efficiency(overhead: float, gpus: int) -> float:
    """Return alpha = (1 + R_O) / (1 + G R_O), the part of G times the speed that G GPUs give.

    Args:
        overhead: R_O, seconds that nothing hides over seconds of computing on one GPU; at least 0.
        gpus: G, at least 1.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> round(efficiency(0.10, 4), 3)
        0.786

    Source: guide, Equation 13.
    """
    at_least(0, overhead=overhead)
    positive_integer(gpus=gpus)
    return (1 + overhead) / (1 + gpus * overhead)


def speedup(overhead: float, gpus: int) -> float:
    """Return alpha G, how many times as fast G GPUs are as one.

    Args:
        overhead: R_O, at least 0.
        gpus: G, at least 1.

    Raises:
        ValueError: a number is out of range.

    Source: guide, Equation 9.
    """
    return gpus * efficiency(overhead, gpus)


def speedup_limit(overhead: float) -> float:
    """Return 1 + 1 / R_O, the bound of every speedup; infinite where R_O, `overhead`, is 0.

    Raises:
        ValueError: `overhead` is below 0 or not finite.
    """
    at_least(0, overhead=overhead)
    return 1 + 1 / overhead if overhead > 0 else inf


# Cost model of a step on G GPUs: seconds of computing, of other work and of summing gradients.
#
# Computing is a line or a table of measured sizes; work is divided or it is not; gradients go
# around a ring, and some of that may hide behind backward.
#
# Source: guide, steps 1 to 7 of section 2.1.


@dataclass(frozen=True)
class Affine:
    """Seconds of computing on n samples as a line: `fixed` + `each` * n."""

    fixed: float
    each: float

    def __post_init__(self) -> None:
        at_least(0, fixed=self.fixed, each=self.each)

    def seconds(self, samples: int) -> float:
        """Return the seconds of so many samples."""
        return self.fixed + self.each * samples


@dataclass(frozen=True)
class Measured:
    """Seconds of computing as they were measured, on lines in between.

    Below the smallest size they are those of the smallest; above the largest is a guess, refused.

    Attributes:
        timed: samples -> seconds; at least one.
    """

    timed: Mapping[int, float]

    def __post_init__(self) -> None:
        if not self.timed:
            raise ValueError("timed must hold at least one size and its seconds, and it is empty")
        for samples, seconds in self.timed.items():
            positive_integer(samples=samples)
            positive(seconds=seconds)

    def seconds(self, samples: int) -> float:
        """Return the seconds of so many samples."""
        if samples > max(self.timed):
            raise ValueError(
                f"computing must be measured up to the mini-batch, and {samples} samples are "
                f"requested and {max(self.timed)} measured at most: measure that size too"
            )
        return between(self.timed, samples)


@dataclass(frozen=True)
class Work:
    """Seconds of a step other than computing, serial and parallel.

    Attributes:
        serial: that no GPU takes from another, such as one reader for all.
        parallel: that are divided, such as each rank's own part of a mini-batch; as on one GPU.
    """

    serial: float = 0.0
    parallel: float = 0.0

    def __post_init__(self) -> None:
        at_least(0, serial=self.serial, parallel=self.parallel)

    def seconds(self, gpus: int) -> float:
        """Return the seconds of this work on G GPUs."""
        return self.serial + self.parallel / gpus


@dataclass(frozen=True)
class NetworkLink:
    """Link between GPUs, with its bandwidth and latency.

    Attributes:
        bandwidth: bytes a second, each way at the same time.
        latency: seconds of a message of no bytes. Default 0.
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        positive(bandwidth=self.bandwidth)
        at_least(0, latency=self.latency)

    def all_reduce(self, size: int, gpus: int) -> float:
        """Return the seconds of a ring: 2 (G - 1) messages of `size` / G bytes; 0 for one GPU."""
        messages = 2 * (gpus - 1)
        return messages * (size / gpus / self.bandwidth + self.latency)


@dataclass(frozen=True)
class GradientSum:
    """Sum of gradients over all GPUs.

    Attributes:
        size: bytes.
        link: that carries them.
        overlap: the share that is sent while backward still computes. Default 0.
    """

    size: int
    link: NetworkLink
    overlap: float = 0.0

    def __post_init__(self) -> None:
        at_least(0, size=self.size)
        share(overlap=self.overlap)

    def seconds(self, gpus: int, compute: float) -> float:
        """Return the seconds of the sum that `compute` seconds of computing do not hide."""
        full_sum = self.link.all_reduce(self.size, gpus)
        return full_sum - min(self.overlap * full_sum, compute)


# Model of the seconds of a step on G GPUs: Lemma 3.1 with the overhead divided by its source.
#
# The lemma has one constant overhead. In a real loop some of it divides, some is constant, some
# grows, and some is hidden until computing is short enough to show it:
#
#    T(G) = t_c(n / G) + T_serial + T_parallel / G + T_update + T_allreduce(G)     in the foreground
#    or what hidden workers take for a mini-batch, if that is longer
#
#     1 GPU    |cccccccccccccccccccccccc|s|pppp|u|        c computing     s, p loading that waits
#     4 GPUs   |cccccccc|s|p|u|aaaa|                      u update        a summing of gradients
#     hidden   |llllllllllll|                             l loading by workers
#
# A mini-batch of n samples is divided among the GPUs; all wait for the largest share, n / G rounded
# up. t_c is measured: a small share is computed less well than a large one. Summing is a ring, 2 (G
# - 1) messages of M / G bytes each.
#
# With t_c(n) = b n, one serial overhead and nothing else this is the lemma.
#
# Source: guide, Lemma 3.1, steps 1 to 7 of section 2.1.

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
        """Return the fewest GPUs that are so many times as fast as one."""
        positive(speedup=speedup)
        return self._within(self._all[0] / speedup)

    def gpus_by(self, deadline: float, *, steps: int, epochs: int = 1) -> Needed:
        """Return the fewest GPUs with which the training ends before the deadline.

        Args:
            deadline: seconds for all of it.
            steps: of an epoch.
            epochs: Default 1.
        """
        positive(deadline=deadline)
        positive_integer(steps=steps, epochs=epochs)
        return self._within(deadline / steps / epochs)

    def _within(self, seconds: float) -> Needed:
        """Return the fewest GPUs with a step of at most `seconds`, plus a billionth."""
        limit = self._all[0] / min(self._all)
        there = (g for g, t in enumerate(self._all, 1) if t * (1 - ROUNDING) <= seconds)
        return Needed(next(there, None), limit)


# Checks that a user's numbers about a machine are finite and in range.

ROUNDING = 1e-9
"""Share of a figure that counts as rounding in a comparison with an integer or a goal."""


def at_least(least: float, **numbers: float) -> None:
    """Check that every number is finite and not below `least`."""
    for name, value in numbers.items():
        if not isfinite(value) or value < least:
            raise ValueError(f"{name} must be a finite number of at least {least}, not {value!r}")


def positive(**numbers: float) -> None:
    """Check that every number is finite and above 0."""
    for name, value in numbers.items():
        if not isfinite(value) or value <= 0:
            raise ValueError(f"{name} must be a finite number above 0, not {value!r}")


def share(**numbers: float) -> None:
    """Check that every number is from 0 to 1."""
    for name, value in numbers.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be a share from 0 to 1, not {value!r}")


def positive_integer(**numbers: int) -> None:
    """Check that every number is an integer of at least 1."""
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")


# Seconds of a step from those of its micro-batches, as a table has them.


def step_seconds(timed: Mapping[int, float], n: int, size: int) -> float:
    """Return the seconds of a step of `size` samples in micro-batches of `n`.

    Args:
        timed: size -> seconds of one micro-batch; `n` is among them.
        n: samples in a micro-batch.
        size: N_B, samples in the mini-batch.
    """
    full, rest = divmod(size, n)
    return full * timed[n] + (between(timed, rest) if rest else 0.0)


def between(timed: Mapping[int, float], n: int) -> float:
    """Return the seconds of `n` samples, on the line between the nearest sizes that were timed.

    Below the smallest size a micro-batch costs as much as that one: a part of it is fixed.
    """
    if n in timed:
        return timed[n]
    below = max((k for k in timed if k < n), default=None)
    above = min((k for k in timed if k > n), default=None)
    if below is None or above is None:
        nearest = above if below is None else below
        assert nearest is not None
        return timed[nearest]
    share = (n - below) / (above - below)
    return timed[below] + share * (timed[above] - timed[below])
