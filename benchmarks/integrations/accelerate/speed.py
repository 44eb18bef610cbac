"""Seconds of a step of both loops at equal micro-batch, run in turn: loader and update count."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine
from benchmarks.integrations.accelerate.errors import accelerated
from benchmarks.integrations.accelerate.theirs import loader_of
from benchmarks.integrations.problems import Rows

STEPS, SETTLED = 6, 2


@dataclass(frozen=True)
class Subject:
    """What is trained: a model, rows, micro-batch and batch of one process."""

    model: Callable[[], nn.Module]
    rows: Callable[[int], Rows]
    micro_batch: int = 8
    batch: int = 32


class Reader(nn.Module):
    """A small encoder of texts: [n, 32] -> [n, 32, 1000]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 96)
        layer = nn.TransformerEncoderLayer(96, 4, 192, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(96, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores."""
        out: Tensor = self.head(self.layers(self.embedding(x)))
        return out


def viewer() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.GroupNorm(4, 64),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def texts(count: int) -> Rows:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(1000, (count, 32), generator=draw)
    return x, x.roll(-1, 1)


def images(count: int) -> Rows:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 32, 32, generator=draw), torch.randint(
        10, (count,), generator=draw
    )


def loss(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))


SUBJECTS = {
    "a text encoder": Subject(Reader, texts),
    "a network of images": Subject(viewer, images),
}


def theirs(accelerator: Any, subject: Subject) -> Callable[[], None]:
    """Their loop: an epoch of `STEPS` steps."""
    run, loader, model, optimizer = _prepared(accelerator, subject, subject.micro_batch)
    steps = subject.batch // subject.micro_batch

    def epoch() -> None:
        accelerator.gradient_accumulation_steps = steps
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(run(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

    return epoch


def ours(accelerator: Any, subject: Subject) -> Callable[[], None]:
    """The same with an engine."""
    accelerator.gradient_accumulation_steps = 1
    run, loader, model, optimizer = _prepared(accelerator, subject, subject.batch)
    engine = Engine(model, run, optimizer=optimizer, micro_batch=subject.micro_batch)

    def epoch() -> None:
        accelerator.gradient_accumulation_steps = 1
        for x, y in loader:
            engine.backward(x, y)
            optimizer.step()
            optimizer.zero_grad()

    return epoch


def _prepared(accelerator: Any, subject: Subject, size: int) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(0)
    model = subject.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = subject.rows(subject.batch * STEPS * accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader_of(rows, size))
    return loss, loader, model, optimizer


def seconds(epoch: Callable[[], None]) -> tuple[float, float]:
    """Seconds of a step, on the wall and of the processor."""
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter(), time.process_time()
    epoch()
    wall, processor = time.perf_counter() - start[0], time.process_time() - start[1]
    return wall / STEPS, processor / STEPS


def pairs(count: int) -> dict[str, dict[str, float]]:
    """Median ratios of ours to theirs, both ways in turn, by subject."""
    torch.set_num_threads(1)
    found = {}
    with accelerated(1) as accelerator:
        for name, subject in SUBJECTS.items():
            loops = {"ours": ours(accelerator, subject), "theirs": theirs(accelerator, subject)}
            for _ in range(SETTLED):
                for loop in loops.values():
                    seconds(loop)
            both = []
            for index in range(count):
                order = ["ours", "theirs"] if index % 2 else ["theirs", "ours"]
                both.append({way: seconds(loops[way]) for way in order})
            found[name] = summary(both)
    return found


def summary(both: list[dict[str, tuple[float, float]]]) -> dict[str, float]:
    """Medians of paired ratios, and of the seconds that a step of ours takes more."""
    walls = [one["ours"][0] / one["theirs"][0] for one in both]
    more = [one["ours"][0] - one["theirs"][0] for one in both]
    processor = [one["ours"][1] / one["theirs"][1] for one in both]
    return {
        "ratio": round(statistics.median(walls), 4),
        "low": round(min(walls), 4),
        "high": round(max(walls), 4),
        "processor": round(statistics.median(processor), 4),
        "more": round(statistics.median(more), 5),
        "seconds": round(statistics.median(one["theirs"][0] for one in both), 4),
    }
