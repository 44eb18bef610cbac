"""Buffers that forward moves, on ranks that have no samples in a step: the next one needs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_of
from tests.pool import Pool, ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from anybatch import Engine

SIZES = ((13, 0, 9), (0, 0, 22), (8, 7, 7), (0, 22, 0), (1, 12, 9))
"""Samples of each rank, step for step."""


class Counting(nn.Module):
    """Layers whose weights, and a factor, are others in every forward; one buffer is late."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = spectral_norm(nn.Linear(6, 8)), nn.Linear(8, 3)
        self.calls: Tensor
        self.late: Tensor | None
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.late = self.calls / 2
        found: Tensor = self.last((self.first(x) * (1 + self.late / 10)).tanh())
        return found


def coupled(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out - out.mean(0), y)


LOSSES: dict[str, Any] = {"streamed": F.cross_entropy, "gathered": coupled}


def made() -> Counting:
    torch.manual_seed(1)
    return Counting().double()


def batch(number: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(number)
    return torch.randn(22, 6).double(), torch.randint(3, (22,))


def single_process(loss: str) -> list[dict[str, Tensor]]:
    """What torch leaves after each step."""
    model, found = made(), []
    for number in range(len(SIZES)):
        x, y = batch(number)
        model.zero_grad()
        value = LOSSES[loss](model(x), y)
        value.backward()
        found.append(state_of(model, value))
        found.append(state_of(model, LOSSES[loss](model(x), y)))
    return found


def on_rank(rank: int, _size: int, loss: str, micro_batch: int) -> list[dict[str, Tensor]]:
    model, found = made(), []
    engine = Engine(model, LOSSES[loss], micro_batch=micro_batch)
    for number, sizes in enumerate(SIZES):
        begin = sum(sizes[:rank])
        x, y = (t[begin : begin + sizes[rank]] for t in batch(number))
        model.zero_grad()
        found.append(state_of(model, engine.backward(x, y)))
        found.append(state_of(model, engine.evaluate(x, y)))
    return found


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with ranks(len(SIZES[0])) as found:
        yield found


@pytest.mark.large(few=2)
@pytest.mark.parametrize("micro_batch", [1, 5, 22])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_rank_without_samples_moves_them_too(pool: Pool, loss: str, micro_batch: int) -> None:
    want = single_process(loss)
    for got in pool.run(on_rank, loss, micro_batch):
        for here, there in zip(got, want, strict=True):
            assert_exact(here, there)
