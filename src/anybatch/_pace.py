"""How fast a training is with a plan: seconds of a step, and of an epoch, with an interval.

Seconds of micro-batches choose a plan; they leave out the loader, the optimizer and what lies
between. So a few steps of the real loop are measured, and an epoch is as many of them as it has.
"""

from __future__ import annotations

from dataclasses import dataclass

from anybatch.units import show_seconds


@dataclass(frozen=True)
class Pace:
    """What steps of the real loop have taken.

    Attributes:
        seconds: of a step: waiting for its mini-batch, computing, and the update; median.
        interval: of that median, 95 %, by resampling the steps.
        steps: that were measured.
        overhead: R_O, what shows and is not computing, to computing.
        epoch: steps of an epoch; None where the loader does not say.
    """

    seconds: float
    interval: tuple[float, float]
    steps: int
    overhead: float
    epoch: int | None = None

    def of(self, steps: int) -> tuple[float, float, float]:
        """Return the seconds of so many steps, and the bounds of their interval."""
        low, high = self.interval
        return steps * self.seconds, steps * low, steps * high

    def __str__(self) -> str:
        plural = "step" if self.steps == 1 else "steps"
        lines = [f"{_row(self.of(1))} a step, of {self.steps} {plural} of the real loop"]
        if self.epoch is not None:
            lines.append(f"{_row(self.of(self.epoch))} an epoch of {self.epoch} steps")
        return f"\n{' ' * 15}".join(lines)


def _row(times: tuple[float, float, float]) -> str:
    found, low, high = map(show_seconds, times)
    return f"{found} ({low} to {high})"
