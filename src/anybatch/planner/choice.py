"""Which micro-batch is fastest, of those that fit: a search over measured times, as pure functions.

The largest that fits is not the fastest: on a CPU its tensors do not fit in the caches, and its
blocks are mapped and unmapped again. So a few sizes are timed, the cheap ones first: doubling from
a small one for as long as that pays, then the ones between.

    4  8  16  32  64      doubling, until two in a row are slower
          24  32  48      between the best and its neighbours; the close ones again
             34           and no small last one: 100 are 34, 34 and 32 as soon as 48, 48 and 4
    a step of N samples:  floor(N / n) * t(n) + t(N mod n)

Source: MBS, section 4.3.2, determines the size "experimentally".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

START = 4
"""Samples of the first size that is timed."""

SLOWER = 1.1
"""Times the best, after which a size counts as slower."""

CLOSE = 1.3
"""Times the best, within which a size is timed again."""

ROUNDS = 2
"""Times that those are timed again, later: other programs on the machine may have ended by then."""

LONG = 0.5
"""Seconds of a micro-batch that need not be timed again."""

Seconds = Callable[[int], float | None]
"""Samples of one micro-batch -> its seconds, or None where it could not be run after all."""


def search(cap: int, size: int, seconds: Seconds) -> dict[int, float]:
    """Time micro-batches until the fastest is found.

    Args:
        cap: the most samples that fit.
        size: N_B, samples in the mini-batch.
        seconds: times one size.

    Returns:
        Size -> seconds of one micro-batch, of all that were timed; none is larger than `cap`.
    """
    found = _Search(min(cap, size), size, seconds)
    found.double(min(START, found.cap))
    found.halve()
    for _ in range(ROUNDS):
        found.between()
        found.again()
        if found.timed and found.best() == max(found.timed):
            found.double(min(2 * found.best(), found.cap))
    return found.timed


class _Search:
    """Search state: the sizes timed so far, and the moves to further sizes."""

    def __init__(self, cap: int, size: int, seconds: Seconds) -> None:
        self.cap, self.size, self.seconds = cap, size, seconds
        self.timed: dict[int, float] = {}

    def best(self) -> int:
        """Return the fastest size so far."""
        return fastest(self.timed, self.size)

    def double(self, n: int) -> None:
        """Time n, 2n, 4n ... up to the cap, until two in a row are slower."""
        slower = 0
        while slower < 2:
            now = self._step(n)
            best = self._step(self.best()) if self.timed else now
            slower = slower + 1 if now > SLOWER * best else 0
            if n == self.cap or now == float("inf"):
                return
            n = min(2 * n, self.cap)

    def halve(self) -> None:
        """Go below the smallest size for as long as that pays."""
        while self.timed and self.best() == min(self.timed) > 1:
            if self._step(self.best() // 2) == float("inf"):
                return  # it does not fit: sums of gradients cost more than undivided

    def between(self) -> None:
        """Time the sizes around the fastest one: three quarters of it, and one and a half times.

        And it: each in as many micro-batches, and these as equal as can be.
        """
        if self.timed:
            best = self.best()
            for n in (3 * best // 4, best, min(3 * best // 2, self.cap)):
                if n >= 1:
                    self._step(even(self.size, n))

    def again(self) -> None:
        """Time close sizes again, and those that ended the doubling: the shorter time counts."""
        if not self.timed:
            return
        best = step_seconds(self.timed, self.best(), self.size)
        above = sorted(n for n in self.timed if n > self.best())[:3]
        for n, before in list(self.timed.items()):
            close = step_seconds(self.timed, n, self.size) <= CLOSE * best
            if before < LONG and (close or n in above):
                now = self.seconds(n)
                self.timed[n] = before if now is None else min(before, now)

    def _step(self, n: int) -> float:
        """Return the seconds of a step in micro-batches of n, infinite where it cannot run."""
        if n not in self.timed:
            found = self.seconds(n)
            if found is None:
                return float("inf")
            self.timed[n] = found
        return step_seconds(self.timed, n, self.size)


def fastest(timed: Mapping[int, float], size: int) -> int:
    """Return the size with the fewest seconds per step of `size` samples; the smaller on a tie."""
    return min(timed, key=lambda n: (step_seconds(timed, n, size), n))


def even(size: int, cap: int) -> int:
    """Return the size of micro-batches that are as few as `cap` allows, and as equal as can be."""
    count = -(-size // cap)
    return -(-size // count)


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
