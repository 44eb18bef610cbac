"""Search of the fastest micro-batch and of offloading, over steps that train.

Every split of a batch has the same gradient, so no size has to be tried on the side: the steps of a
training are run in one size after another until the fastest is known. From the first size the
search goes up and down for as long as that pays, then between; close ones are run again.

    step     1        2     3     4     5     6     7     8     9
    size     16       16    32    8     24    12    16    24    24 ...   settled
    seconds  metered  .26   .34   .33   .25   .31   .26   .24

Noise decides nothing: tensors leave the device only for a clear win. A trial with saved tensors
offloaded runs twice, because its first step records them.

Batches of other signatures follow the first: they keep the number of elements in a micro-batch, and
where saved tensors were offloaded, they may be again.

    fastest: 8 samples of 512 elements ──> 16 of 256, 4 of 1024

Source: MBS, section 4.3.2, determines the size "experimentally".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from anybatch.core.plan_sections import SCATTER
from anybatch.core.units import show_samples, show_seconds

if TYPE_CHECKING:  # the search itself needs no torch
    from anybatch.execution.signature import Signature

MOST = 8
"""Steps that are timed. The first step of a training is not: it is metered, and warms up."""

OF_SIZES = 5
"""Of these, steps in sizes with all tensors resident, where offloading is a choice, too."""

SAME = SCATTER
"""Times the fastest size, within which a larger one is chosen."""

CLEAR = 0.9
"""Of the seconds without, below which offloading is chosen."""

CLOSE = 1.25
"""Times the best, within which a size is run again: the first step of a size warms up, too.
Where twice the size or half of it is slower than that, none between is tried."""

LADDER = 5
"""Sizes of which a plan without a training tells the seconds, at least."""

Place = Literal["resident", "paged", "offloaded"]
"""Where tensors of a step are: all on the device, lanes paged, or saved tensors offloaded."""


class TrialStep(NamedTuple):
    """Step of the search: samples in a micro-batch, and the place of the tensors."""

    micro_batch: int
    place: Place


@dataclass
class MicroBatchSearch:
    """State of a search: trials of one signature, their seconds, and values that others follow.

    Attributes:
        fixed: required samples in a micro-batch; None (default) chooses.
        most: steps that may be timed; fewer, but at least one, where they are compared with those
            of an earlier search.
        signature: of the mini-batch that is tried; None (default) before, or where a plan decided.
        seconds: trial -> seconds of each of its steps; infinite where it cannot be run after all.
        recorded: trials with offloading whose first step was run.
        trial: that of the next step; None where the search has ended.
        sizes: the first size, the most samples that fit, and the steps that may be timed, with all
            tensors resident.
        dry_runs: place -> samples -> a dry run, of the places where tensors leave the device.
        chosen: samples in the fastest micro-batch so far, and elements of each; None (default)
            before.
        sends: whether saved tensors are offloaded, once that has been decided.
        decided: forecasts made, and decisions of a plan that was given.
        no_single_rows: the model has failed on a last micro-batch of one sample.
        undivided: signatures whose batches cannot be divided, though that was planned.
    """

    fixed: int | None = None
    most: int = MOST
    signature: Signature | None = None
    seconds: dict[TrialStep, list[float]] = field(default_factory=dict)
    recorded: set[TrialStep] = field(default_factory=set)
    trial: TrialStep | None = None
    sizes: tuple[int, int, int] = (1, 1, 0)
    dry_runs: dict[Place, dict[int, Any]] = field(default_factory=dict)
    chosen: tuple[int, int] | None = None
    sends: bool = False
    decided: int = 0
    no_single_rows: bool = False
    undivided: set[Signature] = field(default_factory=set)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or a pickle, without dry runs, which hold fakes."""
        return vars(self) | {"dry_runs": {}}

    def is_of(self, signature: Signature) -> bool:
        """Return whether steps of a signature count, with any gradients that were there before."""
        own = self.signature
        return own is not None and replace(own, before=0) == replace(signature, before=0)

    def tunes(self, signature: Signature) -> bool:
        """Return whether steps of this signature find the fastest way: those of the first do."""
        return self.chosen is None if self.signature is None else self.is_of(signature)

    def anew(
        self, chosen: tuple[int, int] | None = None, *, sends: bool = False
    ) -> MicroBatchSearch:
        """Return the search without its trials."""
        found = MicroBatchSearch(self.fixed, chosen=chosen, sends=sends, decided=self.decided)
        found.no_single_rows, found.undivided = self.no_single_rows, self.undivided
        return found

    def ended(self) -> MicroBatchSearch:
        """Return the search with the fastest size so far: no clock decides any more."""
        best = self.best()
        if self.signature is None or best is None:
            return self.anew(self.chosen, sends=self.sends)
        chosen = best.micro_batch, self.signature.elements
        return self.anew(chosen, sends=best.place != "resident")

    def follow(self, trial: TrialStep, signature: Signature, *, settled: bool) -> None:
        """Record how a batch is run; `settled`: the search has ended, or there was none."""
        if self.chosen is None or self.is_of(signature):
            self.chosen = (self.best() or trial).micro_batch, signature.elements
        if settled:
            self.sends = trial.place != "resident"
            self.dry_runs.clear()

    def without_single(self, n: int, signature: Signature) -> int:
        """Return a size up to `n` that leaves no single sample, where the model takes none."""
        while self.no_single_rows and n > 2 and signature.size % n == 1:
            n -= 1
        return n

    def keeps_offloading(self, signature: Signature) -> bool:
        """Return whether saved tensors are offloaded as before: not under another plan."""
        return self.sends and not signature.most

    def fixed_for(self, signature: Signature) -> int | None:
        """Return the required samples of a micro-batch; None where the size is free."""
        return None if self.fixed is None else min(self.fixed, signature.largest)

    def pick(self, signature: Signature, cap: int) -> int:
        """Return a size up to `cap` that does as much work at once as the first one chosen did."""
        if self.fixed is not None:
            return min(self.fixed, cap)
        if self.chosen is None:
            return even(signature.size, cap)
        if trial := self.scaled(signature):
            return min(cap, trial)
        n, elements = self.chosen
        if elements == signature.elements:
            return min(cap, n)
        return max(1, min(cap, round(n * elements / max(signature.elements, 1))))

    def scaled(self, signature: Signature) -> int:
        """Return the samples with which a trial does as much work at once with another signature.

        0 where steps of it tell nothing: of another kind, of less than half of the work, or in a
        trial with tensors offloaded.
        """
        own, trial = self.signature, self.trial
        if own is None or trial is None or trial.place != "resident":
            return 0
        alike = own.like(signature) and signature.trains and not signature.most
        if not alike or _times(own, signature) > 2:
            return 0
        n = round(trial.micro_batch * own.elements / max(signature.elements, 1))
        return max(1, min(signature.size, n))

    def add_like(self, signature: Signature, seconds: float) -> None:
        """Record a step of another signature by the seconds of as much work of the first."""
        own = self.signature
        assert own is not None
        assert self.trial is not None
        self.add(self.trial, seconds * _times(own, signature))
        self.trial = self.next("resident", *self.sizes)
        if best := self.best():
            self.chosen = best.micro_batch, own.elements

    def next(self, place: Place, start: int, cap: int, most: int) -> TrialStep | None:
        """Return the next trial in a place; None where its search has ended (`next_size`)."""
        assert self.signature is not None
        found, size = (self.of(place), self.counts(place)), self.signature.size
        n = next_size(*found, start=start, cap=cap, size=size, most=most)
        return None if n is None else TrialStep(n, place)

    @property
    def steps(self) -> int:
        """Steps timed so far."""
        return sum(map(len, self.seconds.values()))

    def add(self, trial: TrialStep, seconds: float | None) -> None:
        """Record a step; `seconds` is None where it was metered, or had to be retried first."""
        first = trial.place == "offloaded" and trial not in self.recorded
        self.recorded.add(trial)
        if seconds is not None and not first:
            self.seconds.setdefault(trial, []).append(seconds)

    def fail(self, trial: TrialStep) -> None:
        """Record that a trial cannot be run after all."""
        self.recorded.add(trial)
        self.seconds[trial] = [inf]

    def of(self, place: Place) -> dict[int, float]:
        """Return samples -> the fewest seconds of a step, of the trials in a place."""
        every = self.seconds.items()
        return {trial.micro_batch: min(found) for trial, found in every if trial.place == place}

    def counts(self, place: Place) -> dict[int, int]:
        """Return samples -> steps, of the trials in a place."""
        return {n: len(self.seconds[TrialStep(n, place)]) for n in self.of(place)}

    def best(self) -> TrialStep | None:
        """Return the fastest trial: resident and large, unless another is clearly faster."""
        chosen, seconds = None, inf
        for place in get_args(Place):
            found = self.of(place)
            n = fastest(found)
            if n and found[n] < (CLEAR * seconds if chosen else inf):
                chosen, seconds = TrialStep(n, place), found[n]
        return chosen

    @property
    def least_seconds(self) -> float:
        """Seconds of a step of the fastest trial; infinite before there is one."""
        best = self.best()
        return inf if best is None else min(self.seconds[best])

    def in_words(self) -> str:
        """Return the state of the search in words; nothing where it has ended."""
        if self.trial is None:
            return ""
        n, place = self.trial
        elsewhere = {"resident": "", "paged": ", paged", "offloaded": ", saved tensors offloaded"}
        words = (
            "the fastest size is still being found, by steps that train: this one in micro-batches "
            f"of {show_samples(n)}{elsewhere[place]}"
        )
        best = self.best()
        if best is None:
            return words
        seconds = show_seconds(min(self.seconds[best]))
        return f"{words}; so far {best.micro_batch} are the fastest, with {seconds} a step"


