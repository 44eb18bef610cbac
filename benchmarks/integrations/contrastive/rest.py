"""Where a step's time goes: the encoders' forwards, autograd's backwards, and the rest.

The rest is a way's own: slicing, keeping, comparing, and the forward of the loss. The kernels are
the same for all, so what a way costs more than another one is told by the rest.
"""

import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.integrations.contrastive.encoders import SUBJECTS
from benchmarks.integrations.contrastive.ways import MODULES, WAYS

COMPARED = ("gradcache", "anybatch, joint", "anybatch")


class Clock:
    """Adds up the milliseconds of calls, by name."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def of(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return `fn`, timed."""

        def timed(*args: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return fn(*args, **named)
            finally:
                spent = 1e3 * (time.perf_counter() - start)
                self.spent[name] = self.spent.get(name, 0.0) + spent

        return timed


def rest(name: str, batch: int, n: int, count: int) -> dict[str, dict[str, float]]:
    """Medians of milliseconds of a step's forwards, backwards and rest, by way, taken in turn."""
    subject, clock = SUBJECTS[name], Clock()
    rows, steps = subject.rows(batch), {}
    for way in COMPARED:
        if way in MODULES and find_spec(MODULES[way]) is None:
            continue
        encoders = subject.encoders()
        for encoder in dict.fromkeys(encoders):
            _timed(encoder, clock)
        steps[way] = WAYS[way](*encoders, n)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in steps}
    backward = clock.of("backward", torch.autograd.backward)
    with mock.patch.object(torch.autograd, "backward", backward):
        for index in range(-2, count):
            order = list(steps) if index % 2 else list(reversed(steps))
            for way in order:
                clock.spent.clear()
                start = time.perf_counter()
                steps[way](*rows)
                elapsed = 1e3 * (time.perf_counter() - start)
                if index >= 0:
                    found[way].append(clock.spent | {"rest": elapsed - sum(clock.spent.values())})
    return {
        way: {part: round(statistics.median(s[part] for s in runs), 3) for part in runs[0]}
        for way, runs in found.items()
    }


def _timed(encoder: nn.Module, clock: Clock) -> None:
    encoder.forward = clock.of("forward", encoder.forward)
