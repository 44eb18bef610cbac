"""Every policy on one trace: a schedule for each setting, and the best setting for each machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

from anybatch.errors import BudgetError
from anybatch.offloading.policy import belady, plan
from anybatch.offloading.schedule import Schedule, Trace, simulate
from benchmarks.outofcore.lp_bound import lower_bound
from benchmarks.outofcore.schedules.parts import WORTH, in_parts
from benchmarks.simulators.baselines import fixed_distance, naive, on_demand, prefetch
from benchmarks.simulators.machine import Machine
from benchmarks.simulators.recompute import cheap
from benchmarks.simulators.recompute_policy import plan_with_recomputation
from benchmarks.simulators.sublinear import sublinear
from benchmarks.simulators.window import window

Found = dict[str, Any]
WINDOWS = (0, 1, 2, 3, 4, 6, 8, 10, 12, 14, 16)
"""Sixteenths of the budget; the paper does not say how its window was chosen."""

AHEAD = (1, 2, 4, 8, 16)
THRESHOLDS = (1, 5, 20, 60, 150, 300)
STRETCHES = (2, 3, 4, 6, 8, 12, 16, 24)
LOOKS = 100
"""At which functions the linear program looks; more would raise it a little."""

PART = 8
"""The budget divided by 2^8, 64 MiB: variables from there on are cut into parts, to see."""

LEAST = 14
"""The budget divided by 2^14, 1 MiB: what is smaller moves for nothing in the program."""


def schedules(trace: Trace, budget: int) -> dict[str, list[Schedule]]:
    """Return what the policies make of a trace, with every setting that fits; no clock is asked."""
    windows = [k * budget // 16 for k in WINDOWS]
    distances = product(THRESHOLDS, AHEAD)
    makers: dict[str, list[Callable[[Trace, int], Schedule]]] = {
        "belady": [belady],
        "window": [partial(window, size=size) for size in windows],
        "on demand": [on_demand],
        "prefetch": [partial(prefetch, k=k) for k in AHEAD],
        "distance": [partial(fixed_distance, threshold=t, ahead=k) for t, k in distances],
        "naive": [naive],
    }
    return {name: _those_that_fit(trace, budget, each) for name, each in makers.items()}


def _those_that_fit(
    trace: Trace, budget: int, makers: list[Callable[[Trace, int], Schedule]]
) -> list[Schedule]:
    found = []
    for make in makers:
        try:
            found.append(make(trace, budget))
        except BudgetError:
            continue
    return found


def on_machine(
    trace: Trace, made: dict[str, list[Schedule]], budget: int, machine: Machine
) -> Found:
    """Return seconds and bytes of the best setting of every policy, and the bound."""
    timed = machine.timed(trace)
    found = on_link(timed, made, budget, machine)
    for name, each in made.items():
        found[name] = _best(timed, machine, each)
    runs = [(each, simulate(timed, each, machine.link)) for each in made["window"]]
    found["windows"] = {each.policy: run.seconds for each, run in runs}
    found["in parts"] = None
    if found["default"]["seconds"] > WORTH * found["bound"]:
        cut = in_parts(timed, budget >> PART)
        found["in parts"] = _best(cut, machine, [plan(cut, budget, machine.link)])
    return found | recomputing(timed, budget, machine)


def on_link(timed: Trace, made: dict[str, list[Schedule]], budget: int, machine: Machine) -> Found:
    """Return what is told of every link: in memory, the paper's policy, the default, the bound."""
    found: Found = {"memory": timed.seconds, "window": _best(timed, machine, made["window"])}
    found["default"] = _best(timed, machine, [plan(timed, budget, machine.link)])
    found["bound"] = lower_bound(timed, budget, machine.link, looks=LOOKS, least=budget >> LEAST)
    return found


def recomputing(timed: Trace, budget: int, machine: Machine) -> Found:
    """Return the same where results are computed again: cheap ones, stretches, and the best."""
    joint, schedule = plan_with_recomputation(timed, budget, machine.link)
    again = _best(joint, machine, [schedule])
    assert again is not None
    again["again"] = sum(f.seconds for f in joint.functions if f.again)
    fewer = cheap(timed)
    stretched = [step.seconds for k in STRETCHES if (step := sublinear(timed, k)).peak <= budget]
    return {
        "with cheap": _best(fewer, machine, [plan(fewer, budget, machine.link)]),
        "with recomputation": again,
        "stretches alone": {"seconds": min(stretched)} if stretched else None,
    }


def _best(timed: Trace, machine: Machine, each: list[Schedule]) -> Found | None:
    """Return what the fastest of some schedules does, None where there is none."""
    if not each:
        return None
    runs = [(simulate(timed, schedule, machine.link), schedule) for schedule in each]
    run, schedule = min(runs, key=lambda pair: pair[0].seconds)
    return {
        "seconds": run.seconds,
        "policy": schedule.policy,
        "peak": run.peak,
        "out": run.bytes_out,
        "in": run.bytes_in,
    }