def _times(first: Signature, other: Signature) -> float:
    """Return how many times the elements of another mini-batch the first one has."""
    return first.size * first.elements / max(other.size * other.elements, 1)


def fastest(seconds: Mapping[int, float]) -> int:
    """Return the largest size about as fast as the fastest one; 0 where none could be run."""
    best = min(seconds.values(), default=inf)
    return max((n for n, s in seconds.items() if s < inf and s <= SAME * best), default=0)


def next_size(
    seconds: Mapping[int, float],
    counts: Mapping[int, int],
    *,
    start: int,
    cap: int,
    size: int,
    most: int,
) -> int | None:
    """Return the size of the next trial with tensors in one place; None where the search ends.

    Args:
        seconds: samples in a micro-batch -> the fewest seconds of a step.
        counts: samples -> steps that were run.
        start: samples of the first trial.
        cap: the most samples that fit.
        size: N_B, samples in the mini-batch.
        most: steps.
    """
    if start not in seconds:
        return start
    if sum(counts.values()) >= most:
        return None
    best = min(seconds, key=lambda n: (seconds[n], -n))
    for n in _around(best, seconds, cap, size):
        if n not in seconds:
            return n
    near = CLOSE * seconds[best]
    close = [n for n, s in seconds.items() if counts[n] == 1 and s <= near and s < inf]
    if len(close) > 1 or (close and len(seconds) > 1 and close[0] != best):
        return min(close, key=lambda n: (seconds[n], -n))
    return None


