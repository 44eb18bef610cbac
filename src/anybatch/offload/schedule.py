"""Schedule, as data: variables evicted and prefetched before and after each function.

    stage i     frees: bytes given up before f_i; their copies are awaited
                ins:   variables whose return begins before f_i
                f_i
                outs:  variables whose copy to the host begins after f_i

A copy and the bytes it frees are two things. `outs` begins the copy and the variable remains
usable; `frees`, at a later stage or at none, waits for the copy to end. A variable that has
returned and was not written since has its copy still, and is freed again without another one.

Memory is counted in the order of the stages: a variable's bytes count from the stage of its `ins`
to that of its `frees`. So how much a schedule holds does not depend on how fast anything is, and a
schedule that fits does so on a slower link too.

Source: Hayakawa and Narihira, section 3, Figure 2: Swap-in, Swap-out, and waiting for a Swap-out.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from anybatch.core.units import show_bytes
from anybatch.offload.trace import Trace


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

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Return the schedule that `to_json` has written."""
        found: dict[str, Any] = json.loads(text)
        stages = (Stage(**{key: tuple(v) for key, v in one.items()}) for one in found["stages"])
        return cls(found["policy"], found["budget"], tuple(stages))

    def moved(self, trace: Trace) -> tuple[int, int]:
        """Return the bytes copied to the host, and the bytes copied from it."""
        outs = sum(trace.bytes_of(stage.outs) for stage in self.stages)
        return outs, sum(trace.bytes_of(stage.ins) for stage in self.stages)

    def show(self, trace: Trace) -> str:
        """Return a line for each function around which something moves."""
        names = [function.name for function in trace.functions] + ["end"]
        lines = [f"{self.policy}, within {show_bytes(self.budget)}"]
        for i, (name, stage) in enumerate(zip(names, self.stages, strict=True)):
            parts = (("free", stage.frees), ("in", stage.ins), ("out", stage.outs))
            words = [
                f"{word} {', '.join(_named(trace, v) for v in moved)}"
                for word, moved in parts
                if moved
            ]
            if words:
                lines.append(f"{i:5} {name}: {'; '.join(words)}")
        return "\n".join(lines)


def _named(trace: Trace, v: int) -> str:
    return f"{trace.variables[v].name} ({show_bytes(trace.size(v))})"
