"""The convolution kernels of a training step of a network, found out by listening to one.

Two samples pass through the network while torch's own kernels run: a kernel is the same for any
number of samples. What is computed several times, such as the blocks of a stage, is one kernel with
a count. Layers have their names from the order of their forwards.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch

from anybatch.conv.intercept import intercepted
from anybatch.conv.problem import KERNELS, Problem
from benchmarks.ucudnn.models import Network

SAMPLES = 2


@dataclass(frozen=True)
class Heard:
    """A kernel of a network.

    Attributes:
        layer: the first layer that has it, such as "conv2".
        problem: what it computes.
        count: how many layers have it.
    """

    layer: str
    problem: Problem
    count: int


def listen(network: Network, device: str = "cpu") -> list[Heard]:
    """Return the kernels of a step of a network, layer by layer, for a type of device.

    A layer whose input needs no gradient has no kernel for it, as in training.
    """
    model, x = network.make(), torch.randn(SAMPLES, *network.image, requires_grad=network.inner)
    heard = list[Problem]()

    def note(problem: Problem, *_: Any) -> None:
        heard.append(problem)

    with intercepted("cpu", note):
        model(x).sum().backward()
    counts, names = Counter(heard), dict[Problem, str]()
    for at, problem in enumerate((p for p in heard if p.kernel == "forward"), 1):
        names.setdefault(problem, f"conv{at}")
    return [
        Heard(name, replace(problem, device=device), counts[problem])
        for first, name in names.items()
        for problem in (replace(first, kernel=kernel) for kernel in KERNELS)
        if counts[problem]
    ]
