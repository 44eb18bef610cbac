"""Live bytes over one real step of one network, in each way that a plan can choose.

ResNet-20 on 32 images of 32x32 pixels, SGD's gradients, one thread. It has GroupNorm for streaming,
BatchNorm for lockstep (`lanes`). The meter of the budget tests counts the second step of an engine,
kernel by kernel: parameters, gradients and all allocations of the step, not the images. The place
in a step is the share of its kernels that have run; no clock is read.
"""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

import anybatch
from anybatch.cli.models.resnet import resnet20
from anybatch.memory.meter import Meter
from benchmarks.concepts.memory.picture import draw
from benchmarks.environment import environment
from benchmarks.results import folder, write

HERE = folder("concepts/memory")
SAMPLES, PIXELS, POINTS = 32, 32, 400
WAYS: dict[str, dict[str, Any]] = {
    "undivided": {"norm": "group", "micro_batch": SAMPLES},
    "streaming, 4 at a time": {"norm": "group", "micro_batch": 4},
    "lanes of 4, all that waits away": {"norm": "batch", "micro_batch": 4},
    "lanes, 16 MiB": {"norm": "batch", "memory": "16MiB"},
    "streaming, 3400 KiB, tensors away": {"norm": "group", "memory": "3400KiB"},
}


def engine_of(way: dict[str, Any], batch: tuple[torch.Tensor, torch.Tensor]) -> anybatch.Engine:
    """An engine for a way: with a size, or with a plan for a budget."""
    torch.manual_seed(0)
    model, loss = resnet20(norm=way["norm"]), torch.nn.CrossEntropyLoss()
    if "memory" not in way:
        return anybatch.Engine(model, loss, micro_batch=way["micro_batch"])
    plan = anybatch.plan(model, loss, batch, memory=way["memory"], timed=False)
    return anybatch.Engine(model, loss, plan=plan)


def counted(way: dict[str, Any], samples: int, pixels: int) -> dict[str, Any]:
    """One way's step: its live bytes over its kernels, its peak, and what moved."""
    torch.manual_seed(0)
    batch = torch.randn(samples, 3, pixels, pixels), torch.randint(10, (samples,))
    engine = engine_of(way, batch)
    parameters = list(engine.model.parameters())
    engine.backward(*batch)
    for parameter in parameters:
        parameter.grad = None
    with Meter(torch.device("cpu"), {"parameters": parameters}) as meter:
        engine.backward(*batch)
    live = meter.timeline().live.sum(1)
    assert engine.last is not None
    assert engine.plan is not None
    return {
        "mechanism": engine.plan.mechanism,
        "micro_batch": engine.last.micro_batch,
        "exact": bool(engine.plan.exact),
        "kernels": len(live),
        "peak": int(meter.peak),
        "budget": engine.plan.memory.budget if engine.plan.memory is not None else None,
        "moved": engine.last.moved_bytes,
        "live": most_of_each(live, POINTS),
    }


def most_of_each(live: np.ndarray[Any, Any], points: int) -> list[int]:
    """The most bytes in each of so many stretches of a step, fewer if it has fewer kernels."""
    parts = np.array_split(live, min(points, len(live)))
    return [int(part.max()) for part in parts]


def main(
    *,
    quick: Annotated[bool, typer.Option(help="8 images of 16x16; nothing is written")] = False,
    out: Annotated[Path, typer.Option(help="where the results file goes")] = HERE,
) -> None:
    """Count every way's step, and draw them."""
    torch.set_num_threads(1)
    samples, pixels = (8, 16) if quick else (SAMPLES, PIXELS)
    found = []
    for name, way in WAYS.items():
        if quick and "memory" in way:
            continue
        options = way | {"micro_batch": samples} if name == "undivided" else way
        found.append({"name": name, **counted(options, samples, pixels)})
        print(name, found[-1]["peak"])
    results = {"environment": environment(), "seed": 0, "ways": found}
    if quick:
        return
    write(out / "results.json", results)
    draw(results, out)


if __name__ == "__main__":
    typer.run(main)
