"""Cost model of a step on G GPUs: seconds of computing, of other work and of summing gradients.

Computing is a line or a table of measured sizes; work is divided or it is not; gradients go around
a ring, and some of that may hide behind backward.

Source: guide, steps 1 to 7 of section 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from anybatch.planner.choice import between
from anybatch.tools.validation import at_least, positive, positive_integer, share


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
        """Return the seconds of so many samples.

        Raises:
            ValueError: that is more than was measured.
        """
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
