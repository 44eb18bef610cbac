"""Overhead of a run's own steps: R_O, its ratio to computing, the one input of Lemma 3.1.

A profile runs single steps and restores all state; a run has made thousands, and its log has the
seconds of each for its mini-batch, computing, and the rest. That is enough for the lemma, and for
nothing more: the part of it that GPUs would also divide is unknown.

    |wwww|cccccccccccccccccccc|rr|     R_O = (w + r) / c, of the sums over all steps

Source: Zou et al. (the guide), section 3.2, Lemma 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, isfinite

from anybatch.cli.report.history import LoggedStep


@dataclass(frozen=True)
class Overhead:
    """Seconds of a run's steps, each the mean of so many `steps`.

    Attributes:
        steps: that count.
        waiting: for mini-batches.
        computing: micro-batches.
        rest: the update, and all else between two waits.
    """

    steps: int
    waiting: float
    computing: float
    rest: float

    @classmethod
    def of(cls, steps: Sequence[LoggedStep]) -> Overhead | None:
        """Return the overhead of these steps; None where they show nothing.

        The first step of a process also measures its memory, and says so by its peak: those are
        left out. Where every step has one, as on CUDA, the first of all is.
        """
        plain = [one.spent for one in steps if one.peak is None and one.spent is not None]
        if not plain:
            plain = [one.spent for one in steps[1:] if one.spent is not None]
        plain = [spent for spent in plain if all(isfinite(s) and s >= 0 for s in spent)]
        if not plain:
            return None
        count = len(plain)
        means = [fsum(s / count for s in column) for column in zip(*plain, strict=True)]
        found = cls(count, *means)
        return found if found.computing > 0 and isfinite(found.ratio) else None

    @property
    def ratio(self) -> float:
        """R_O."""
        return (self.waiting + self.rest) / self.computing

    def seconds(self, gpus: int) -> float:
        """Return the seconds of a step on so many GPUs, by the lemma."""
        return self.waiting + self.rest + self.computing / gpus
