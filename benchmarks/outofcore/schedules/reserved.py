"""What allocators reserve for schedules, and the largest budget that they can serve in 16 GiB."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from anybatch.errors import BudgetError
from anybatch.offloading.policy import fastest, plan
from anybatch.offloading.schedule import Schedule, Trace, simulate
from benchmarks.simulators.allocators import (
    MIB,
    Allocator,
    Arena,
    Caching,
    Chunks,
    Expandable,
    PowersOfTwo,
)
from benchmarks.simulators.fragmentation import events, footprint
from benchmarks.simulators.machine import Machine
from benchmarks.simulators.window import window

ALLOCATORS: dict[str, Callable[[], Allocator]] = {
    "first fit": lambda: Arena(best=False),
    "best fit": Arena,
    "best fit, caching": Caching,
    "powers of two": PowersOfTwo,
    "chunks of 2 MiB": lambda: Chunks(2 * MIB),
    "chunks of 40 MiB": lambda: Chunks(40 * MIB),
    "2 MiB and a pool": lambda: Chunks(2 * MIB, pooled=MIB),
    "40 MiB and a pool": lambda: Chunks(40 * MIB, pooled=MIB),
    "expandable segments": Expandable,
}
LIMITED: dict[str, Callable[[int], Allocator]] = {
    "best fit, caching": Caching,
    "40 MiB and a pool": lambda limit: Chunks(40 * MIB, MIB, limit),
    "expandable segments": lambda limit: Expandable(limit=limit),
}
STEPS = 32
"""Budgets are tried in thirty-seconds of the memory, from all of it down."""

WINDOWS = (0, 2, 4, 8)
"""Sixteenths of the budget."""


def wastes(trace: Trace, schedule: Schedule) -> dict[str, float]:
    """Return what each allocator reserves beside what is held, as a share of that."""
    row = list(events(trace, schedule))
    return {name: footprint(row, make()).waste for name, make in ALLOCATORS.items()}


def largest_budgets(trace: Trace, machine: Machine, memory: int) -> dict[str, Any]:
    """Return for the paper's policy and the default: allocator -> budget that can be defined.

    The budgets go down from all of the memory until the allocator serves the schedule in it; None
    where none does.
    """
    timed = machine.timed(trace)

    @cache
    def ours(budget: int) -> Schedule:
        return plan(timed, budget, machine.link)

    @cache
    def papers(budget: int) -> Schedule:
        found = []
        for k in WINDOWS:
            try:
                found.append(window(timed, budget, k * budget // 16))
            except BudgetError:
                continue
        return fastest(timed, machine.link, found or [window(timed, budget, 0)])

    return {
        name: {
            allocator: _largest(timed, machine, memory, policy, allocator) for allocator in LIMITED
        }
        for name, policy in (("window", papers), ("default", ours))
    }


def _largest(
    timed: Trace, machine: Machine, memory: int, policy: Callable[[int], Schedule], allocator: str
) -> dict[str, float] | None:
    for step in range(STEPS, 0, -1):
        budget = memory * step // STEPS
        if budget < timed.floor:
            return None
        try:
            schedule = policy(budget)
            found = footprint(events(timed, schedule), LIMITED[allocator](memory))
        except (MemoryError, BudgetError):
            continue
        seconds = simulate(timed, schedule, machine.link).seconds
        return {"budget": budget, "reserved": found.reserved, "seconds": seconds}
    return None
