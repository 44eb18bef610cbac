"""How one convolution kernel is divided: its fastest configurations, for every workspace.

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

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

import numpy as np

from anybatch.core.divisions import Configuration, KernelPart, setups
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


def fastest(parts: Iterable[KernelPart], size: int, limit: int) -> Configuration:
    """Return the fastest configuration within a workspace: the paper's WR.

    Args:
        parts: all that was measured.
        size: N, the samples of the mini-batch.
        limit: bytes of workspace.

    Raises:
        BudgetError: none of it fits.
    """
    every = list(parts)
    found = front(every, size, limit)
    if found:
        return found[-1]
    least = front(every, size)
    needed = least[0].workspace if least else limit
    raise BudgetError(
        f"a convolution must fit in its workspace, and for {size} samples it needs at least "
        f"{show_bytes(needed)}, and {show_bytes(limit)} is there: give workspace="
        f'"{-(-needed // 1024)}KiB" or more',
        needed=needed,
        budget=limit,
    )


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
