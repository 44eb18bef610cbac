"""AGBN's memory monger: the largest batch of ResNet-50 for segmentation on one GPU, 3 and then 8.

AGBN says of Cityscapes that at most 3 images fit with ResNet-50 on one GPU (a GTX 1080 Ti, 11 GB),
and 8 with a memory monger, which drops cheap results and plans the rest sublinearly. It names
neither the image size nor the head. Here the network has output stride 8 and a head of two
convolutions, and images of 896 x 896, at which 3 fit in memory; bytes are those of a trace on
shapes: forward, loss, backward, and SGD with momentum in float32.

`in memory` is plain autograd. `stretches` is checkpointing of equal stretches, the best number of
them; `cheap` recomputes BatchNorm, ReLU and joins; `offload` is the least budget with which a
schedule exists, all other tensors offloaded. Every size is traced, and so is the next one, which
does not fit. Seconds are those of a roofline model of that GPU, over the same step in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from anybatch.cli.models.resnet import Residual, resnet
from anybatch.core.plan_sections import Link
from anybatch.offloading.policy import plan
from anybatch.offloading.schedule import Trace, simulate
from benchmarks.environment import environment
from benchmarks.results import console, write
from benchmarks.simulators.machine import Machine
from benchmarks.simulators.recompute import cheap
from benchmarks.simulators.sublinear import sublinear
from benchmarks.simulators.tracing import trace_step

HERE = Path(__file__).parent
BUDGET = 11 << 30
GPU = Machine("GTX 1080 Ti, PCIe 3", 11.3e12, 484e9, Link(12e9, 12e9))
IMAGE = 896
CLASSES = 19
STRETCHES = (4, 8, 12, 16)
RATES = (1,) * 7 + (2,) * 6 + (4,) * 3
"""Dilation of the blocks of ResNet-50, in place of the last two strides."""


def network() -> nn.Sequential:
    """Make the network: [n, 3, H, W] -> logits [n, 19, H, W]."""
    layers = list(resnet(50, norm="batch"))[:-3]  # without pooling and classifier
    blocks = [layer for layer in layers if isinstance(layer, Residual)]
    for block, rate in zip(blocks, RATES, strict=True):
        for conv in (module for module in block.modules() if isinstance(module, nn.Conv2d)):
            if rate > 1:
                conv.stride = (1, 1)
                conv.dilation = (rate, rate)
                conv.padding = (rate * (conv.kernel_size[0] // 2),) * 2
    head = [nn.Conv2d(2048, 512, 3, padding=1, bias=False), nn.BatchNorm2d(512), nn.ReLU(True)]
    up = nn.Upsample((IMAGE, IMAGE), mode="bilinear", align_corners=False)
    return nn.Sequential(*layers, *head, nn.Conv2d(512, CLASSES, 1), up)


def _stretches(trace: Trace) -> Trace:
    return min((sublinear(trace, k) for k in STRETCHES), key=lambda step: step.peak)


WAYS: dict[str, Callable[[Trace], Trace]] = {
    "in memory": lambda trace: trace,
    "stretches": _stretches,
    "cheap": cheap,
    "offload": lambda trace: trace,
}


def largest(way: str, traced: Callable[[int], Trace], budget: int) -> dict[str, Any]:
    """Return the largest batch of a way, what it holds, and what it costs."""
    rewritten = WAYS[way]

    def bytes_of(n: int) -> int:
        step = rewritten(traced(n))
        return step.floor if way == "offload" else step.peak

    a, b = bytes_of(1), bytes_of(2)
    n = max(1, 1 + (budget - a) // (b - a))  # near a straight line; looked at on both sides
    while n > 1 and bytes_of(n) > budget:
        n -= 1
    while bytes_of(n + 1) <= budget:
        n += 1
    timed, step = GPU.timed(traced(n)), GPU.timed(rewritten(traced(n)))
    seconds = step.seconds
    if way == "offload":
        seconds = simulate(step, plan(step, budget, GPU.link), GPU.link).seconds
    console.print(f"{way}: {n}")
    return {"batch": n, "bytes": bytes_of(n), "seconds": seconds / timed.seconds}


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
) -> None:
    """Trace, count, and write results.json."""
    model, loss = network(), nn.CrossEntropyLoss()

    @cache
    def traced(n: int) -> Trace:
        return trace_step(model, loss, (n, 3, IMAGE, IMAGE), (n, IMAGE, IMAGE))

    ways = list(WAYS)[:1] if quick else list(WAYS)
    found = {way: largest(way, traced, BUDGET) for way in ways}
    facts = {"budget": BUDGET, "image": IMAGE, "machine": GPU.name}
    write(out / "results.json", {"environment": environment(), "ways": found, **facts})


if __name__ == "__main__":
    typer.run(main)
