"""A step of each way: the error of its gradient, its bytes, and its seconds beside ours."""

import statistics
import time
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import anybatch
from anybatch.memory.meter import FOREIGN, Meter
from anybatch.tools.exactness import error_of
from benchmarks.integrations.contrastive.encoders import SUBJECTS, Subject
from benchmarks.integrations.contrastive.ways import MODULES, TEMPERATURE, WAYS, Step, pair

DRAWS = "anybatch, rng batch"
Encoders = tuple[nn.Module, nn.Module]
Times = tuple[float, float]
"""Seconds of a step, on the wall and of the processor."""


def of_batch(f: nn.Module, g: nn.Module, n: int) -> Step:
    """Ours, drawing as the whole batch would."""
    loss = anybatch.contrastive(temperature=TEMPERATURE)
    engine = anybatch.Engine(pair(f, g), loss, micro_batch=n, rng="batch")
    return lambda x, y: engine.backward((x, y))


def ways(encoders: Encoders) -> dict[str, Any]:
    """The ways that are installed and take such encoders."""
    found = {
        name: make
        for name, make in WAYS.items()
        if name not in MODULES or find_spec(MODULES[name]) is not None
    }
    if encoders[0] is not encoders[1]:
        found.pop("sentence-transformers", None)
    return found


def gradients(subject: Subject, make: Any, batch: int, n: int) -> dict[str, Tensor]:
    """What a way leaves in ``.grad`` of encoders in float64, and its loss."""
    f, g = subject.encoders()
    model = pair(f, g).double()
    rows = [t.double() if t.is_floating_point() else t for t in subject.rows(batch)]
    torch.manual_seed(0)
    loss = make(f, g, n)(*rows)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss, **found}


def errors(names: list[str], batch: int, n: int) -> dict[str, dict[str, float]]:
    """The worst error of each way's gradients, by subject: ragged micro-batches of `n`."""
    found = {}
    for name in names:
        subject, drops = SUBJECTS[name], "dropout" in name
        every = ways(subject.encoders()) | ({DRAWS: of_batch} if drops else {})
        truth = gradients(subject, every.pop("undivided"), batch, batch)
        found[name] = {
            way: max(error_of(gradients(subject, make, batch, n), truth).values())
            for way, make in every.items()
        }
    return found


def peaks(name: str, batch: int, n: int) -> dict[str, int]:
    """Live bytes at the peak of a step that is not the first, by way."""
    subject, found = SUBJECTS[name], {}
    for way, make in ways(subject.encoders()).items():
        f, g = subject.encoders()
        rows, step, parameters = subject.rows(batch), make(f, g, n), list(pair(f, g).parameters())
        step(*rows)
        for p in parameters:
            p.grad = None
        with Meter(rows[0].device, {"parameters": parameters, FOREIGN: rows}) as meter:
            step(*rows)
        found[way] = int(meter.peak)
    return found


def speed(name: str, batch: int, n: int, count: int) -> dict[str, dict[str, float]]:
    """Seconds of a step of ours as a share of each other way's, in turn, both ways around."""
    subject = SUBJECTS[name]
    rows, made = subject.rows(batch), ways(subject.encoders())
    steps = {way: make(*subject.encoders(), n) for way, make in made.items()}
    for step in steps.values():
        step(*rows)
    times: dict[str, list[Times]] = {way: [] for way in steps}
    for index in range(count):
        order = list(steps) if index % 2 else list(reversed(steps))
        for way in order:
            wall, processor = time.perf_counter(), time.process_time()
            steps[way](*rows)
            times[way].append((time.perf_counter() - wall, time.process_time() - processor))
    return {way: compared(times["anybatch"], times[way]) for way in steps if way != "anybatch"}


def compared(ours: list[Times], theirs: list[Times]) -> dict[str, float]:
    """Medians of the ratios of the pairs."""
    walls = [a[0] / b[0] for a, b in zip(ours, theirs, strict=True)]
    processors = [a[1] / b[1] for a, b in zip(ours, theirs, strict=True)]
    return {
        "ratio": round(statistics.median(walls), 4),
        "low": round(min(walls), 4),
        "high": round(max(walls), 4),
        "processor": round(statistics.median(processors), 4),
        "seconds": round(statistics.median(wall for wall, _ in theirs), 4),
    }
