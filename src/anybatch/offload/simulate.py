"""Simulation of a schedule on a machine: its seconds, and a check against its trace.

Three queues, each in order: functions, copies to the host, returns. A link that is not duplex has
one queue for both ways.

    functions  |f0|f1|  f2  |...stall...|  f3   |          stall: a copy or a return is awaited
    out           |   x    |  y   |
    in                        |    z    |

A function begins when the one before it has ended, the copies of variables freed before it or
written by it have ended, and all variables that it reads have returned. A return begins when the
function before its stage has ended: until then its bytes may be in use.
"""

from __future__ import annotations

from dataclasses import dataclass

from anybatch.core.links import Interval, Link
from anybatch.errors import ScheduleError
from anybatch.offload.schedule import Schedule
from anybatch.offload.trace import Trace


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
        self.copied = dict.fromkeys(trace.hosted, 0.0)  # variable -> when its copy has ended
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
        for v in self.trace.hosted:
            self._require(v not in self.here, last, v, "on the host at the end", "resident")
        self.trail.append(self.held)
        copies = (self.copied[v] for v in self.trace.hosted)
        seconds = max([self.clock, *self.here.values(), *copies])
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
