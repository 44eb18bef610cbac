"""What steps hold under the meter, and random trainings whose steps are held against a plan."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from tests.chance import CLASSES, LOSSES, Net
from torch import Tensor, nn

import anybatch
from anybatch import Engine
from anybatch.memory.meter import Meter

CPU = torch.device("cpu")


def metered(there: Mapping[str, Iterable[Tensor]] | None = None) -> Meter:
    """A meter of the live bytes of the host: of those that are there, by owner, and of new ones."""
    return Meter(CPU, there)


def held(engine: Engine, rows: tuple[Tensor, Tensor], **options: Any) -> int:
    """The most bytes that two steps hold, beside the optimizer's state.

    Where tensors leave, the first records what the second follows.
    """
    model, most = engine.model, 0
    for _ in range(2):
        model.zero_grad()
        with metered({"there": [*model.parameters(), *model.buffers()]}) as meter:
            engine.backward(*rows, **options)
        most = max(most, meter.peak)
    model.zero_grad()
    return most


def assert_a_budget_is_respected(model: nn.Module, loss: Any, rows: Any, share: float) -> None:
    """Assert that a step stays within what was foreseen, and that within a budget.

    Args:
        model: what is trained.
        loss: its loss.
        rows: inputs; the loss is inside the model, or needs no targets.
        share: of the way from the least budget to that of an undivided batch.
    """
    memory = anybatch.plan(model, loss, (rows, None), memory="1GiB", timed=False).memory
    assert memory is not None
    budget = memory.floor + int((memory.undivided - memory.floor) * share)
    engine = Engine(model, loss, memory=budget)
    engine.backward(rows)
    assert engine.last is not None
    assert engine.last.peak_bytes is not None
    assert engine.last.predicted_bytes is not None
    assert engine.last.peak_bytes <= engine.last.predicted_bytes <= budget


class Drawn(NamedTuple):
    """A random model, and rows of the shape that it takes."""

    model: nn.Module
    loss: Any
    sides: list[int]

    def rows(self, size: int) -> tuple[Tensor, Tensor]:
        """As many rows; something in them is not ignored."""
        dtype = next(self.model.parameters()).dtype
        rows = torch.randn(size, 3, *self.sides, dtype=dtype), torch.randint(CLASSES, (size,))
        rows[1][0] = 0
        return rows


def drawn(rng: random.Random, seed: int) -> Drawn:
    """Draw a model and its loss."""
    torch.manual_seed(seed)
    dims = rng.randint(0, 2)
    sides = [rng.randint(2, 9) for _ in range(dims)]
    model: nn.Module = Net(rng, dims, drops=rng.random() < 0.3)
    model = model.double() if rng.random() < 0.4 else model
    loss, _ = rng.choice(LOSSES)
    return Drawn(model, loss, sides)
