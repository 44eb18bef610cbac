"""Division of a workspace limit: within a kernel (WR) and among a network's kernels (WD).

A kernel on a mini-batch of N samples may run as several on fewer. Each of these has an algorithm,
and how long it takes and how much workspace it needs was measured. They run one after another in
the same workspace, so seconds add up and bytes do not:

    [fft@4, fft@4, native@3]      seconds  t + t + t'      workspace  max(w, w, w')

A fast algorithm that needs too much for all samples at once may fit for a few of them.

The paper solves a recursion over divisions, once for a limit (WR) and with sets of configurations
for all of them (WD). Here both are one pass: parts are added in the order of their workspace, like
coins of a change-making problem for N, and whenever N gets cheaper that is the next point of the
front. A part that is no faster than the best of its own size so far can be no part of anything
faster, so most are skipped at once.

Some algorithms have a set-up for all their parts, such as the spectra of the filters. Its cost does
not depend on the parts; so there is a pass for every set of the two or three such algorithms.

Source: u-cuDNN, sections III-B (WR) and III-C1 (desirable configurations).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt

from anybatch.conv.problem import Problem
from anybatch.core.plan_sections import Configuration, Divisions, KernelPart, setups
from anybatch.core.units import show_bytes
from anybatch.errors import BudgetError


def front(parts: Iterable[KernelPart], size: int, limit: int | None = None) -> list[Configuration]:
    """Return every configuration of `size` samples that none beats in both seconds and workspace.

    Args:
        parts: all that was measured.
        size: N, the samples of the mini-batch.
        limit: bytes of workspace. Default None: as many as it takes.

    Returns:
        Configurations in the order of their workspace, each faster than the one before it; none
        where no parts within the limit add up to `size`. The last is the fastest.

    Example:
        >>> slow, fast = KernelPart(1, "slow", 2.0, 0), KernelPart(2, "fast", 1.0, 50)
        >>> parts = [slow, fast, KernelPart(4, "fast", 1.5, 90)]
        >>> [(str(c), c.seconds, c.workspace) for c in front(parts, 5)]
        [('slow@1 x 5', 10.0, 0), ('fast@2 x 2, slow@1', 4.0, 50), ('fast@4, slow@1', 3.5, 90)]
    """
    fits = [part for part in parts if limit is None or part.workspace <= limit]
    fits.sort(key=lambda part: (part.workspace, part.seconds))
    prepared = setups(fits)
    found: list[Configuration] = []
    for count in range(len(prepared) + 1):
        for names in combinations(prepared, count):
            usable = [p for p in fits if p.algorithm in names or p.algorithm not in prepared]
            found += _front(usable, size)
    found.sort(key=lambda c: (c.workspace, c.seconds))
    best: list[Configuration] = []
    for configuration in found:
        if not best or configuration.seconds < best[-1].seconds:
            best.append(configuration)
    return best


def _front(parts: Sequence[KernelPart], size: int) -> list[Configuration]:
    """Return the front by the seconds of parts only; parts are in the order of workspace."""
    best = np.full(size + 1, np.inf)  # T(n)
    best[0] = 0.0
    last = np.full(size + 1, -1)  # the part with which n was paid last
    found: list[Configuration] = []
    for index, part in enumerate(parts):
        if part.size > size or part.seconds >= best[part.size]:
            continue
        before = best[size]
        _pay(best, last, index, part)
        if best[size] < before:
            configuration = Configuration(tuple(_paid(parts, last, size)))
            if found and found[-1].workspace == configuration.workspace:
                found.pop()  # of the same workspace and slower
            found.append(configuration)
    return found


def sizes(policy: str, size: int) -> Sequence[int]:
    """Return the micro-batches that are measured of a mini-batch.

    Args:
        policy: "all", "powerOfTwo" or "undivided".
        size: N, the samples of the mini-batch; always one of them.

    Raises:
        ValueError: the policy is none of these.

    Example:
        >>> sizes("powerOfTwo", 12)
        [1, 2, 4, 8, 12]

    Source: u-cuDNN, section III-D.
    """
    if policy == "all":
        return list(range(1, size + 1))
    if policy == "powerOfTwo":
        powers = [1 << k for k in range(size.bit_length())]
        return powers if powers[-1] == size else [*powers, size]
    if policy == "undivided":
        return [size]
    raise ValueError(f'policy must be "all", "powerOfTwo" or "undivided", and it is {policy!r}')


def _pay(best: np.ndarray, last: np.ndarray, index: int, part: KernelPart) -> None:
    """Let one more part be used, as often as it pays: T(n) = min(T(n), T(n - size) + seconds)."""
    size = part.size
    for begin in range(size, len(best), size):
        end = min(begin + size, len(best))
        paid = best[begin - size : end - size] + part.seconds
        cheaper = paid < best[begin:end]
        best[begin:end][cheaper] = paid[cheaper]
        last[begin:end][cheaper] = index


def _paid(parts: Sequence[KernelPart], last: np.ndarray, size: int) -> Iterator[KernelPart]:
    """Return the parts that `size` samples were paid with, large ones first.

    Those of one algorithm follow each other.
    """
    found = []
    while size:
        part = parts[int(last[size])]
        found.append(part)
        size -= part.size
    largest = {part.algorithm: part.size for part in sorted(found, key=lambda part: part.size)}
    return iter(
        sorted(found, key=lambda p: (-largest[p.algorithm], p.algorithm, -p.size)),
    )


# A network's kernels one after another, and a workspace that is divided among all of them.
#
# The layers of a network are not declared. So the first pass is recorded, while torch's own kernels
# run; when its first kernel comes again, after a backward if there was one, the pass is over, all
# its kernels are measured, and the total is divided. A layer that runs several times in a pass is
# several kernels, each with its own share. If a later pass has more, it is divided anew.
#
#     pass 1   conv1 conv2 conv2 | conv2' conv2' conv1'      listened to
#     pass 2   conv1 ...                                     divided: every kernel has its share
#
# Source: u-cuDNN, section III-E.

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
        repeats = self._now[key] >= self._most[key]
        return key == self._first and (self._backward or not self.shares or repeats)

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


# How a network's workspace is divided among its convolution kernels: the paper's WD.
#
# Every kernel has a front of configurations, one of which is chosen. Their workspaces add up,
# because each has a segment of its own, to at most W; their seconds add up too, and should be
# least. That is a knapsack with multiple choice; the paper has a solver for it:
#
#     minimise  sum t[k,c] x[k,c]     sum w[k,c] x[k,c] <= W,   one c for each k          (Eq. 1-4)
#
# It is solved exactly here, by a price for a byte. At a price p every kernel chooses the least t +
# p w by itself, and no choice within W takes less than these sums less p W. At the best price that
# bound is nearly reached. The cost of a kernel above its own best is its regret, and regrets that
# add up to more than the gap between the bound and the best choice so far are in no better one.
# That leaves a few kernels with a few configurations, which are tried in order: of two partial
# choices the one that is neither faster nor smaller is dropped.
#
# Source: u-cuDNN, section III-C. Dyer (1984), Zemel (1984), Pisinger (1995) on this knapsack.

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
