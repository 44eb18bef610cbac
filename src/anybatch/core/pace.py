"""How fast a training is with a plan: seconds of a step, and of an epoch, with an interval.

Seconds of micro-batches choose a plan; they omit the loader, the optimizer and the time between. So
a few steps of the real loop are measured, and multiplied by the steps of an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

from anybatch.core.units import show_seconds

FEW = 6
"""Steps below which no interval is given."""


@dataclass(frozen=True)
class Pace:
    """Measured seconds of steps of the real loop.

    Attributes:
        seconds: of a step: waiting for its mini-batch, computing, and the update; mean.
        interval: of that mean, 95 %, by resampling the steps; too narrow where they are few.
        steps: that were measured.
        overhead: R_O, visible time outside of computing, to computing.
        epoch: steps of an epoch; None where the loader does not say.
    """

    seconds: float
    interval: tuple[float, float]
    steps: int
    overhead: float
    epoch: int | None = None

    def of(self, steps: int) -> tuple[float, float, float]:
        """Return the seconds of some `steps`, and the bounds of their interval."""
        low, high = self.interval
        return steps * self.seconds, steps * low, steps * high

    def in_words(self, steps: int) -> str:
        """Return the seconds of some `steps` in words, with their interval if there is one."""
        found, low, high = map(show_seconds, self.of(steps))
        return f"{found} ({low} to {high})" if self.steps >= FEW else found

    def __str__(self) -> str:
        plural = "step" if self.steps == 1 else "steps"
        lines = [f"{self.in_words(1)} a step, of {self.steps} {plural} of the real loop"]
        if self.epoch is not None:
            lines.append(f"{self.in_words(self.epoch)} an epoch of {self.epoch} steps")
        return f"\n{' ' * 15}".join(lines)
