"""A training step as the out-of-core paper sees it: trace, schedule, and their simulation.

    functions   f0          f1          f2  ...            forward, loss, backward, update
    variables   x w a       a w b       b ...              read, written in place, or made
                                ^ a's last use: its bytes are free after f1, or at the next one

A trace is data. It does not contain where a variable is; a schedule decides that.

Source: Hayakawa and Narihira, "Out-of-core training", sections 2 and 3, Figure 1: function-sequence
and variable-sequence.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from anybatch.core.plan_sections import Interval, Link
from anybatch.errors import ScheduleError

NEVER = 1 << 60
"""Result of `Trace.next_use` for a variable that no later function uses."""


@dataclass(frozen=True)
class Variable:
    """Bytes that live and die together, such as a tensor's storage.

    Attributes:
        name: its name for users.
        size: bytes.
        before: it is on the device when the step begins.
        after: it must be there when the step ends, so it never dies.
        stays: it is never offloaded; a copy of a few bytes costs more than it frees.
    """

    name: str
    size: int
    before: bool = False
    after: bool = False
    stays: bool = False


@dataclass(frozen=True)
class Function:
    """One kernel of the step.

    Attributes:
        name: its name for users.
        reads: variables it needs, by their place in `Trace.variables`; also those it writes to.
        makes: variables that begin with it.
        writes: those of `reads` that it changes in place.
        flops: floating-point operations.
        touched: bytes it reads and writes.
        seconds: how long it takes once its variables are there.
        backward: it comes after the forward pass.
        draws: it takes random numbers, so that it gives something else the second time.
        again: it has run before, and its result of then was dropped.
    """

    name: str
    reads: tuple[int, ...]
    makes: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    flops: float = 0.0
    touched: int = 0
    seconds: float = 0.0
    backward: bool = False
    draws: bool = False
    again: bool = False

    @property
    def uses(self) -> tuple[int, ...]:
        """Return the variables that must be resident while the function runs."""
        return self.reads + self.makes


@dataclass(frozen=True, eq=False)
class Trace:
    """A step: its variables, and its functions in order.

    Raises:
        ValueError: a variable is used before it is made, made twice, or written but not read.
    """

    variables: tuple[Variable, ...]
    functions: tuple[Function, ...]

    def __post_init__(self) -> None:
        made = {v for v, variable in enumerate(self.variables) if variable.before}
        for i, function in enumerate(self.functions):
            for v in function.reads:
                self._require(v in made, v, i, "made before it is used")
            for v in function.makes:
                self._require(v not in made, v, i, "made once")
            self._require(set(function.writes) <= set(function.reads), 0, i, "read where written")
            made.update(function.makes)

    def _require(self, holds: bool, v: int, i: int, what: str) -> None:  # noqa: FBT001
        if not holds:
            raise ValueError(
                f"a variable must be {what}, and function {i}, {self.functions[i].name}, breaks "
                f"this for {self.variables[v].name}: give the functions in their order"
            )

    @cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """Variable -> the functions that use it, in order."""
        found: list[list[int]] = [[] for _ in self.variables]
        for i, function in enumerate(self.functions):
            for v in dict.fromkeys(function.uses):
                found[v].append(i)
        return tuple(map(tuple, found))

    @cached_property
    def written(self) -> tuple[tuple[int, ...], ...]:
        """Variable -> the functions that make it or write to it, in order."""
        found: list[list[int]] = [[] for _ in self.variables]
        for i, function in enumerate(self.functions):
            for v in dict.fromkeys(function.makes + function.writes):
                found[v].append(i)
        return tuple(map(tuple, found))

    @cached_property
    def dies(self) -> tuple[tuple[int, ...], ...]:
        """Return function -> the variables that are not needed after it."""
        found: list[list[int]] = [[] for _ in self.functions]
        for v, uses in enumerate(self.uses):
            if uses and not self.variables[v].after:
                found[uses[-1]].append(v)
        return tuple(map(tuple, found))

    @cached_property
    def before(self) -> tuple[int, ...]:
        """Return the variables that are there when the step begins, but for those of no use."""
        return tuple(
            v
            for v, variable in enumerate(self.variables)
            if variable.before and (variable.after or self.uses[v])
        )

    @cached_property
    def after(self) -> tuple[int, ...]:
        """Return the variables that must be on the device when the step ends."""
        return tuple(v for v, one in enumerate(self.variables) if one.after)

    @cached_property
    def in_the_end(self) -> int:
        """Bytes at the end of the step without offloading."""
        return self.bytes_of(self.after)

    @cached_property
    def seconds(self) -> float:
        """Seconds of all functions."""
        return sum(function.seconds for function in self.functions)

    @cached_property
    def live(self) -> tuple[int, ...]:
        """Live bytes during each function without offloading."""
        held, found = self.bytes_of(self.before), []
        for function, dead in zip(self.functions, self.dies, strict=True):
            held += self.bytes_of(function.makes)
            found.append(held)
            held -= self.bytes_of(dead)
        return tuple(found)

    @property
    def peak(self) -> int:
        """Return the peak of the live bytes: the need of the step without a schedule."""
        return max(self.live, default=0)

    @cached_property
    def floor(self) -> int:
        """Return the least bytes of any schedule: one function, and variables never offloaded."""
        held = self.bytes_of(v for v in self.before if self.variables[v].stays)
        begins = self.functions[0].makes if self.functions else ()
        first = self.bytes_of(self.before) + self.bytes_of(begins)
        most = max(held, first)  # nothing has left yet when the first function runs
        for function, dead in zip(self.functions, self.dies, strict=True):
            held += self.bytes_of(v for v in function.makes if self.variables[v].stays)
            moving = (v for v in set(function.uses) if not self.variables[v].stays)
            most = max(most, held + self.bytes_of(moving))
            held -= self.bytes_of(v for v in dead if self.variables[v].stays)
        return max(most, self.bytes_of(self.after))

    def size(self, v: int) -> int:
        """Return the bytes of a variable."""
        return self.variables[v].size

    def bytes_of(self, variables: Iterable[int]) -> int:
        """Return the bytes of variables together."""
        return sum(self.variables[v].size for v in variables)

    def next_use(self, v: int, i: int) -> int:
        """Return the first function after `i` that uses `v`.

        Returns:
            The number of functions where none does and `v` must be there at the end; `NEVER`
            where `v` is dead.
        """
        uses = self.uses[v]
        place = bisect_right(uses, i)
        if place < len(uses):
            return uses[place]
        return len(self.functions) if self.variables[v].after else NEVER


# Schedule, as data: variables evicted and prefetched before and after each function.
#
#     stage i     frees: bytes given up before f_i; their copies are awaited
#                 ins:   variables whose return begins before f_i
#                 f_i
#                 outs:  variables whose copy to the host begins after f_i
#
# A copy and the bytes it frees are two things. `outs` begins the copy and the variable remains
# usable; `frees`, at a later stage or at none, waits for the copy to end. A variable that has
# returned and was not written since has its copy still, and is freed again without another one.
#
# Memory is counted in the order of the stages: a variable's bytes count from the stage of its `ins`
# to that of its `frees`. So how much a schedule holds does not depend on how fast anything is, and
# a schedule that fits does so on a slower link too.
#
# Source: Hayakawa and Narihira, section 3, Figure 2: Swap-in, Swap-out, and waiting for a Swap-out.


@dataclass(frozen=True)
class Stage:
    """Evictions and prefetches around one function; variables by place in `Trace.variables`.

    Attributes:
        frees: bytes given up before the function, once the copies of these variables have ended.
        ins: returns that begin then, in this order.
        outs: copies to the host that begin after the function, in this order.
    """

    frees: tuple[int, ...] = ()
    ins: tuple[int, ...] = ()
    outs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """Schedule with a stage for each function of a trace, and one for the variables due at the end.

    Attributes:
        policy: how it was found, in words.
        budget: bytes it never exceeds.
        stages: one more than there are functions; the last one has no `outs`.
    """

    policy: str
    budget: int
    stages: tuple[Stage, ...]

    def moved(self, trace: Trace) -> tuple[int, int]:
        """Return the bytes copied to the host, and the bytes copied from it."""
        outs = sum(trace.bytes_of(stage.outs) for stage in self.stages)
        return outs, sum(trace.bytes_of(stage.ins) for stage in self.stages)


# Simulation of a schedule on a machine: its seconds, and a check against its trace.
#
# Three queues, each in order: functions, copies to the host, returns. A link that is not duplex has
# one queue for both ways.
#
#     functions  |f0|f1|  f2  |...stall...|  f3   |          stall: a copy or a return is awaited
#     out           |   x    |  y   |
#     in                        |    z    |
#
# A function begins when the one before it has ended, the copies of variables freed before it or
# written by it have ended, and all variables that it reads have returned. A return begins when the
# function before its stage has ended: until then its bytes may be in use.


@dataclass(frozen=True)
class Simulation:
    """Result of the simulation of a step under a schedule.

    Attributes:
        seconds: of the step.
        stall: seconds in which no function ran.
        held: bytes that count during each function, and after the last.
        runs: when each function ran.
        outs: variable and time of each copy to the host, in order.
        ins: variable and time of each return, in order.
        bytes_out: bytes to the host.
        bytes_in: bytes from it.
    """

    seconds: float
    stall: float
    held: tuple[int, ...]
    runs: tuple[Interval, ...]
    outs: tuple[tuple[int, Interval], ...]
    ins: tuple[tuple[int, Interval], ...]
    bytes_out: int
    bytes_in: int

    @property
    def peak(self) -> int:
        """The most bytes held."""
        return max(self.held, default=0)


def simulate(trace: Trace, schedule: Schedule, link: Link) -> Simulation:
    """Run a schedule in thought.

    Args:
        trace: the step; its functions have their seconds.
        schedule: made for it.
        link: how fast variables move.

    Raises:
        ScheduleError: more than the budget is held, or a variable is used while offloaded, freed
            without a copy, prefetched while resident, or missing at the end.
    """
    run = _Run(trace, schedule, link)
    for i, stage in enumerate(schedule.stages):
        run.free(i, stage.frees)
        run.bring(i, stage.ins)
        if i < len(trace.functions):
            run.function(i)
            run.copy(i, stage.outs)
    return run.ended()


class _Run:
    """The clocks of the three queues, and where every variable is."""

    def __init__(self, trace: Trace, schedule: Schedule, link: Link) -> None:
        if len(schedule.stages) != len(trace.functions) + 1:
            raise ScheduleError(
                f"a schedule must have one stage more than its trace has functions, and there are "
                f"{len(schedule.stages)} for {len(trace.functions)}: plan this trace anew"
            )
        self.trace, self.schedule, self.link = trace, schedule, link
        self.clock = self.stall = self.out_clock = self.in_clock = 0.0
        self.here = dict.fromkeys(trace.before, 0.0)  # variable -> when it is there
        self.copied: dict[int, float] = {}  # variable -> when its copy has ended
        self.held = trace.bytes_of(self.here)
        self.gate = 0.0  # when the stage's returns may begin
        self.trail: list[int] = []
        self.runs: list[Interval] = []
        self.outs: list[tuple[int, Interval]] = []
        self.ins: list[tuple[int, Interval]] = []

    def free(self, i: int, variables: tuple[int, ...]) -> None:
        """Free the bytes of variables; all that follows waits for their copies."""
        self.gate = self.clock
        for v in variables:
            self._require(v in self.here, i, v, "resident when it is freed", "offloaded")
            self._require(v in self.copied, i, v, "copied before it is freed", "not")
            self._require(
                not self.trace.variables[v].stays, i, v, "on the device throughout", "freed"
            )
            self.gate = max(self.gate, self.copied[v], self.here.pop(v))
            self.held -= self.trace.size(v)

    def bring(self, i: int, variables: tuple[int, ...]) -> None:
        """Begin returns."""
        for v in variables:
            self._require(v not in self.here, i, v, "offloaded when it returns", "resident")
            self._require(v in self.copied, i, v, "on the host when it returns", "not")
            begin = max(self.in_clock, self.gate, self.copied[v])
            self.in_clock = begin + self.trace.size(v) / self.link.back
            if not self.link.duplex:
                self.out_clock = self.in_clock
            self.here[v] = self.in_clock
            self.held += self.trace.size(v)
            self.ins.append((v, Interval(begin, self.in_clock)))
        self._fits(i)

    def function(self, i: int) -> None:
        """Run a function once all that it reads is there."""
        function = self.trace.functions[i]
        for v in function.reads:
            self._require(v in self.here, i, v, "resident when it is used", "offloaded")
        self.held += self.trace.bytes_of(function.makes)
        self._fits(i)
        self.trail.append(self.held)
        read = [self.here[v] for v in function.reads]
        left = [self.copied.pop(v) for v in function.writes if v in self.copied]
        begin = max([self.clock, self.gate, *read, *left])
        self.stall += begin - self.clock
        self.clock = begin + function.seconds
        self.runs.append(Interval(begin, self.clock))
        self.here |= dict.fromkeys(function.makes, self.clock)
        for v in self.trace.dies[i]:
            del self.here[v]
            self.held -= self.trace.size(v)

    def copy(self, i: int, variables: tuple[int, ...]) -> None:
        """Begin copies to the host."""
        for v in variables:
            self._require(v in self.here, i, v, "resident when it is copied", "offloaded or dead")
            begin = max(self.out_clock, self.clock, self.here[v])
            self.out_clock = begin + self.trace.size(v) / self.link.out
            if not self.link.duplex:
                self.in_clock = self.out_clock
            self.copied[v] = self.out_clock
            self.outs.append((v, Interval(begin, self.out_clock)))

    def ended(self) -> Simulation:
        """Check the state at the end of the step, and return the result of the simulation."""
        last = len(self.trace.functions)
        for v in self.trace.after:
            self._require(v in self.here, last, v, "resident at the end", "offloaded")
        self.trail.append(self.held)
        seconds = max([self.clock, *self.here.values()])
        outs, ins = self.schedule.moved(self.trace)
        return Simulation(
            seconds=seconds,
            stall=self.stall + seconds - self.clock,
            held=tuple(self.trail),
            runs=tuple(self.runs),
            outs=tuple(self.outs),
            ins=tuple(self.ins),
            bytes_out=outs,
            bytes_in=ins,
        )

    def _fits(self, i: int) -> None:
        if self.held > self.schedule.budget:
            raise ScheduleError(
                f"a schedule must hold at most its budget of {self.schedule.budget} bytes, and at "
                f"stage {i} it holds {self.held}: evict more before, or prefetch less"
            )

    def _require(self, holds: bool, i: int, v: int, what: str, found: str) -> None:  # noqa: FBT001
        if not holds:
            name = self.trace.variables[v].name
            raise ScheduleError(
                f"a variable must be {what}, and at stage {i} {name} is {found}: "
                "plan the trace anew, with the policy it was planned with"
            )
