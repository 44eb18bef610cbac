"""The search for the fastest candidate against an exhaustive oracle: every size and mechanism.

No model, no clock: what fits is given, and so are the seconds of everything. Those of a micro-batch
are convex in its samples, as they are where it outgrows a cache; with saved tensors offloaded it
takes longer, and sizes that do not fit without are doubled until all samples are in one. The search
may not run what does not fit; how far from the best it may stay follows from what it tries:

    tried                 what is chosen takes no longer
    n, above a tried a    ceil(N / a) / floor(N / n) times as long at most: in micro-batches of a
                          samples, of which none takes longer than one of n
    n, below all tried    what the line through the two smallest ones leaves
    offloaded, not tried  1 / (1 - GAIN) times as long at most; what its last micro-batch is below
                          the line between two that were timed comes to it

and from tried sizes being so many: half of one, rounded down, is no more than the next smaller one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

from hypothesis import example, given
from hypothesis import strategies as st

from anybatch.core.plan import OffloadPlan
from anybatch.core.plan_sections import Candidate, Memory
from anybatch.errors import BudgetError
from anybatch.execution.signature import RunPlan
from anybatch.planner.offload_choice import ResidentSizes, faster
from anybatch.planner.offload_memory import OffloadedSizes
from anybatch.planner.paged_lockstep import PagedLockstep
from anybatch.planner.search import (
    GAIN,
    START,
    StepSeconds,
    above,
    between,
    chosen,
    duel,
    search,
    step_seconds,
)

ROUNDED = 1 + 1e-9
"""Sums of seconds in another order."""

OFFLOAD = OffloadPlan("file", None, (0, 0), saved=1, sent=1, most=1)
Seconds = dict[int, float]


@dataclass
class World:
    """What fits, and what it takes.

    Attributes:
        size: N_B.
        lanes: micro-batches wait for each other in BatchNorm. Not where all samples fit at once:
            such a batch is not divided, and nothing is searched.
        here: seconds of a micro-batch with all in memory.
        cap: the most samples with which these fit.
        with_offload: seconds with saved tensors offloaded.
        most: the most samples with which these fit.
        waits: times what they take alone, lanes take.
        meets: seconds that each micro-batch costs in lanes beside that.
        wider: the most samples of lanes that leave while they run; 0 for none.
        wide: seconds of a step in these.
    """

    size: int
    lanes: bool
    here: Seconds
    cap: int
    with_offload: Seconds
    most: int
    waits: float
    meets: float
    wider: int
    wide: float

    def step(self, n: int) -> float:
        """Seconds of a step with all in memory."""
        single = step_seconds(self.here, n, self.size)
        if not self.lanes:
            return single
        return self.waits * single + self.meets * -(-self.size // n)

    def every(self) -> dict[tuple[int, bool], float]:
        """Seconds of a step of every candidate that fits: samples, and whether anything leaves."""
        single = {n: step_seconds(self.here, n, self.size) for n in range(1, self.cap + 1)}
        if not self.lanes:
            found = {(n, False): single[n] for n in single}
            sizes = [n for n in above(self.cap, self.size) if n <= self.most]
            return found | {(n, True): step_seconds(self.with_offload, n, self.size) for n in sizes}
        found = {(n, False): self.step(n) for n in single}
        if self.wider:
            found[self.wider, True] = self.wide
        if self.most == self.size:
            found[self.size, True] = self.with_offload[self.size]
        return found


def planned(n: int, seconds: float | None, *, with_offload: bool, lanes: bool) -> RunPlan:
    row = Candidate(n, 1, seconds, offloaded=with_offload)
    memory = Memory(1, "given", 1, (), 1, 1, "told", (row,))
    return RunPlan(
        n, False, memory, False, "mse", lanes=lanes, offload=OFFLOAD if with_offload else None
    )


@dataclass
class Stays:
    """Stands for `ResidentSizes`: it asks for the seconds of what fits only."""

    world: World
    times: Seconds = field(default_factory=dict)

    @property
    def largest(self) -> int:
        return self.world.cap

    def fits(self, n: int) -> bool:
        return n <= self.largest

    def timed(self, step: StepSeconds) -> int:
        def clock(n: int) -> float:
            assert n <= self.world.cap
            return self.world.here[n]

        self.times = search(self.world.cap, self.world.size, clock)
        steps = {} if self.world.lanes else duel(self.times, self.world.size, step)
        return chosen(self.times, steps, self.world.size)

    def of_step(self, n: int) -> float:
        return self.world.step(n)

    def planned(self, n: int) -> RunPlan:
        assert n <= self.world.cap
        lanes = self.world.lanes and n < self.world.size
        return planned(n, self.times.get(n), with_offload=False, lanes=lanes)

    def candidates(self, n: int) -> tuple[Candidate, ...]:
        return self.planned(n).memory.candidates


@dataclass
class Leaves:
    """Stands for `OffloadedSizes`; moving costs nothing that is known before."""

    world: World
    times: Seconds = field(default_factory=dict)
    full_batch: bool = False
    possible: bool = True

    def __post_init__(self) -> None:
        self.full_batch = self.world.lanes

    def fits(self, n: int) -> bool:
        return n <= self.world.most

    def moving(self, n: int) -> float:
        return 0.0

    def seconds(self, n: int, enough: float) -> float | None:
        return self.world.with_offload[n] if self.fits(n) else None

    def planned(self, n: int, *, real: bool) -> RunPlan:
        if not self.fits(n):
            raise BudgetError("too much", needed=2, budget=1)
        return planned(n, self.times.get(n), with_offload=True, lanes=False)

    def candidates(self, n: int = 0) -> tuple[Candidate, ...]:
        return ()


@dataclass
class Wider:
    """Stands for `PagedLockstep`."""

    world: World

    @property
    def possible(self) -> bool:
        return self.world.wider > 0

    def best(self) -> int:
        return self.world.wider

    def planned(self, n: int) -> RunPlan:
        assert n == self.world.wider
        return planned(n, None, with_offload=True, lanes=True)


@dataclass
class Found:
    """What the search has found.

    Attributes:
        chosen: samples, and whether anything leaves.
        first: the samples that were chosen by what a micro-batch takes alone, with all in memory.
        times: seconds of micro-batches alone, with all in memory, where these were timed.
        run: samples, and whether anything leaves, of whole steps that were run.
    """

    chosen: tuple[int, bool]
    first: int
    times: Seconds
    run: set[tuple[int, bool]]


def found_by_search(world: World) -> Found:
    """Search."""
    run: set[tuple[int, bool]] = set()

    def time_step(n: int, available: int | None, with_offload: OffloadPlan | None) -> float:
        assert with_offload or n <= world.cap
        run.add((n, with_offload is not None))
        if with_offload and world.lanes and n < world.size:
            return world.wide
        return step_seconds(world.with_offload, n, world.size) if with_offload else world.step(n)

    stays = Stays(world)
    n = stays.timed(world.step)
    parts = cast("Any", (stays, (Leaves(world), Wider(world))))
    found = faster(*parts, n, world.size, time_step)
    return Found((found.micro_batch, found.offload is not None), n, stays.times, run)


def longer(world: World, found: Found, n: int) -> float:
    """Return how many times as long as a step in micro-batches of `n` the chosen one may take.

    With all in memory; lanes of more samples than the `first` are compared by whole steps.
    """
    tried = [
        k for k in found.times if not world.lanes or n < found.first or (k, False) in found.run
    ]
    smaller = [k for k in tried if k <= n]
    if smaller:
        return -(-world.size // max(smaller)) / (world.size // n)
    (one, t), (other, u), *_ = sorted(found.times.items())

    def least(k: int) -> float:
        return max(0.0, t - (u - t) / (other - one) * (one - k))

    full, rest = divmod(world.size, n)
    best = min(step_seconds(found.times, k, world.size) for k in found.times)
    return max(1.0, best / (full * least(n) + least(rest) * (rest > 0)))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    size, floats = draw(st.integers(2, 64)), st.floats
    fixed, each = draw(floats(0.0, 8.0)), draw(floats(0.01, 1.0))
    bend, grows = draw(st.integers(1, size)), draw(floats(0.0, 0.3))
    here = {n: fixed + each * n * (1 + grows * max(0, n - bend)) for n in range(1, size + 1)}
    slower, more = draw(floats(1.0, 3.0)), draw(floats(0.0, 8.0))
    cap = draw(st.integers(1, size))
    least = step_seconds(here, cap, size)
    return World(
        size=size,
        lanes=cap < size and draw(st.booleans()),
        here=here,
        cap=cap,
        with_offload={n: slower * seconds + more for n, seconds in here.items()},
        most=draw(st.integers(cap, size)),
        waits=draw(floats(1.0, 4.0)),
        meets=draw(floats(0.0, 4.0)),
        wider=draw(st.sampled_from([0, *(2**k for k in range(6) if cap < 2**k < size)])),
        wide=draw(floats(0.3, 6.0)) * least,
    )


@given(worlds())
def test_what_is_chosen_fits_and_nothing_that_was_tried_is_faster(world: World) -> None:
    every, found = world.every(), found_by_search(world)
    assert found.chosen in every
    seconds = every[found.chosen]
    assert seconds <= ROUNDED * min((every[one] for one in found.run), default=seconds)
    if not world.lanes:
        timed = (step_seconds(found.times, n, world.size) for n in found.times)
        assert seconds <= ROUNDED * min(timed)


MOVES = World(
    size=58,
    lanes=False,
    here={n: 1.876 + n for n in range(1, 59)},
    cap=1,
    with_offload={n: 9.876 + n for n in range(1, 59)},
    most=43,
    waits=1.0,
    meets=0.0,
    wider=0,
    wide=0.0,
)
"""What leaves costs as much whatever the size: two and four lose, and 32 take less than half."""


def below_the_line(world: World, found: Found, n: int) -> float:
    """Return the seconds by which the last micro-batch is below the line between its neighbours."""
    rest = world.size % n
    predicted = 0 < rest <= max(found.times)
    return between(found.times, rest) - world.here[rest] if predicted else 0.0


@example(MOVES)
@given(worlds())
def test_what_was_not_tried_is_not_much_faster(world: World) -> None:
    every, found = world.every(), found_by_search(world)
    seconds = every[found.chosen]
    for (n, with_offload), other in every.items():
        if with_offload:
            assert (1 - GAIN) * seconds <= ROUNDED * (other + below_the_line(world, found, n))
        else:
            assert seconds <= ROUNDED * longer(world, found, n) * other


@given(worlds())
def test_sizes_in_memory_are_tried_closely(world: World) -> None:
    """From a small one on, up to the most that fit or to where larger ones only lose."""
    tried = sorted(found_by_search(world).times)
    assert tried[0] <= START
    assert all(more // 2 <= one for one, more in pairwise(tried))
    assert tried[-1] == world.cap or 2 * best_in_memory(world, tried) <= tried[-1]


def best_in_memory(world: World, sizes: list[int]) -> int:
    """Return the size whose step takes least, of micro-batches alone."""
    return min(sizes, key=lambda n: (step_seconds(world.here, n, world.size), n))


def test_the_types_that_are_stood_for_have_what_the_search_asks_of_them() -> None:
    for real, stand in ((ResidentSizes, Stays), (OffloadedSizes, Leaves), (PagedLockstep, Wider)):
        requested = {name for name in vars(stand) if not name.startswith("_")} - {"world", "times"}
        assert requested <= {*dir(real), *real.__init__.__code__.co_varnames}
