"""One network trained one way in a process of its own: what its tensors hold at the peak.

Whoever started the process looks at it from outside, twice, and the process waits for that: when a
step of two samples has been taken and counted, so that torch has set up and imported what it does
once (a dispatch mode brings hundreds of modules with it); and when two steps were taken.
After that it takes as many more as are asked for, and says how long each has run.
"""

import gc
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine
from anybatch.cli.models.resnet import resnet
from anybatch.cli.models.unet import UNet
from anybatch.memory.meter import Meter
from benchmarks.agbn.lanes_parts.ways import network

STEPS = 2
Results = dict[str, Any]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Net:
    """A network, its loss, the sides of its images, and the samples of a batch."""

    make: Callable[[], nn.Module]
    loss: Loss
    pixels: int
    batch: int

    def rows(self) -> tuple[Tensor, Tensor]:
        """A batch of random images, with classes or with masks."""
        x = torch.randn(self.batch, 3, self.pixels, self.pixels)
        if self.loss is F.cross_entropy:
            return x, torch.randint(10, (self.batch,))
        return x, (torch.rand(self.batch, 1, self.pixels, self.pixels) > 0.7).float()


def _resnet(depth: int, **options: Any) -> Callable[[], nn.Module]:
    return lambda: resnet(depth, num_classes=10, norm="batch", **options)


NETS = {
    "ResNet-18": Net(_resnet(18, stem="cifar"), F.cross_entropy, 32, 256),
    "U-Net": Net(lambda: UNet(width=32, norm="batch"), F.binary_cross_entropy_with_logits, 64, 128),
    "ResNet-50": Net(_resnet(50), F.cross_entropy, 64, 256),
    "small": Net(lambda: network(16, (2, 2, 2, 2)), F.cross_entropy, 32, 256),
}


def stepper(net: Net, model: nn.Module, way: str, micro_batch: int) -> Callable[[], None]:
    """What takes a step."""
    x, y = net.rows()
    if way == "lanes":
        engine = Engine(model, net.loss, micro_batch=micro_batch)

        def in_lanes() -> None:
            engine.backward(x, y)

        return in_lanes
    size = net.batch if way == "undivided" else micro_batch

    def by_hand() -> None:
        for part, target in zip(x.split(size), y.split(size), strict=True):  # type: ignore[no-untyped-call]
            torch.autograd.backward(net.loss(model(part), target) * (len(part) / len(x)))

    return by_hand


def trained(name: str, way: str, lanes: int) -> tuple[Results, Callable[[], None]]:
    """Take two steps; live bytes at the peak of the second, what is always there, and a step."""
    torch.manual_seed(0)
    net = NETS[name]
    model = net.make()
    states = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    found = {"states": states, "gradients": sum(p.nbytes for p in model.parameters()), "peak": 0}
    x, y = net.rows()
    with Meter(torch.device("cpu"), {}):
        torch.autograd.backward(net.loss(model(x[:2]), y[:2]))
    model.zero_grad()
    gc.collect()
    wait("ready")
    step = stepper(net, model, way, net.batch // lanes)
    for index in range(STEPS):
        model.zero_grad()
        if index < STEPS - 1:
            step()
            continue
        existing = {"parameters": model.parameters(), "buffers": model.buffers()}
        with Meter(torch.device("cpu"), existing) as meter:
            step()
        found["peak"] = meter.peak
    model.zero_grad()
    return found, step


def wait(said: str) -> str:
    """Say something to whoever started the process, and wait for an answer."""
    print(said, flush=True)
    return sys.stdin.readline().strip()


def main() -> None:
    """Take two steps that are looked at, and then those that are asked for."""
    torch.set_num_threads(1)
    found, step = trained(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    said = json.dumps(found)
    while wait(said) == "step":
        began = perf_counter()
        step()
        said = str(perf_counter() - began)


if __name__ == "__main__":
    main()
