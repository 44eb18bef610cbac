"""Rules of eviction: the slowdown where the default takes fewer of them.

Five networks are traced on shapes and planned by three rules and by the paper's window of four
sizes (0, 1/4, 1/2 and 1 of the budget). First the steps of the schedules' benchmark: 16 GiB, three
machines. Then the second and the third batch of each network on the V100, at five budgets between
the step's floor and its peak, with its link, a tenth and ten times of it. A row is a set of rules,
of which the simulator takes the fastest; its seconds are relative to the fastest of all.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from anybatch.core.plan_sections import Link
from anybatch.errors import BudgetError
from anybatch.offloading.policy import belady, ends
from anybatch.offloading.schedule import Schedule, Trace, simulate
from benchmarks.environment import environment
from benchmarks.outofcore.rules.hidden import hiding
from benchmarks.outofcore.schedules.cases import BUDGET, MACHINES, NETWORKS
from benchmarks.outofcore.schedules.run import machines
from benchmarks.results import console, write
from benchmarks.simulators.window import window

HERE = Path(__file__).parent
QUICK = ("unet",)
SHARES = (0.02, 0.1, 0.3, 0.6, 0.9)
"""Budgets: the floor, and this share of the bytes between it and the peak."""
LINKS = (0.1, 1.0, 10.0)
WINDOWS = (0, 2, 4, 8)
"""Eighths of the budget."""

Found = dict[str, float]


def rules(budget: int) -> dict[str, Callable[[Trace, int], Schedule]]:
    """Return each rule by its name in the table."""
    sizes = {f"window {k}/8": partial(window, size=k * budget // 8) for k in WINDOWS}
    return {"furthest": belady, "hidden": hiding, "ends": ends, **sizes}


def planned(trace: Trace, budget: int) -> dict[str, Schedule]:
    """Return the schedules of all rules that have one in the budget."""
    found = {}
    for name, rule in rules(budget).items():
        try:
            found[name] = rule(trace, budget)
        except BudgetError:
            continue
    return found


def seconds(trace: Trace, schedules: dict[str, Schedule], link: Link) -> Found:
    """Return the seconds of each schedule."""
    return {name: simulate(trace, one, link).seconds for name, one in schedules.items()}


def of_paper(trace: Trace, *, quick: bool) -> Iterator[Found]:
    """Yield the step's seconds in 16 GiB, on each machine."""
    if trace.floor > BUDGET:
        return
    for machine in MACHINES if quick else machines():
        timed = machine.timed(trace)
        yield seconds(timed, planned(timed, BUDGET), machine.link)


def of_budgets(trace: Trace, *, quick: bool) -> Iterator[Found]:
    """Yield the step's seconds at other budgets, over slower and faster links."""
    machine = (MACHINES if quick else machines())[0]
    timed = machine.timed(trace)
    for share in SHARES:
        schedules = planned(timed, int(trace.floor + share * (trace.peak - trace.floor)))
        for times in LINKS:
            link = Link(machine.link.out * times, machine.link.back * times)
            yield seconds(timed, schedules, link)


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
) -> None:
    """Trace, plan, simulate, and write results.json."""
    paper: list[Any] = []
    budgets: list[Any] = []
    for name in QUICK if quick else NETWORKS:
        network = NETWORKS[name]
        model = network.make()
        for index, n in enumerate(network.sizes[:1] if quick else network.sizes):
            start = perf_counter()
            trace = network.trace(model, n)
            key = {"network": name, "batch": n}
            paper += [{**key, "seconds": one} for one in of_paper(trace, quick=quick)]
            if index in (1, 2) or quick:
                budgets += [{**key, "seconds": one} for one in of_budgets(trace, quick=quick)]
            console.print(f"{name}, {n}: {perf_counter() - start:.0f} s")
    results = {"environment": environment(), "paper": paper, "budgets": budgets}
    write(out / "results.json", results)


if __name__ == "__main__":
    typer.run(main)
