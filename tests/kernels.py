"""Convolution kernels that are as fast as a test says, measured and fought by nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from anybatch.conv import measure
from anybatch.conv.problem import Problem
from anybatch.engine.executor import Runner

Made = Callable[[Problem, int, str], tuple[float, int, float]]
"""A kernel of a problem, for so many samples, by an algorithm -> seconds, bytes, set-up."""


def measured_as(patch: pytest.MonkeyPatch, made: Made, *, held: bool = False) -> None:
    """Have kernels be measured as `made` says; with `held`, hold as many bytes as it says, too."""
    patch.setattr(measure, "measure", made)
    if held:
        patch.setattr(measure, "held", lambda one, size, name: made(one, size, name)[1])


def bytes_held(one: Problem, size: int, name: str) -> int:
    """Return the bytes that a kernel holds beside its operands."""
    return measure.held(one, size, name)


def fought_as(patch: pytest.MonkeyPatch, fight: Callable[..., float]) -> None:
    """Have duels with torch's own kernel end as `fight` says."""
    patch.setattr(measure, "duel", fight)


class Measured:
    """FFT is the fastest, and more so for more samples; who measures inside a step is found out."""

    def __init__(self) -> None:
        self.now, self.inside = False, 0

    def __call__(self, one: Problem, size: int, name: str) -> tuple[float, int, float]:
        self.inside += self.now
        return (0.1 if name == "fft" else 1.0) * size**0.9, measure.held(one, size, name), 0.0


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    found, run = Measured(), Runner.run

    def watched(self: Runner, *args: Any) -> Tensor:
        found.now = True
        try:
            return run(self, *args)
        finally:
            found.now = False

    measured_as(monkeypatch, found)
    monkeypatch.setattr(Runner, "run", watched)
    return found
