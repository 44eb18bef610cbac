"""Course, the plan of a recorded step: storages evicted and prefetched at each cut.

    recording ──> trace ──> default policy ──> stages ──> followed cut by cut
                  │          does not fit ──> everything leaves at once and returns on demand
                  └ with cheap storages made again, if something has to leave and that is faster

On demand it holds the bytes of the recording, which are the least that hooks can reach.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from anybatch.core.plan_sections import Link
from anybatch.core.units import show_bytes
from anybatch.errors import BudgetError
from anybatch.offloading.policy import plan
from anybatch.offloading.schedule import Function, Stage, Trace, Variable, simulate


@dataclass(frozen=True)
class Course:
    """Plan of the storages evicted, prefetched and recomputed at the cuts of a recorded step.

    Attributes:
        recording: the step.
        stages: of each interval, and of the recomputations before it; None if everything is
            offloaded and returns on demand.
        predicted: the most bytes that will be there.
        sent: offloaded bytes.
        seconds: how long the step takes, if nothing disturbs it.
        there: bytes that are there all the time: parameters, inputs, gradients of before.
        budget: bytes that the step may hold, these among them.
        link: how fast storages move.
        step: the step that is planned, in which some storages may be made again.
    """

    recording: Recording
    stages: tuple[Stage, ...] | None
    predicted: int
    sent: int
    seconds: float
    there: int
    budget: int
    link: Link
    step: Again

    @cached_property
    def dropped(self) -> frozenset[int]:
        """Return the storages that are recomputed instead of stored."""
        return frozenset(k for made in self.step.made.values() for k in made)

    @property
    def remade(self) -> int:
        """Return the bytes that are made again."""
        return sum(self.recording.sizes[k] for k in self.dropped)

    @property
    def stall(self) -> float:
        """Return the seconds in which the step only waits for copies, beyond its computation."""
        return max(0.0, self.seconds - self.step.trace.seconds)


def set_course(recording: Recording, memory: int, link: Link, more: int = 0) -> Course:
    """Plan a recorded step.

    Args:
        recording: the step.
        memory: bytes that it may hold.
        link: how fast storages move.
        more: bytes that are there by now and were not when it was recorded.

    Raises:
        BudgetError: it does not fit with everything offloaded.
    """
    there = recording.outside + more
    step = remade(recording, ())
    if step.trace.floor <= memory - there:
        course = _planned(recording, step, memory, there, link)
        assert course.stages is not None
        moved = {v for stage in course.stages for v in stage.outs}  # by the number of the storage
        if not moved:
            return course
        others = (remade(recording, chosen) for chosen in choices(recording, link, moved))
        fit = (other for other in others if other.trace.floor <= memory - there)
        courses = (_planned(recording, other, memory, there, link) for other in fit)
        return min([course, *courses], key=lambda one: one.seconds)
    if recording.peak + more > memory:
        raise too_little(recording.peak + more, memory)
    every = sum(recording.sizes)
    seconds = step.trace.seconds + every / link.out + every / link.back
    predicted = recording.peak + more
    return Course(recording, None, predicted, every, seconds, there, memory, link, step)


def _planned(recording: Recording, step: Again, memory: int, there: int, link: Link) -> Course:
    """Return the course of a step that fits."""
    schedule = plan(step.trace, memory - there, link)
    found = simulate(step.trace, schedule, link)
    sent = found.bytes_out + sum(recording.sizes[k] for k in recording.loose)
    predicted, seconds = there + found.peak, found.seconds
    stages = schedule.stages
    return Course(recording, stages, predicted, sent, seconds, there, memory, link, step)


def too_little(needed: int, budget: int) -> BudgetError:
    """Return the error for a step that does not fit with all movable storages offloaded."""
    return BudgetError(
        "a step must fit in memory, and with all saved tensors offloaded it holds "
        f"{show_bytes(needed)} (weights, gradients, and the tensors of its kernels), and the "
        f'budget is {show_bytes(budget)}: give memory="{-(-needed // 1024)}KiB" or more, or a '
        "smaller batch",
        needed=needed,
        budget=budget,
    )


# Recorded step in which some storages are recomputed instead of resident or offloaded.
#
#     storage r   ═══ saved ╸ dropped                      ╺ made again ═══ asked for ... dies
#     its source  ═══ saved ═══ kept or moved, as is planned ═══ used ═══ asked for ... dies
#
# Recomputation is a function of its own, before the interval that first requests the storage. It
# reads its operands, so any planner has them resident then; its result is another variable. Chosen
# are the storages with the fewest seconds for their bytes, and not two of which one is made from
# the other, unless both are requested soon after one another.
#
# Source: `benchmarks.simulators.recompute` does the same with every kernel recorded.

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
    """Return a step in which the chosen storages are made again."""
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
    found: dict[int, None] = {}
    users: dict[int, list[int]] = {}

    def sources(k: int) -> list[int]:
        return [source for source in remakes[k].sources if source in found]

    def longest(k: int, related: Callable[[int], list[int]]) -> int:
        return 1 + max((longest(other, related) for other in related(k)), default=0)

    for k in sorted(cheap, key=lambda k: (remakes[k].seconds / sizes[k], k)):
        related = {*sources(k), *users.get(k, ())}
        soon = all(abs(first[k] - first[other]) <= SOON for other in related)
        if soon and longest(k, sources) + longest(k, lambda k: users.get(k, [])) <= CHAIN + 1:
            found[k] = None
            for source in remakes[k].sources:
                users.setdefault(source, []).append(k)
    return list(found)


SOON = 8
"""Functions of backward within which a result made again is used itself."""

CHAIN = 8
"""Results that are made one from the other, at most: what is between must live meanwhile."""


# Recording, as data, of the saved tensors of a step in a user's own loop.
#
# A step is cut where autograd saves a tensor or asks for one; between cuts its kernels run unseen.
#
#     cuts       pack 0    pack 1    pack 0 ...... unpack 1    unpack 0
#     intervals 0 │    1    │    2    │   3  ...       │     ...    │
#     storage 0   ══════════════════════╸                           ═════   used: there in any case
#                                        ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─         may be away, or not
#
# A storage that forward still uses cannot be offloaded: a hook has only autograd's reference to it.
# The recording is made while everything is offloaded as soon as possible, so bytes that lived then
# must live: they are the rest of each interval, in addition to the storages used in it.

STAYED = -1
"""The number of a storage that is not offloaded."""


class Cut(NamedTuple):
    """A moment in which autograd saves a tensor, or asks for it.

    Attributes:
        saves: it saves it.
        number: of its storage, in the order in which they are saved first; `STAYED` for no number.
        looks: shape and dtype of the saved tensor.
        size: bytes of its storage.
    """

    saves: bool
    number: int
    looks: tuple[Any, ...] = ()
    size: int = 0


@dataclass(frozen=True)
class Remake:
    """Recomputation of a storage at its first request, verified bit for bit.

    Attributes:
        sources: the storages that it is made from.
        seconds: how long it took.
        work: the most bytes meanwhile, in addition to its own and theirs.
    """

    sources: tuple[int, ...]
    seconds: float
    work: int = 0


@dataclass(frozen=True)
class Recording:
    """One step as it was recorded with every storage offloaded that may be.

    Attributes:
        cuts: in order; there is one interval more.
        sizes: storage -> bytes.
        used: interval -> the storages that are there in it.
        rest: interval -> the most bytes of all else that the step has made.
        seconds: interval -> how long it took.
        loose: storages that outlive their last use, so that a plan would not know their end.
        outside: bytes that were there before the step, and are used in it.
        peak: the most bytes that were there, these among them.
        standing: cut -> bytes of all else that the step had made by then.
        remakes: storages that are cheap to make again.
    """

    cuts: tuple[Cut, ...]
    sizes: tuple[int, ...]
    used: tuple[frozenset[int], ...]
    rest: tuple[int, ...]
    seconds: tuple[float, ...]
    loose: frozenset[int]
    outside: int
    peak: int
    standing: tuple[int, ...] = ()
    remakes: Mapping[int, Remake] = field(default_factory=dict)

    @property
    def planned(self) -> tuple[int, ...]:
        """Return the storages that a plan may keep or move."""
        return tuple(number for number in range(len(self.sizes)) if number not in self.loose)

    def trace(self) -> Trace:
        """Return the step as planners take it: an interval is a function.

        Its variables are the storages, by their numbers, then one for the rest of each interval.
        """
        variables = [Variable(f"storage {k}", size) for k, size in enumerate(self.sizes)]
        functions, made = [], set[int]()
        for i, (used, rest) in enumerate(zip(self.used, self.rest, strict=True)):
            rest += sum(self.sizes[k] for k in used & self.loose)  # noqa: PLW2901
            here = sorted(used - self.loose)
            new = [k for k in here if k not in made]
            made.update(new)
            reads = tuple(k for k in here if k not in new)
            makes = (*new, len(variables))
            variables.append(Variable(f"rest of {i}", rest, stays=True))
            functions.append(Function(self._name(i), reads, makes, seconds=self.seconds[i]))
        return Trace(tuple(variables), tuple(functions))

    def _name(self, i: int) -> str:
        if i == 0:
            return "begin"
        cut = self.cuts[i - 1]
        return f"{'pack' if cut.saves else 'unpack'} {cut.number}"
