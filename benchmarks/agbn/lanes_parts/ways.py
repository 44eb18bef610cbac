"""One step taken in five ways, and how they are timed: all of them in every round.

undivided   torch alone, the whole batch at once
plain       a loop by hand over micro-batches: each is normalised by itself, nobody waits
stays       lanes, and all that waits stays in memory
watched     the same, and every kernel is shown to the pager, which has nothing to move
leaves      lanes, and what waits leaves for a file
"""

import copy
import gc
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from time import perf_counter, process_time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine
from benchmarks.mbs.models import ResNet

PIXELS = 32
AMPLE = "1000GiB"
ROOMS = {"stays": None, "watched": 1 << 60, "leaves": 0}
WAYS = ("undivided", "plain", *ROOMS)
Run = Callable[[nn.Module, Tensor, Tensor], None]
Rounds = list[dict[str, list[float]]]


@dataclass(frozen=True)
class Subject:
    """What is trained: a network, a batch, and the size of its micro-batches."""

    model: nn.Module
    x: Tensor
    y: Tensor
    micro_batch: int


def normalised(model: nn.Module) -> nn.Module:
    """Return the model with BatchNorm in the place of GroupNorm."""
    for name, child in model.named_children():
        if isinstance(child, nn.GroupNorm):
            setattr(model, name, nn.BatchNorm2d(child.num_channels))
        else:
            normalised(child)
    return model


def undivided(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Torch alone."""
    torch.autograd.backward(F.cross_entropy(model(x), y))


def local(micro_batch: int) -> Run:
    """Return the loop by hand, whose BatchNorm is that of each micro-batch."""

    def run(model: nn.Module, x: Tensor, y: Tensor) -> None:
        parts = zip(torch.split(x, micro_batch), torch.split(y, micro_batch), strict=True)
        for part, target in parts:
            share = len(part) / len(x)
            torch.autograd.backward(F.cross_entropy(model(part), target) * share)

    return run


def network(width: int, blocks: tuple[int, ...], norms: int | None = None) -> nn.Module:
    """A ResNet for small images with BatchNorm; `norms` of them, evenly spread, or all."""
    model = normalised(ResNet(10, width, blocks))
    named = [name for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)]
    count = len(named) if norms is None else norms
    retained = {named[index * len(named) // count] for index in range(count)}
    for name in named:
        if name not in retained:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, nn.Identity())
    return model


def subject(
    width: int, blocks: tuple[int, ...], batch: int, micro_batch: int, norms: int | None = None
) -> Subject:
    """A network with random images for it."""
    torch.manual_seed(0)
    x, y = torch.randn(batch, 3, PIXELS, PIXELS), torch.randint(10, (batch,))
    return Subject(network(width, blocks, norms), x, y, micro_batch)


def in_lanes(workload: Subject, way: str) -> Engine:
    """An engine that obeys a plan with the room of a way."""
    model = copy.deepcopy(workload.model)
    planned = Engine(model, F.cross_entropy, memory=AMPLE, micro_batch=workload.micro_batch)
    plan = planned.foresee(workload.x, workload.y, timed=False)
    assert plan.memory is not None
    plan = replace(plan, memory=replace(plan.memory, waiting_capacity=ROOMS[way]))
    return Engine(model, F.cross_entropy, plan=plan)


def stepper(workload: Subject, way: str) -> Callable[[], None]:
    """What takes a step from empty gradients."""
    x, y = workload.x, workload.y
    if way in ROOMS:
        engine = in_lanes(workload, way)

        def step() -> None:
            engine.model.zero_grad()
            engine.backward(x, y)

        return step
    model = copy.deepcopy(workload.model)
    run: Run = undivided if way == "undivided" else local(workload.micro_batch)

    def by_hand() -> None:
        model.zero_grad()
        run(model, x, y)

    return by_hand


def seconds(step: Callable[[], None]) -> list[float]:
    """Wall seconds and the processor's seconds of one call."""
    gc.collect()
    wall, cpu = perf_counter(), process_time()
    step()
    return [perf_counter() - wall, process_time() - cpu]


def rounds(workload: Subject, ways: Iterable[str], count: int, warm: int = 2) -> Rounds:
    """Seconds of every way in every round; the order turns around from one to the next."""
    steps = {way: stepper(workload, way) for way in ways}
    for _ in range(warm):
        for step in steps.values():
            step()
    found = []
    for index in range(count):
        order = list(steps) if index % 2 else list(reversed(steps))
        found.append({way: seconds(steps[way]) for way in order})
    return found


def against(found: Rounds, way: str, other: str, clock: int = 0) -> list[float]:
    """Least, median and most of time(way) / time(other) over the rounds."""
    ratios = [one[way][clock] / one[other][clock] for one in found]
    return [round(f(ratios), 3) for f in (min, statistics.median, max)]
