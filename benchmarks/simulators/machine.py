"""Seconds of a function on a machine: it computes, or it waits for the machine's memory.

    seconds = scale * max(flops / (flops a second), bytes touched / (bytes a second))

That is the roofline; no kernel is faster. `scale` is one number for a machine, the ratio of a
measured step to its roofline; only ratios of computing to the link matter to a schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from anybatch.core.plan_sections import Link
from anybatch.offloading.schedule import Trace


@dataclass(frozen=True)
class Machine:
    """What a step's time depends on.

    Attributes:
        name: what a person calls it.
        flops: floating-point operations a second.
        memory: bytes a second between its processor and its memory.
        link: between its memory and the host's.
        scale: what a roofline is multiplied by.
    """

    name: str
    flops: float
    memory: float
    link: Link
    scale: float = 1.0

    def timed(self, trace: Trace) -> Trace:
        """Return the trace with the seconds of its functions on this machine."""
        functions = (
            replace(
                one, seconds=self.scale * max(one.flops / self.flops, one.touched / self.memory)
            )
            for one in trace.functions
        )
        return Trace(trace.variables, tuple(functions))

    def scaled_to(self, trace: Trace, seconds: float) -> Machine:
        """Return the machine on which a step in memory takes so many seconds."""
        return replace(self, scale=self.scale * seconds / self.timed(trace).seconds)
