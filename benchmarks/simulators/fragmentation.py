"""What an allocator reserves for a schedule, beside what the schedule holds.

Variables leave and return all the time, so memory is split where something small was, and what
is large finds no place although there are bytes enough. Virtual addressing puts a variable together
from chunks that may lie anywhere; then only its last chunk is wasted:

    IF = m_a - m_r < m_c                     m_a = ceil(m_r / m_c) m_c         (Eq. 1)
    IF_max < N_max m_c                       N_max: variables there at a time  (Eq. 2)

Source: Hayakawa and Narihira, section 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from anybatch.offloading.schedule import Schedule, Trace
from benchmarks.simulators.allocators import Allocator


@dataclass(frozen=True)
class Event:
    """A variable gets bytes, or gives them back.

    Attributes:
        v: the variable.
        size: bytes; 0 where it gives them back.
    """

    v: int
    size: int


@dataclass(frozen=True)
class Footprint:
    """What a step took.

    Attributes:
        requested: the most bytes that variables had.
        reserved: the most bytes that the allocator had from the device.
        together: N_max, the most variables at a time.
    """

    requested: int
    reserved: int
    together: int

    @property
    def waste(self) -> float:
        """Reserved beside the requested, as a share of that."""
        return self.reserved / self.requested - 1 if self.requested else 0.0


def events(trace: Trace, schedule: Schedule) -> Iterator[Event]:
    """Yield what an allocator is asked for, in order; it begins with what is there."""

    def begin(variables: Iterable[int]) -> Iterator[Event]:
        return (Event(v, trace.size(v)) for v in variables if trace.size(v))

    def end(variables: Iterable[int]) -> Iterator[Event]:
        return (Event(v, 0) for v in variables if trace.size(v))

    yield from begin(trace.before)
    for i, stage in enumerate(schedule.stages):
        yield from end(stage.frees)
        yield from begin(stage.ins)
        if i < len(trace.functions):
            yield from begin(trace.functions[i].makes)
            yield from end(trace.dies[i])


def footprint(requests: Iterable[Event], allocator: Allocator) -> Footprint:
    """Let an allocator serve a step.

    Args:
        requests: in order.
        allocator: a fresh one.

    Raises:
        MemoryError: it has a limit, and cannot serve the step within it.
    """
    sizes: dict[int, int] = {}
    requested = together = reserved = held = 0
    for event in requests:
        if event.size:
            allocator.take(event.v, event.size)
            sizes[event.v] = event.size
            held += event.size
        else:
            allocator.give(event.v)
            held -= sizes.pop(event.v)
        requested, together = max(requested, held), max(together, len(sizes))
        reserved = max(reserved, allocator.reserved)
    return Footprint(requested, reserved, together)