def _around(best: int, seconds: Mapping[int, float], cap: int, size: int) -> Iterator[int]:
    """Yield the sizes around the best one: twice and half of it, then between, where it is near."""
    up, down = even(size, min(2 * best, cap)), even(size, max(1, best // 2))
    if up > best and not any(best < n <= 2 * best for n in seconds):
        yield up
    if down < best and not any(best // 2 <= n < best for n in seconds):
        yield down
    near = CLOSE * seconds[best]
    above = min((s for n, s in seconds.items() if n > best), default=0.0)
    below = min((s for n, s in seconds.items() if n < best), default=0.0)
    for n, edge in ((min(3 * best // 2, cap), above), (max(1, 3 * best // 4), below)):
        if even(size, n) != best and (edge <= near or edge == inf):
            yield even(size, n)


def even(size: int, cap: int) -> int:
    """Return the size of micro-batches that are as few as `cap` allows, and as equal as can be."""
    count = -(-size // cap)
    return -(-size // count)


def halves(cap: int, size: int) -> list[int]:
    """Return the sizes up to `cap` of which each is about half of the one before, a few of them."""
    return list(dict.fromkeys(even(size, max(1, cap >> k)) for k in range(LADDER)))


def doubling(most: int) -> list[int]:
    """Return the sizes 1, 2, 4 ... and most."""
    return [*(1 << k for k in range(most.bit_length()) if 1 << k < most), most]


def larger(cap: int, size: int) -> list[int]:
    """Return the sizes above `cap` of micro-batches that are half as many, again and again."""
    counts = [-(-size // cap)]
    while counts[-1] > 1:
        counts.append(-(-counts[-1] // 2))
    return [-(-size // count) for count in counts[1:]]


def may_win(
    seconds: Mapping[int, float],
    best: float,
    n: int,
    size: int,
    moving: Callable[[int], float] = lambda _: 0.0,
) -> bool:
    """Say whether larger micro-batches could be clearly faster, offloaded or in chunks.

    A micro-batch of `n` costs more for every sample the more samples it has, once the device is
    busy; and bytes that do not fit are moved out and back, in `moving(n)` seconds (default: none).
    `best` are the seconds of the fastest step so far, `seconds` are those of steps with all tensors
    resident, by samples; empty where these tell nothing, because micro-batches wait for each other.
    """
    worth = CLEAR * best
    return least_seconds(seconds, n, size) < worth and moving(n) < worth


def ends(seconds: Mapping[int, float]) -> tuple[int, int]:
    """Return the two sizes of those that were run that `least_seconds` draws its line through."""
    run = [k for k, s in seconds.items() if s < inf]
    most = max(run)
    less = min((k for k in run if 4 * k <= 3 * most), default=most)
    return max((k for k in run if 2 * k <= most), default=less), most


def least_seconds(seconds: Mapping[int, float], n: int, size: int) -> float:
    """Return the fewest seconds of a step in micro-batches of `n`, larger than all that were run.

    A micro-batch is on the line through the largest size that was run and the largest of half as
    many samples or fewer, or of three quarters at most where there is no such size: between nearer
    ones noise is the slope. Where there is none either, it takes no less than the largest did.
    """
    run = {k: s * k / size for k, s in seconds.items() if s < inf}
    if not run:
        return 0.0
    half, most = ends(seconds)
    rise = 0.0 if half == most else max(0.0, (run[most] - run[half]) / (most - half))
    return (size / n) * (run[most] + rise * (n - most))
