"""A network's kernels one after another, and a workspace that is divided among all of them.

The layers of a network are not declared. So the first pass is recorded, while torch's own kernels
run; when its first kernel comes again, after a backward if there was one, the pass is over, all its
kernels are measured, and the total is divided (`anybatch.conv.share`). A layer that runs several
times in a pass is several kernels, each with its own share. If a later pass has more, it is divided
anew.

    pass 1   conv1 conv2 conv2 | conv2' conv2' conv1'      listened to
    pass 2   conv1 ...                                     divided: every kernel has its share

Source: u-cuDNN, section III-E.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from anybatch.conv.problem import Problem
from anybatch.conv.share import share
from anybatch.core.divisions import Configuration, Divisions

Key = tuple[Problem, int]
"""A kernel, and its samples."""


def keys_of(divisions: Divisions) -> list[Key]:
    """Return the kernels of a plan, each with its samples.

    Args:
        divisions: the plan's section on convolutions.
    """
    return [(Problem(**dict(one.kernel)), one.samples) for one in divisions.kernels]


Fronts = Callable[[Iterable[Key]], Mapping[Key, Sequence[Configuration]]]
"""Kernels -> the configurations of each, the one with the least workspace first."""


class Network:
    """The kernels of a network.

    Args:
        total: W, bytes of workspace for all of them together.
        fronts: measures the kernels of a network.

    Attributes:
        shares: kernel -> a configuration for each time that it comes in a pass.
    """

    def __init__(self, total: int, fronts: Fronts) -> None:
        self._total, self._fronts = total, fronts
        self._first: Key | None = None
        self._backward = False
        self._now: Counter[Key] = Counter()
        self._most: Counter[Key] = Counter()
        self.shares: dict[Key, list[Configuration]] = {}

    def next(self, key: Key) -> Configuration | None:
        """Return the configuration of the kernel that comes now; None while nothing is divided.

        Raises:
            BudgetError: not even the least workspaces fit together.
        """
        if self._ends(key):
            self._over()
        self._first = self._first or key
        self._backward = self._backward or key[0].kernel != "forward"
        place, self._now[key] = self._now[key], self._now[key] + 1
        shares = self.shares.get(key, [])
        return shares[place] if place < len(shares) else None

    def _ends(self, key: Key) -> bool:
        """Say whether a pass was over before this kernel."""
        return key == self._first and (self._backward or not self.shares or self._repeats(key))

    def _repeats(self, key: Key) -> bool:
        return self._now[key] >= self._most[key]

    def _over(self) -> None:
        """A pass is over."""
        more = self._now - self._most
        self._most |= self._now
        self._now, self._backward = Counter(), False
        if not more:
            return
        keys = [key for key, count in self._most.items() for _ in range(count)]
        fronts = self._fronts(self._most)
        self.shares = {}
        for key, chosen in zip(keys, share([fronts[k] for k in keys], self._total), strict=True):
            self.shares.setdefault(key, []).append(chosen)
