"""The paper's Table 1 and Figures 3 to 5, planned and simulated.

Five networks, traced on shapes alone, are planned in 16 GiB for three machines: forward, backward
and the update of SGD with momentum; every tensor of 64 KiB or more may be offloaded. An H200 has
more memory, and is limited to 16 GiB for comparison. Seconds of a function are those of a roofline
model. The V100's are scaled once, so that ResNet-50 with 190 images in memory takes the time that
the paper measured; everything else is arithmetic, and the same on any computer.

Every policy has its best setting: the paper's window in 11 sizes, prefetching 1 to 16 functions
ahead, fixed distance (Large Model Support) in 30 combinations. The default has none. A linear
program, which checks memory at 100 functions, gives a lower bound on the seconds of any schedule.
The default plans recomputation on rewritten steps.
"""

from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from anybatch.offloading.policy import plan
from anybatch.offloading.schedule import Trace
from benchmarks.environment import environment
from benchmarks.outofcore.schedules.cases import (
    BUDGET,
    MACHINES,
    MEASURED,
    NETWORKS,
    NVLINK,
    TABLE_1,
    WIDE,
)
from benchmarks.outofcore.schedules.figures import draw
from benchmarks.outofcore.schedules.policies import on_link, on_machine, schedules
from benchmarks.outofcore.schedules.reserved import largest_budgets, wastes
from benchmarks.results import console, write
from benchmarks.simulators.machine import Machine
from benchmarks.simulators.window import window

HERE = Path(__file__).parent
QUICK = ("unet",)
QUICK_SIZES = 1


def machines() -> tuple[Machine, ...]:
    """The three machines; the V100 as fast in memory as the paper's."""
    name, n, rate = MEASURED
    network = NETWORKS[name]
    measured = NVLINK.scaled_to(network.trace(network.make(), n), n / rate)
    return (measured, *MACHINES[1:])


def one_size(trace: Trace, there: tuple[Machine, ...], *, wide: bool) -> dict[str, Any]:
    """All figures of one network and batch."""
    found: dict[str, Any] = {"peak": trace.peak, "floor": trace.floor}
    found["functions"] = len(trace.functions)
    if trace.floor > BUDGET:
        return found
    made = schedules(trace, BUDGET)
    found["machines"] = {m.name: on_machine(trace, made, BUDGET, m) for m in there}
    timed = there[0].timed(trace)
    if wide:
        found["wide"] = on_link(timed, made, BUDGET, replace(there[0], link=WIDE))
    less = max(BUDGET * 7 // 8, trace.floor)
    found["waste"] = {
        "window": wastes(timed, window(timed, less, 0)),
        "default": wastes(timed, plan(timed, less, there[0].link)),
    }
    found["budgets"] = largest_budgets(trace, there[0], BUDGET)
    return found


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    networks: Annotated[str, typer.Option(help="names, comma between")] = ",".join(NETWORKS),
) -> None:
    """Trace, plan, simulate, and write results.json and the figures."""
    there = MACHINES if quick else machines()
    found: dict[str, Any] = {}
    for name in QUICK if quick else networks.split(","):
        network = NETWORKS[name]
        model, found[name] = network.make(), {}
        for n in network.sizes[:QUICK_SIZES] if quick else network.sizes:
            start = perf_counter()
            trace = network.trace(model, n)
            found[name][str(n)] = one_size(trace, there, wide=name == MEASURED[0])
            console.print(f"{name}, {n}: {perf_counter() - start:.0f} s")
    facts = {
        "budget": BUDGET,
        "table_1": TABLE_1,
        "scale": there[0].scale,
        "machines": {
            m.name: {"flops": m.flops, "memory": m.memory, "link": m.link.out} for m in there
        },
    }
    results = {"environment": environment(), "networks": found, **facts}
    write(out / "results.json", results)
    draw(results, out)


if __name__ == "__main__":
    typer.run(main)
