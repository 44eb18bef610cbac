"""The bytes that recomputing cheap results saves in real steps, and its cost.

A step is recorded as `anybatch.offload` records it: every recipe that is read off the graph is
tried and compared bit for bit. Then results are recomputed, the fewest seconds for their bytes
first, and nothing moves. Recomputing stops where autograd still saves 0.85 of its bytes for
ResNet-50, 0.66 for the transformer, and 0.6 for the others: products and convolutions come last.
`saved` is the MiB that autograd saves, without weights and tensors below 64 KiB; `cheap` the share
that passed the trial; `kept` the bytes still saved. A step in memory and one that recomputes run
back to back, the order alternating: `wall` and `processor` are medians of time(again) / time(in
memory), `wall` with its quartiles. Images have 128x128 pixels, mini-batches 4 samples, except in
the steps of the speed benchmark. Both glibc malloc modes run, each in its own process.

The second table is about AGBN's section 4.2: a ResNet-50 that labels the pixels of Cityscapes, of
which 3 samples fit, and 8 with "memory monger". The step is traced on shapes at 512x1024 pixels,
and a batch fits where its peak is at most that of 3 samples in memory; seconds are those of a
roofline model. `anybatch.offload` recomputes cheap results; recomputed stretches are planned only,
and run with ``torch.utils.checkpoint``.
"""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import quantiles
from time import process_time
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch.cli.models.resnet import resnet
from benchmarks.environment import environment
from benchmarks.mbs.problem import Problem
from benchmarks.mbs.speed.problems import STEPS
from benchmarks.modes import in_both_modes
from benchmarks.outofcore.models import densenet121
from benchmarks.outofcore.offload.steps import Step
from benchmarks.outofcore.recompute.made import Again, made_again, recorded
from benchmarks.outofcore.schedules.cases import MACHINES
from benchmarks.results import console, write
from benchmarks.simulators.recompute import cheap
from benchmarks.simulators.sublinear import sublinear
from benchmarks.simulators.tracing import trace_step

HERE = Path(__file__).parent
SEED = 0
NAMES = ("resnet50", "densenet121", "unet96", "transformer")
GOALS = {"resnet50": 0.85, "densenet121": 0.6, "unet96": 0.6, "transformer": 0.66}
"""Of what autograd saves, the share that may still be saved."""

STRETCHES = (2, 4, 8)
MOST = 9
"""Samples that are tried for pixels."""


class Pixels(nn.Module):
    """ResNet-50 without its head, and a classifier of pixels: [n, 3, H, W] -> [n, 19, H, W]."""

    def __init__(self, classes: int = 19) -> None:
        super().__init__()
        self.body = nn.Sequential(*list(resnet(50, norm="batch").children())[:-3])
        self.head = nn.Conv2d(2048, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of every pixel."""
        return F.interpolate(self.head(self.body(x)), x.shape[2:], mode="bilinear")


def _images(model: nn.Module, n: int = 4, pixels: int = 128) -> Problem:
    x, y = torch.randn(n, 3, pixels, pixels), torch.randint(19, (n,))
    return Problem(model, nn.CrossEntropyLoss(), None, x, y, n)


MAKE: dict[str, Callable[[], Problem]] = {
    "resnet50": lambda: _images(resnet(50, norm="batch")),
    "densenet121": lambda: _images(densenet121()),
    "unet96": STEPS["unet96"][0],
    "transformer": STEPS["transformer"][0],
}


def one(step: Step, rounds: int, goal: float) -> dict[str, Any]:
    """What a step holds and takes when cheap results are computed again."""
    recording = recorded(step)
    course = made_again(recording, goal)
    plain, again = nullcontext(), Again(step.device, course=course)
    for _ in range(2):
        step.run(plain)
        step.run(again)
    wall, processor = [], []
    for index in range(rounds):
        times = {}
        for around in (plain, again) if index % 2 else (again, plain):
            start = process_time()
            times[around] = step.run(around), process_time() - start
        wall.append(times[again][0] / times[plain][0])
        processor.append(times[again][1] / times[plain][1])
    saved = sum(recording.sizes)
    return {
        "saved": saved,
        "cheap": sum(recording.sizes[k] for k in recording.remakes),
        "remade": again.remade,
        "sent": course.sent,
        "in memory": step.peak(plain),
        "peak": step.peak(again),
        "predicted": course.predicted,
        "wall": [round(cut, 4) for cut in quantiles(wall, n=4)],
        "processor": [round(cut, 4) for cut in quantiles(processor, n=4)],
        "exact": all(map(torch.equal, step.gradients(plain), step.gradients(again))),
    }


def largest() -> list[dict[str, Any]]:
    """The largest batches of a network for pixels in the memory that 3 samples take."""
    model, loss = Pixels(), nn.CrossEntropyLoss()
    budget, found = 0, dict[str, dict[str, Any]]()
    for n in range(3, MOST + 1):
        step = trace_step(model, loss, (n, 3, 512, 1024), (n, 512, 1024))
        budget = budget or step.peak
        ways = {"in memory": step, "cheap results again": cheap(step)}
        ways |= {f"{count} stretches again": sublinear(step, count) for count in STRETCHES}
        for way, trace in ways.items():
            if trace.peak <= budget:
                seconds = [m.timed(trace).seconds / m.timed(step).seconds for m in MACHINES]
                found[way] = {"way": way, "samples": n, "seconds": seconds}
                found[way]["share"] = trace.peak / budget
    return [{**one, "budget": budget} for one in found.values()]


def one_mode(names: list[str], rounds: int) -> dict[str, Any]:
    """Every step, in this process and its malloc mode."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in names:
        console.print(name)
        torch.manual_seed(SEED)
        found[name] = one(Step(MAKE[name]()), rounds, GOALS.get(name, 0.0))
    return {"environment": environment(), "steps": found}


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    rounds: Annotated[int, typer.Option(help="pairs of timings")] = 10,
    steps: Annotated[str, typer.Option(help="names, comma between")] = ",".join(NAMES),
    here: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Measure in both malloc modes and write results.json."""
    names = steps.split(",")
    if quick:
        names, rounds = names[-1:], 2
    if here:
        print(json.dumps(one_mode(names, rounds)))
        return
    words = ["--steps", ",".join(names), "--rounds", str(rounds)]
    modes = in_both_modes("benchmarks.outofcore.recompute.run", *words)
    pixels = [] if quick else largest()
    write(out / "results.json", {"seed": SEED, "rounds": rounds, "modes": modes, "pixels": pixels})


if __name__ == "__main__":
    typer.run(main)
