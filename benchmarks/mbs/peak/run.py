"""Peak memory of one step against the batch size: plain torch, and an engine with one budget.

ResNet-20 with BatchNorm on images of 32x32 pixels, one thread. The meter of the budget tests counts
the second step: parameters, gradients and all allocations of a step, not the images. The engine
gets 16 MiB and nothing else, and times no size.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import anybatch
from anybatch.cli.models.resnet import resnet20
from anybatch.memory.meter import Meter
from benchmarks.environment import environment
from benchmarks.mbs.peak.picture import draw
from benchmarks.results import folder, write

HERE = folder("mbs/peak")
BATCHES, PIXELS, BUDGET = (4, 8, 16, 32, 64, 128, 256, 512), 32, "16MiB"


def counted(model: torch.nn.Module, step: Callable[[], object]) -> int:
    """Return the most bytes that are live in the second step of a model."""
    parameters = list(model.parameters())
    step()
    for parameter in parameters:
        parameter.grad = None
    with Meter(torch.device("cpu"), {"parameters": parameters}) as meter:
        step()
    return int(meter.peak)


def row(samples: int, pixels: int) -> dict[str, Any]:
    """Return the peaks of a batch of so many images, in both ways."""
    torch.manual_seed(0)
    x, y = torch.randn(samples, 3, pixels, pixels), torch.randint(10, (samples,))
    loss = torch.nn.CrossEntropyLoss()
    plain, model = resnet20(norm="batch"), resnet20(norm="batch")
    plan = anybatch.plan(model, loss, (x, y), memory=BUDGET, timed=False)
    engine = anybatch.Engine(model, loss, plan=plan)
    undivided = counted(plain, lambda: loss(plain(x), y).backward())
    ours = counted(model, lambda: engine.backward(x, y))
    assert engine.plan is not None
    exact = bool(engine.plan.exact)
    found = {"batch": samples, "undivided": undivided, "ours": ours}
    return found | {"micro_batch": plan.micro_batch, "exact": exact}


def main(
    *,
    quick: Annotated[
        bool, typer.Option(help="4 and 8 images of 16x16; nothing is written")
    ] = False,
    out: Annotated[Path, typer.Option(help="where the results file goes")] = HERE,
) -> None:
    """Count every batch size, and draw them."""
    torch.set_num_threads(1)
    rows = []
    for samples in BATCHES[:2] if quick else BATCHES:
        rows.append(row(samples, 16 if quick else PIXELS))
        print(rows[-1])
    results = {"environment": environment(), "seed": 0, "budget": BUDGET, "rows": rows}
    if not quick:
        write(out / "results.json", results)
        draw(results, out)


if __name__ == "__main__":
    typer.run(main)
