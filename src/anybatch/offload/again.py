"""Recorded step in which some storages are recomputed instead of resident or offloaded.

    storage r   ═══ saved ╸ dropped                      ╺ made again ═══ asked for ... dies
    its source  ═══ saved ═══ kept or moved, as is planned ═══ used ═══ asked for ... dies

Recomputation is a function of its own, before the interval that first requests the storage. It
reads its operands, so any planner has them resident then; its result is another variable. Chosen
are the storages with the fewest seconds for their bytes, and not two of which one is made from the
other, unless both are requested soon after one another.

Source: `benchmarks.simulators.recompute` does the same with every kernel recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from anybatch.core.links import Link
from anybatch.offload.recording import Recording
from anybatch.offload.trace import Function, Trace, Variable

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of the bytes that are cheap to make again, how many are."""


@dataclass(frozen=True)
class Again:
    """A step in which some storages are made again.

    Attributes:
        trace: it.
        made: cut -> storages recomputed at it, in order.
        of: variable -> its storage.
    """

    trace: Trace
    made: Mapping[int, tuple[int, ...]]
    of: Mapping[int, int]


def remade(recording: Recording, chosen: Collection[int]) -> Again:
    """Return a step in which the chosen storages are made again.

    Args:
        recording: the step.
        chosen: those of `Recording.remakes` that are.
    """
    return _Rewriting(recording, frozenset(chosen)).rewritten()


class _Rewriting:
    """Functions of the rewritten step so far, and the variable that now holds each storage."""

    def __init__(self, recording: Recording, chosen: frozenset[int]) -> None:
        self.recording, self.chosen = recording, chosen
        self.step = recording.trace()
        self.now: dict[int, int] = {}
        self.variables = list(self.step.variables)
        self.functions: list[Function] = []
        self.made: dict[int, tuple[int, ...]] = {}

    def rewritten(self) -> Again:
        """Go through the step."""
        for i, function in enumerate(self.step.functions):
            if i and not (cut := self.recording.cuts[i - 1]).saves and cut.number in self.chosen:
                self.make(cut.number, i)
            reads = tuple(self.now.get(v, v) for v in function.reads)
            self.functions.append(replace(function, reads=reads))
        storages = {k: k for k in range(len(self.recording.sizes))}
        of = storages | {v: k for k, v in self.now.items()}
        trace = Trace(tuple(self.variables), tuple(self.functions))
        return Again(trace, self.made, of)

    def make(self, k: int, i: int) -> None:
        """Recompute storage `k` before interval `i`, and its sources before it."""
        if k in self.now:
            return
        recording = self.recording
        remake, there = recording.remakes[k], recording.used[i - 1] & recording.used[i]
        for source in remake.sources:
            if source in self.chosen and source not in there:
                self.make(source, i)
        reads = {*remake.sources, *(there - recording.loose - {k})}
        rest = recording.standing[i - 1] + sum(recording.sizes[v] for v in there & recording.loose)
        result = len(self.variables)
        self.variables += [
            Variable(f"storage {k} again", recording.sizes[k]),
            Variable(f"rest of making {k} again", rest + remake.work, stays=True),
        ]
        self.functions.append(
            Function(
                f"make {k} again",
                tuple(sorted(self.now.get(v, v) for v in reads)),
                (result, result + 1),
                seconds=remake.seconds,
                backward=True,
                again=True,
            )
        )
        self.now[k] = result
        self.made[i - 1] = (*self.made.get(i - 1, ()), k)


def choices(
    recording: Recording, link: Link, moved: Collection[int] = ()
) -> Iterator[frozenset[int]]:
    """Yield sets of storages to recompute: those that would be offloaded, or the cheapest.

    Args:
        recording: the step.
        link: a storage is not cheap if recomputing it is slower than moving it out and back.
        moved: offloaded storages without recomputation.
    """
    sizes = recording.sizes
    order = _together(recording, link)
    if instead := frozenset(order).intersection(moved):
        yield instead
    so_far = list(accumulate(sizes[k] for k in order))
    found = None
    for share in SHARES if order else ():
        count = sum(size <= share * so_far[-1] for size in so_far)
        if count and count != found:
            yield frozenset(order[:count])
        found = count


def _together(recording: Recording, link: Link) -> list[int]:
    """Return the storages that may be recomputed in one step, the fewest seconds per byte first."""
    sizes, remakes = recording.sizes, recording.remakes
    first = {cut.number: i for i, cut in reversed(list(enumerate(recording.cuts))) if not cut.saves}
    travel = 1 / link.out + 1 / link.back
    cheap = [k for k, remake in remakes.items() if remake.seconds < sizes[k] * travel]
    found: list[int] = []
    for k in sorted(cheap, key=lambda k: (remakes[k].seconds / sizes[k], k)):
        related = {s for s in remakes[k].sources if s in found}
        related |= {other for other in found if k in remakes[other].sources}
        if all(abs(first[k] - first[other]) <= SOON for other in related):
            found.append(k)
    return found


SOON = 8
"""Functions of backward within which a result made again is used itself."""
