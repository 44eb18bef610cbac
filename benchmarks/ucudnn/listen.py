"""The convolution kernels of a training step of a network, found out by listening to one.

Two samples pass through the network while torch's own kernels run: a kernel is the same for any
number of samples. What is computed several times, such as the blocks of a stage, is one kernel with
a count. Layers have numbers in the order in which the network has them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from anybatch.conv.dispatch import CONVOLUTIONS, KernelRecorder
from anybatch.conv.problem import KERNELS, Problem
from benchmarks.ucudnn.models import Network

SAMPLES = 2


@dataclass(frozen=True)
class RecordedKernel:
    """A kernel of a network.

    Attributes:
        layer: the first layer that has it, such as "conv2".
        problem: what it computes.
        count: how many layers have it.
    """

    layer: str
    problem: Problem
    count: int


def listen(network: Network, device: str = "cpu") -> list[RecordedKernel]:
    """Return the kernels of a step of a network, layer by layer, for a type of device.

    A layer whose input needs no gradient has no kernel for it, as in training.
    """
    model, x = network.make(), torch.randn(SAMPLES, *network.image, requires_grad=network.inner)
    with KernelRecorder(model) as recorder:
        model(x).sum().backward()
    order = [name for name, module in model.named_modules() if isinstance(module, CONVOLUTIONS)]
    counts = {problem: count for (problem, _), count in recorder.keys.items()}
    firsts = {
        min(order.index(name) for name in recorder.layers(problem)): problem
        for problem in counts
        if problem.kernel == "forward"
    }
    return [
        RecordedKernel(f"conv{at + 1}", replace(problem, device=device), counts[problem])
        for at, first in sorted(firsts.items())
        for problem in (replace(first, kernel=kernel) for kernel in KERNELS)
        if problem in counts
    ]
