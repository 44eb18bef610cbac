"""The paper's Table 1 on a device: ResNet-50 in float32, 64 to 1440 images, 16 GiB.

Each batch and way runs in a process of its own; a step is forward, backward and the update of SGD
with momentum. torch's allocator caps the device's memory (CUDA's own allocations are not counted).
`offload` is `anybatch.offload` with expandable segments, `offload, caching` without: the paper's
schedule with and without virtual addressing. Its budget is the largest share of the cap with which
a step runs. `save_on_cpu` is torch's own, `recomputation` recomputes every residual block
(`torch.utils.checkpoint`). Speeds are relative to the largest batch that runs in memory.

The bound is that of the linear program, on the link that was measured on this device (copies from
and to pinned memory), with the cap as the budget: functions take the seconds of a roofline model
from measured products and copies, scaled so that the batch in memory takes its measured time. The
goal is 0.85 of it at every batch.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from anybatch.core.units import parse_bytes
from benchmarks.environment import environment
from benchmarks.outofcore.lp_bound import lower_bound
from benchmarks.outofcore.table1.clocks import machine_of
from benchmarks.outofcore.table1.one import Found, Job, run, run_in_process
from benchmarks.outofcore.table1.settings import (
    CACHING,
    EXPANDABLE,
    MEMORY,
    SETTINGS,
    Setting,
)
from benchmarks.results import console, write
from benchmarks.simulators.machine import Machine

HERE = Path(__file__).parent
LOOKS = 100
LEAST = 14
"""The budget divided by 2^14 is what moves for nothing in the linear program."""


def one_size(name: str, setting: Setting, device: str, n: int, rounds: int) -> dict[str, Found]:
    """Every way of one batch; on the CPU in this process."""
    do = run_in_process if device == "cuda" else run
    found: dict[str, Found] = {}
    for way in setting.ways:
        job = Job(name, device, way, n, setting.cap, rounds)
        shares = setting.shares if way in (CACHING, EXPANDABLE) else (1.0,)
        for share in shares:
            found[way] = do(replace(job, share=share))
            if "failed" not in found[way]:
                break
        result = found[way].get("failed") or f"{n / found[way]['seconds']:.1f} images a second"
        console.print(f"{n}, {way}: {result}")
    return found


def bounds(setting: Setting, machine: Machine, found: dict[str, dict[str, Found]]) -> Found:
    """Return the seconds below which no schedule can be: batch -> seconds, None below a function.

    The roofline is scaled to the largest batch that ran in memory.
    """
    ran = [n for n in setting.sizes if "failed" not in found[str(n)][MEMORY]]
    if not ran:
        return {}
    n = ran[-1]
    scaled = machine.scaled_to(setting.trace(n), found[str(n)][MEMORY]["seconds"])
    lowest: Found = {}
    for size in setting.sizes:
        timed = scaled.timed(setting.trace(size))
        fits = timed.floor <= setting.cap
        least = setting.cap >> LEAST
        seconds = lower_bound(timed, setting.cap, machine.link, looks=LOOKS, least=least)
        lowest[str(size)] = seconds if fits else None
        console.print(f"{size}: bound {lowest[str(size)]}")
    return lowest


def measured(name: str, setting: Setting, device: str, rounds: int) -> dict[str, Any]:
    """Everything, as it goes into the results file."""
    machine = machine_of(torch.device(device))
    found = {str(n): one_size(name, setting, device, n, rounds) for n in setting.sizes}
    facts = {"flops": machine.flops, "memory": machine.memory, "link": asdict(machine.link)}
    return {
        "environment": environment(),
        "setting": asdict(setting),
        "device": device,
        "rounds": rounds,
        "measured": facts,
        "sizes": found,
        "bounds": bounds(setting, machine, found),
    }


def main(
    *,
    quick: bool = False,
    device: Annotated[str, typer.Option(help="cuda; the quick form runs on the CPU")] = "cuda",
    cap: Annotated[str, typer.Option(help="memory of the device")] = "16GiB",
    sizes: Annotated[str, typer.Option(help="batches, comma between")] = "",
    rounds: Annotated[int, typer.Option(help="steps that are clocked")] = 10,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
) -> None:
    """Measure and write results.json; without CUDA only the quick form runs, on the CPU."""
    if quick:
        write(out / "results.json", measured("quick", SETTINGS["quick"], "cpu", 2))
        return
    if not (device == "cuda" and torch.cuda.is_available()):
        console.print("no CUDA device here: Table 1 was not run (--quick runs on the CPU)")
        return
    setting = replace(SETTINGS["paper"], cap=parse_bytes(cap))
    if sizes:
        setting = replace(setting, sizes=tuple(map(int, sizes.split(","))))
    write(out / "results.json", measured("paper", setting, device, rounds))


if __name__ == "__main__":
    typer.run(main)
