"""Targets of types that a backend of ranks does not send, in a loss in which samples meet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.oracle import assert_exact, state_of, undivided
from tests.pool import Pool, ranks
from torch import Tensor, nn

from anybatch import Engine

TYPES = (torch.int16, torch.uint16, torch.uint32, torch.bool, torch.float16, torch.complex64)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with ranks(2) as found:
        yield found


def problem(type_: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double(), torch.randn(7, 4).double(), torch.arange(7).to(type_)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    weights = targets.real if targets.is_complex() else targets
    return (outputs.square().mean(1) * weights.double()).mean().sqrt() + outputs.var()


def on_rank(rank: int, _size: int, type_: torch.dtype) -> dict[str, Tensor]:
    model, x, y = problem(type_)
    own = slice(0, 4) if rank == 0 else slice(4, 7)
    return state_of(model, Engine(model, loss, micro_batch=2).backward(x[own], y[own]))


@pytest.mark.large(few=3)
@pytest.mark.parametrize("type_", TYPES)
def test_the_loss_is_that_of_all_ranks(pool: Pool, type_: torch.dtype) -> None:
    model, x, y = problem(type_)
    want = undivided(model, loss, x, y)
    for got in pool.run(on_rank, type_):
        assert_exact(got, want)
