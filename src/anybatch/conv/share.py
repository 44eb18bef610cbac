"""How a network's workspace is divided among its convolution kernels: the paper's WD.

Every kernel has a front of configurations (`anybatch.conv.divide`), one of which is chosen. Their
workspaces add up, because each has a segment of its own, to at most W; their seconds add up too,
and should be least. That is a knapsack with multiple choice; the paper has a solver for it:

    minimise  sum t[k,c] x[k,c]     sum w[k,c] x[k,c] <= W,   one c for each k          (Eq. 1-4)

It is solved exactly here, by a price for a byte. At a price p every kernel chooses the least t + p
w by itself, and no choice within W takes less than these sums less p W. At the best price that
bound is nearly reached. The cost of a kernel above its own best is its regret, and regrets that add
up to more than the gap between the bound and the best choice so far are in no better one. That
leaves a few kernels with a few configurations, which are tried in order: of two partial choices the
one that is neither faster nor smaller is dropped.

Source: u-cuDNN, section III-C. Dyer (1984), Zemel (1984), Pisinger (1995) on this knapsack.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from anybatch.core.divisions import Configuration
from anybatch.core.units import show_bytes
from anybatch.errors import BudgetError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def share(fronts: Sequence[Sequence[Configuration]], total: int) -> list[Configuration]:
    """Return one configuration of every kernel, so that all of them are fastest within a total.

    Args:
        fronts: of every kernel; the first configuration of a front needs the least workspace.
        total: W, bytes of workspace for all kernels together.

    Raises:
        BudgetError: even the least workspace of each is too much together.
    """
    needed = sum(front[0].workspace for front in fronts)
    if needed > total:
        raise BudgetError(
            f"the workspaces of all convolutions must fit together, and {len(fronts)} kernels need "
            f"at least {show_bytes(needed)}, and {show_bytes(total)} is there: give "
            f'workspace_total="{-(-needed // 1024)}KiB" or more',
            needed=needed,
            budget=total,
        )
    seconds = [np.array([c.seconds for c in front]) for front in fronts]
    bytes_ = [np.array([c.workspace for c in front], np.int64) for front in fronts]
    chosen = _choose(seconds, bytes_, total)
    return [front[int(at)] for front, at in zip(fronts, chosen, strict=True)]


def _choose(seconds: list[Floats], sizes: list[Ints], total: int) -> list[int]:
    """Return the place of the chosen configuration in every front."""
    price = _price(seconds, sizes, total)
    greedy = _greedy(seconds, sizes, total, price)
    worth = sum(t[at] for t, at in zip(seconds, greedy, strict=True))
    costs = [t + price * w for t, w in zip(seconds, sizes, strict=True)]
    least = sum(cost.min() for cost in costs) - price * total
    gap = worth - least
    if gap <= 0:
        return greedy
    regrets = [cost - cost.min() for cost in costs]
    candidates = [np.flatnonzero(regret < gap) for regret in regrets]
    found = _search(seconds, sizes, regrets, candidates, total, gap)
    takes = sum(t[at] for t, at in zip(seconds, found, strict=False))
    return found if found and takes < worth else greedy


def _price(seconds: list[Floats], sizes: list[Ints], total: int) -> float:
    """Return the price of a byte at which the choices of all kernels are nearest to the total.

    They are steps along the lower convex hulls of the fronts, the steepest of all first.
    """
    left = total - sum(int(w[0]) for w in sizes)
    steps = [step for t, w in zip(seconds, sizes, strict=True) for step in _hull(t, w)]
    for gain, size in sorted(steps, key=lambda step: -step[0] / step[1]):
        if size > left:
            return gain / size
        left -= size
    return 0.0


def _hull(t: Floats, w: Ints) -> list[tuple[float, int]]:
    """Return ``(seconds gained, bytes more)`` along the lower convex hull of a front."""
    corners = [0]
    for at in range(1, len(t)):
        while len(corners) > 1 and _above(t, w, corners[-2], corners[-1], at):
            corners.pop()
        corners.append(at)
    pairs = pairwise(corners)
    return [(float(t[a] - t[b]), int(w[b] - w[a])) for a, b in pairs]


def _above(t: Floats, w: Ints, a: int, b: int, c: int) -> bool:
    """Say whether b lies on or above the line from a to c."""
    return bool((t[a] - t[b]) * float(w[c] - w[a]) <= (t[a] - t[c]) * float(w[b] - w[a]))


def _greedy(seconds: list[Floats], sizes: list[Ints], total: int, price: float) -> list[int]:
    """Return a choice within the total: the best at the price, then faster ones that still fit."""
    chosen = []
    for t, w in zip(seconds, sizes, strict=True):
        cost = t + price * w
        chosen.append(int(np.flatnonzero(cost <= cost.min() * (1 + 1e-12))[0]))
    left = total - sum(int(w[at]) for w, at in zip(sizes, chosen, strict=True))
    if left < 0:  # two steps that differ in their last bits
        chosen = [0] * len(sizes)
        left = total - sum(int(w[0]) for w in sizes)
    while True:
        best, gain = None, 0.0
        for k, (t, w) in enumerate(zip(seconds, sizes, strict=True)):
            fits = int(np.searchsorted(w, w[chosen[k]] + left, side="right")) - 1
            if fits > chosen[k] and t[chosen[k]] - t[fits] > gain:
                best, gain = (k, fits), float(t[chosen[k]] - t[fits])
        if best is None:
            return chosen
        k, fits = best
        left -= int(sizes[k][fits] - sizes[k][chosen[k]])
        chosen[k] = fits


def _search(
    seconds: list[Floats],
    sizes: list[Ints],
    regrets: list[Floats],
    candidates: list[Ints],
    total: int,
    gap: float,
) -> list[int]:
    """Return the fastest choice within the total with regrets below `gap`; [] if there is none.

    States are partial choices in the order of their bytes, each faster than the one before.
    """
    order = sorted(range(len(candidates)), key=lambda k: len(candidates[k]))
    after = [0] * (len(order) + 1)  # the least bytes of all later kernels
    for place in range(len(order) - 1, -1, -1):
        k = order[place]
        after[place] = after[place + 1] + int(sizes[k][candidates[k]].min())
    used, took, regret = np.zeros(1, np.int64), np.zeros(1), np.zeros(1)
    trail: list[tuple[Ints, Ints]] = []
    for place, k in enumerate(order):
        options = candidates[k]
        used = (used[:, None] + sizes[k][options]).ravel()
        took = (took[:, None] + seconds[k][options]).ravel()
        regret = (regret[:, None] + regrets[k][options]).ravel()
        alive = np.flatnonzero((used + after[place + 1] <= total) & (regret < gap))
        alive = alive[np.lexsort((took[alive], used[alive]))]
        lowest = np.minimum.accumulate(took[alive])
        alive = alive[np.concatenate(([True], took[alive][1:] < lowest[:-1]))[: len(alive)]]
        if not len(alive):
            return []
        trail.append((alive // len(options), options[alive % len(options)]))
        used, took, regret = used[alive], took[alive], regret[alive]
    chosen, state = [0] * len(order), int(took.argmin())
    for place in range(len(order) - 1, -1, -1):
        came, option = trail[place]
        chosen[order[place]] = int(option[state])
        state = int(came[state])
    return chosen
