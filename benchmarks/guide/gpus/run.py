"""Lemma 3.1 and the refined model compared with real processes, 1 to 8 of them, joined by gloo.

An accelerator is a sleep of fixed seconds, so that 8 of them fit on 2 cores; so is loading. Serial
loading is one reader that all ranks use one after another, sharded loading is each rank's own,
hidden loading runs during computing. Gradients are really summed, over the loopback of this
machine, which 8 processes share with 2 cores. So the cost of a sum is calibrated for each number of
processes, with other sizes (`--calibrate` writes inputs.json, committed before the run that it
predicts). Errors are (predicted - measured) / measured, of the median step of rank 0.
"""

import json
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import numpy as np
import typer

from anybatch.tools.gpus import NetworkLink
from benchmarks.environment import environment
from benchmarks.guide.gpus.cases import CALIBRATED, CASES, GPUS, SAMPLES, Case, predicted
from benchmarks.guide.gpus.ranks import Job, run
from benchmarks.results import console, write

HERE = Path(__file__).parent
STEPS = 25
INPUTS = "inputs.json"


def calibrated(gpus: tuple[int, ...], steps: int) -> dict[str, Any]:
    """Return what sums take, and the link that follows, for each number of processes."""
    found: dict[str, Any] = {}
    for count in (g for g in gpus if g > 1):
        jobs = [Job(str(size), 0.0, gradients=size) for size in CALIBRATED]
        seconds = {name: median(times) for name, times in run(jobs, count, steps).items()}
        found[str(count)] = {"seconds": seconds, **link_of(seconds, count)}
        console.print(f"{count} processes: {found[str(count)]}")
    return found


def link_of(seconds: dict[str, float], gpus: int) -> dict[str, float]:
    """Return bandwidth and latency by least squares: 2 (G - 1) (size / G / bandwidth + latency)."""
    messages = 2 * (gpus - 1)
    rows = np.array([[messages * int(size) / gpus, messages] for size in seconds])
    slope, latency = np.linalg.lstsq(rows, np.array([*seconds.values()]), rcond=None)[0]
    return {"bandwidth": float(1 / slope), "latency": max(0.0, float(latency))}


def measured(cases: tuple[Case, ...], gpus: int, steps: int) -> dict[str, dict[str, Any]]:
    """Return quartiles of the seconds of a step."""
    times = run([case.job(gpus) for case in cases], gpus, steps)
    return {name: {"quartiles": quantiles(found), "steps": steps} for name, found in times.items()}


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    calibrate: Annotated[
        bool, typer.Option(help="only measure sums, and write inputs.json")
    ] = False,
    steps: Annotated[int, typer.Option(help="of every loop")] = STEPS,
) -> None:
    """Calibrate, or run what was predicted, and write inputs.json or results.json."""
    gpus, cases = (GPUS[:2], CASES[:1]) if quick else (GPUS, CASES)
    steps = 3 if quick else steps
    if calibrate or quick:
        facts = {"environment": environment(), "links": calibrated(gpus, steps)}
        write(out / INPUTS, facts)
    if calibrate:
        return
    links = json.loads((out / INPUTS).read_text())["links"]
    sent = {int(g): NetworkLink(one["bandwidth"], one["latency"]) for g, one in links.items()}
    sent |= {GPUS[-1]: sent[max(sent)]}
    foreseen = {case.name: predicted(case, sent) for case in cases}
    found: dict[str, Any] = {case.name: {} for case in cases}
    for count in gpus:
        for name, one in measured(cases, count, steps).items():
            found[name][str(count)] = one
        console.print(f"{count} processes: done")
    sizes = {"samples": SAMPLES, "steps": steps}
    results = {"environment": environment(), "sizes": sizes, "links": links}
    write(out / "results.json", {**results, "predicted": foreseen, "measured": found})


if __name__ == "__main__":
    typer.run(main)
