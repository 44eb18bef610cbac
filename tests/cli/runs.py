"""Runs that end early, and what makes two ends the same."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anybatch.cli.progress import Gauge, Progress

TIMES = ("seconds", "computing_seconds", "waiting_seconds", "images_per_second")
MEASURED = (*TIMES, "peak_bytes")  # the first step of a process is measured
OWN = (*TIMES, "train_seconds", "resumed")  # what two ends may differ in


class Stopped(Progress):
    """Progress that remembers what was said, and sends a signal at the `at`-th micro-batch."""

    def __init__(self, at: int = 0, number: int = signal.SIGINT) -> None:
        self.at, self.number, self.done = at, number, 0
        self.said: list[str] = []
        self.losses: list[float] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def micro_batch(self, samples: int) -> None:
        self.done += 1
        if self.done == self.at:
            signal.raise_signal(self.number)

    def step(self, loss: float, held: Gauge | None = None) -> None:
        self.losses.append(loss)


class Drawing(nn.Module):
    """Draws from every generator there is, and moves buffers."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(3)
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(54, classes))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            x = x * (1 + 0.1 * random.random()) + 0.1 * float(np.random.normal())
        out: Tensor = self.head(self.body(x))
        return out


def drawing(num_classes: int, in_channels: int) -> nn.Module:
    return Drawing(num_classes, in_channels)


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's log without what was measured."""
    at = folder / "metrics.jsonl"
    lines = at.read_text().splitlines() if at.exists() else []
    return [{k: v for k, v in json.loads(line).items() if k not in MEASURED} for line in lines]


def checkpoint(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / "checkpoint.pt", weights_only=True)
    return found


def equal(one: Any, other: Any) -> bool:
    """Say whether two trees are the same bit for bit, but for times."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        keys = [key for key in one if key not in OWN]
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in keys)
    if isinstance(one, list | tuple):
        pairs = zip(one, other, strict=True)
        return len(one) == len(other) and all(equal(a, b) for a, b in pairs)
    return bool(one == other)


def same_end(one: Path, other: Path) -> bool:
    """Say whether two runs left the same checkpoint and the same log."""
    return equal(checkpoint(one), checkpoint(other)) and rows(one) == rows(other)
