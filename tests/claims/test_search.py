"""The search for the fastest candidate against an exhaustive oracle: every size and mechanism.

No model, no clock: what fits is given, and so are the seconds of everything. Those of a micro-batch
are convex in its samples, as they are where it outgrows a cache; with saved tensors away it takes
longer, and sizes that do not fit without are doubled until all samples are in one. The search may
not run what does not fit, and must find what is nearly the best of all these.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from anybatch._memory import Candidate, Memory
from anybatch._plan import Away
from anybatch.above import above
from anybatch.choice import search, step_seconds
from anybatch.contest import faster
from anybatch.duel import StepSeconds, chosen, duel
from anybatch.errors import BudgetError
from anybatch.kinds import Allowed
from anybatch.leaving import Leaving
from anybatch.narrow import Narrow
from anybatch.staying import Staying

NEAR = 1.15
"""Times the best of all: a doubling search sees a few sizes only (`tests/test_choice.py`)."""

AWAY = Away("file", None, (0, 0), saved=1, sent=1, most=1)
Seconds = dict[int, float]


@dataclass
class World:
    """What fits, and what it takes.

    Attributes:
        size: N_B.
        lanes: micro-batches wait for each other in BatchNorm.
        here: seconds of a micro-batch with all in memory.
        cap: the most samples with which these fit.
        away: seconds with saved tensors away.
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
    away: Seconds
    most: int
    waits: float
    meets: float
    wider: int
    wide: float

    def step(self, n: int) -> float:
        """Seconds of a step with all in memory."""
        alone = step_seconds(self.here, n, self.size)
        if not self.lanes:
            return alone
        return self.waits * alone + self.meets * -(-self.size // n)

    def every(self) -> dict[tuple[int, bool], float]:
        """Seconds of a step of every candidate that fits: samples, and whether anything leaves."""
        alone = {n: step_seconds(self.here, n, self.size) for n in range(1, self.cap + 1)}
        if not self.lanes or self.cap == self.size:
            found = {(n, False): alone[n] for n in alone}
            sizes = [n for n in above(self.cap, self.size) if n <= self.most]
            sizes = [] if self.lanes else sizes
            return found | {(n, True): step_seconds(self.away, n, self.size) for n in sizes}
        found = {(n, False): self.step(n) for n in alone}
        if self.wider:
            found[self.wider, True] = self.wide
        if self.most == self.size:
            found[self.size, True] = self.away[self.size]
        return found


def allowed(n: int, seconds: float | None, *, away: bool, lanes: bool) -> Allowed:
    row = Candidate(n, 1, seconds, away=away)
    memory = Memory(1, "given", 1, (), 1, 1, "told", (row,))
    return Allowed(n, False, memory, False, "mse", lanes=lanes, away=AWAY if away else None)


@dataclass
class Stays:
    """Stands for `Staying`: it asks for the seconds of what fits only."""

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
        steps = duel(self.times, self.world.size, step)
        return chosen(self.times, steps, self.world.size)

    def of_step(self, n: int) -> float:
        return self.world.step(n)

    def allowed(self, n: int) -> Allowed:
        assert n <= self.world.cap
        lanes = self.world.lanes and n < self.world.size
        return allowed(n, self.times.get(n), away=False, lanes=lanes)

    def candidates(self, n: int) -> tuple[Candidate, ...]:
        return self.allowed(n).memory.candidates


@dataclass
class Leaves:
    """Stands for `Leaving`; moving costs nothing that is known before."""

    world: World
    times: Seconds = field(default_factory=dict)
    whole: bool = False
    possible: bool = True

    def __post_init__(self) -> None:
        self.whole = self.world.lanes

    def fits(self, n: int) -> bool:
        return n <= self.world.most

    def moving(self, n: int) -> float:
        return 0.0

    def seconds(self, n: int, enough: float) -> float | None:
        return self.world.away[n] if self.fits(n) else None

    def allowed(self, n: int, *, real: bool) -> Allowed:
        if not self.fits(n):
            raise BudgetError("too much", needed=2, given=1)
        return allowed(n, self.times.get(n), away=True, lanes=False)

    def candidates(self, n: int = 0) -> tuple[Candidate, ...]:
        return ()


@dataclass
class Wider:
    """Stands for `Narrow`."""

    world: World

    @property
    def possible(self) -> bool:
        return self.world.wider > 0

    def best(self) -> int:
        return self.world.wider

    def allowed(self, n: int) -> Allowed:
        assert n == self.world.wider
        return allowed(n, None, away=True, lanes=True)


def found_by_search(world: World) -> tuple[int, bool]:
    """Return samples, and whether anything leaves, as the search has it."""

    def time_step(n: int, room: int | None, away: Away | None) -> float:
        assert away or n <= world.cap
        if away and world.lanes and n < world.size:
            return world.wide
        return step_seconds(world.away, n, world.size) if away else world.step(n)

    stays = Stays(world)
    n = stays.timed(world.step)
    parts = cast("Any", (stays, (Leaves(world), Wider(world))))
    found = faster(*parts, n, world.size, time_step)
    return found.micro_batch, found.away is not None


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
        lanes=draw(st.booleans()),
        here=here,
        cap=cap,
        away={n: slower * seconds + more for n, seconds in here.items()},
        most=draw(st.integers(cap, size)),
        waits=draw(floats(1.0, 4.0)),
        meets=draw(floats(0.0, 4.0)),
        wider=draw(st.sampled_from([0, *(2**k for k in range(6) if cap < 2**k < size)])),
        wide=draw(floats(0.3, 6.0)) * least,
    )


@given(worlds())
def test_what_is_chosen_fits_and_is_nearly_the_fastest_of_all(world: World) -> None:
    every, found = world.every(), found_by_search(world)
    assert found in every
    assert every[found] <= NEAR * min(every.values())


def test_the_types_that_are_stood_for_have_what_the_search_asks_of_them() -> None:
    for real, stand in ((Staying, Stays), (Leaving, Leaves), (Narrow, Wider)):
        asked = {name for name in vars(stand) if not name.startswith("_")} - {"world", "times"}
        assert asked <= {*dir(real), *real.__init__.__code__.co_varnames}
