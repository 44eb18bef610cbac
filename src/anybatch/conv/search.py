"""Search for the algorithms of a kernel that are worth measuring, the most promising first.

All others must be faster than torch's own on all samples. Each algorithm is tried on the fewest
samples; then those that were fastest for a sample come first, on more and more of them, until they
cannot win any more, need too much, or the time is over.

    native@32   fft@1  im2col@1   fft@2  fft@4  fft@8   native@1 ...
    to beat     each once         the fastest goes on    until it is hopeless

Source: none; u-cuDNN, section III-D, measures all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter

from anybatch.conv.algorithms import NATIVE, candidates
from anybatch.conv.divide import sizes
from anybatch.conv.problem import Problem
from anybatch.core.divisions import KernelPart

HOPELESS = 4.0
"""Multiple of the best seconds of a sample, beyond which more samples are not tried."""

Measured = Mapping[tuple[int, str], KernelPart]
"""Samples and algorithm -> its measurement."""


@dataclass(frozen=True)
class Search:
    """A search through the parts of a kernel.

    Attributes:
        problem: the kernel.
        policy: which micro-batches: "all", "powerOfTwo" or "undivided".
        fits: says whether so many samples by an algorithm keep to the workspace.
        limit: bytes of workspace.
        until: moment of `perf_counter` at which no measurement is begun any more.
    """

    problem: Problem
    policy: str
    fits: Callable[[int, str], bool]
    limit: int
    until: float

    def run(
        self, size: int, measured: Measured, measure: Callable[[Problem, int, str], KernelPart]
    ) -> list[KernelPart]:
        """Return the earlier and the new measurements for N samples.

        Args:
            size: N, the samples of the mini-batch.
            measured: earlier measurements.
            measure: runs an algorithm on so many samples.
        """
        steps, found = sizes(self.policy, size), dict[tuple[int, str], KernelPart]()
        each = dict[str, float]()

        def goes_on(n: int, name: str) -> bool:
            """Measure one more, and say whether more samples of it may be worth it."""
            part = measured.get((n, name))
            if part is None and found and not self._affords(n, name, each):
                return False
            part = part or measure(self.problem, n, name)
            if name == NATIVE and n == size:
                part = replace(part, workspace=0)  # whatever it is, it is torch's own
            found[n, name] = part
            each[name] = part.seconds / n + part.setup / size
            best = min(each.values())
            hopeless = self.policy != "all" and each[name] > HOPELESS * best
            return part.workspace <= self.limit and not hopeless

        goes_on(size, NATIVE)
        names = [name for name in candidates(self.problem) if name != NATIVE]
        least = steps[0]
        worth = [name for name in names if goes_on(least, name)]
        for name in sorted([NATIVE, *worth], key=lambda name: each[name]):
            for n in steps:
                if (n, name) not in found and not goes_on(n, name):
                    break
        return list(found.values())

    def _affords(self, n: int, name: str, each: Mapping[str, float]) -> bool:
        """Return whether one more measurement fits in the limit and the time, by those so far."""
        expected = n * each.get(name, 0.0)
        return perf_counter() + expected <= self.until and self.fits(n, name)
