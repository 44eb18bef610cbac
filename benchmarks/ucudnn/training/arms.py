"""Trainings by torch's convolutions and by ours, and whether the two are the same training.

The question is the design's (7.10). In float64 the first 20 steps leave every tensor within 1e-9.
In float32 rounding alone carries trainings apart, so there the measure is how far two trainings by
torch are apart that differ only in the order of the rows of each mini-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations, count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from benchmarks.agbn.learns.arms import MEASURES, Weights, difference
from benchmarks.mbs.real_limit.compare import DOUBLE
from benchmarks.ucudnn.training.tasks import Task

Arm = Literal["torch", "ours"]
ARMS: tuple[Arm, ...] = ("torch", "ours")
ORDERS = (0, 1, 2, 3, 4)
"""Seeds of orders of the rows of a mini-batch; 0 is the order in which they come."""
WORKSPACE = 64 << 20
Found = dict[str, Any]


@contextmanager
def computed(arm: Arm, cache: Path) -> Iterator[anybatch.reports.Convolutions | None]:
    """Have convolutions computed as an arm does."""
    if arm == "torch":
        yield None
        return
    with anybatch.convolutions(WORKSPACE, cache=cache) as found:
        yield found


def begun(task: Task, seed: int, dtype: torch.dtype, device: str) -> tuple[nn.Module, Any]:
    """Return the network of a seed, and its optimizer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = task.make().to(device, dtype)
    return model, torch.optim.SGD(model.parameters(), lr=task.lr, momentum=0.9)


def step(model: nn.Module, optimizer: Any, inputs: Tensor, targets: Tensor) -> float:
    """Take a step, and return the loss before it."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return float(loss.detach())


def train(task: Task, arm: Arm, seed: int, cache: Path, device: str) -> Found:
    """Train once, and return its curves and its seconds."""
    model, optimizer = begun(task, seed, torch.float32, device)
    found: Found = {"arm": arm, "seed": seed, "loss": [], "test_loss": [], "test_accuracy": []}
    times, start = list[float](), perf_counter()
    with computed(arm, cache) as convolutions:
        for epoch in range(task.size.epochs):
            for inputs, targets in task.batches(task.size.batch, seed, epoch):
                begin = perf_counter()
                loss = step(model, optimizer, inputs.to(device), targets.to(device))
                found["loss"].append(loss)
                times.append(perf_counter() - begin)
            for name, figure in zip(
                ("test_loss", "test_accuracy"), tested(model, task, device), strict=True
            ):
                found[name].append(figure)
    found["wall"] = perf_counter() - start
    found |= {"first": times[0], "step": median(times)}
    return found | {"divided": not_torchs(convolutions)}


def tested(model: nn.Module, task: Task, device: str) -> tuple[float, float]:
    """Return loss and accuracy on the tests, in eval mode and in batches of the training's size."""
    loss, right = 0.0, 0
    model.eval()
    with torch.no_grad():
        parts = (torch.split(tensor, task.size.batch) for tensor in task.tests)
        for inputs, targets in zip(*parts, strict=True):
            outputs = model(inputs.to(device)).cpu()
            loss += float(F.cross_entropy(outputs, targets, reduction="sum"))
            right += int((outputs.argmax(1) == targets).sum())
    model.train()
    return loss / len(task.tests[1]), right / len(task.tests[1])


def not_torchs(convolutions: anybatch.reports.Convolutions | None) -> int:
    """Return how many kernels are not torch's own on all samples."""
    if convolutions is None:
        return 0
    return sum(one.divided for one in convolutions.configurations)


def first_steps(
    task: Task, arm: Arm, steps: int, cache: Path, dtype: torch.dtype, device: str, order: int = 0
) -> tuple[Weights, int]:
    """Return all tensors after the first steps of seed 0, and how many kernels were not torch's."""
    model, optimizer = begun(task, 0, dtype, device)
    shuffle, done = torch.Generator().manual_seed(order), 0
    with computed(arm, cache) as convolutions:
        for epoch in count():
            for inputs, targets in task.batches(task.size.compared, 0, epoch):
                rows = torch.randperm(len(targets), generator=shuffle)
                rows = rows if order else torch.arange(len(targets))
                step(model, optimizer, inputs[rows].to(device, dtype), targets[rows].to(device))
                done += 1
                if done == steps:
                    state = model.state_dict().items()
                    found = {k: v.clone() for k, v in state if v.is_floating_point()}
                    return found, not_torchs(convolutions)
    raise AssertionError("an epoch has steps")


def agreement(task: Task, steps: int, cache: Path, device: str) -> Found:
    """Return how far ours is from torch's after the first steps, and may be, in both types.

    And how far all of float32 are from torch's in float64, those of torch as least and most over
    their orders: the order of rows leaves a kernel what it is, and ours is another kernel, so a
    larger distance between the two need not be a larger error.
    """

    def after(arm: Arm, dtype: torch.dtype, order: int = 0) -> tuple[Weights, int]:
        return first_steps(task, arm, steps, cache, dtype, device, order)

    (truth, _), (double, count) = after("torch", torch.float64), after("ours", torch.float64)
    ours, singles = after("ours", torch.float32)
    orders = [after("torch", torch.float32, order)[0] for order in ORDERS]
    pairs = [difference(*pair) for pair in combinations(orders, 2)]
    errors = [difference(one, truth) for one in orders]
    return {
        "steps": steps,
        "batch": task.size.compared,
        "orders": len(ORDERS),
        "float64": {
            "apart": difference(double, truth),
            "divided": count,
            "allowed": dict.fromkeys(MEASURES, DOUBLE),
        },
        "float32": {
            "apart": difference(ours, orders[0]),
            "divided": singles,
            "allowed": {m: max(pair[m] for pair in pairs) for m in MEASURES},
        },
        "to_float64": {
            "ours": difference(ours, truth),
            "least": {m: min(one[m] for one in errors) for m in MEASURES},
            "most": {m: max(one[m] for one in errors) for m in MEASURES},
        },
    }
