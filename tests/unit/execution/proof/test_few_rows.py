"""Models that few rows do not suit: a clear refusal, or the batch as it is where that fits."""

from __future__ import annotations

import pytest
import torch
from tests.oracle import assert_exact, state_after, undivided
from tests.unit.execution.proof.nets import batch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine
from anybatch.errors import BatchError, BudgetError, NotExactError


class Squeezed(nn.Module):
    """One number a sample, without a dimension of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).squeeze()


@pytest.mark.parametrize(("n", "micro_batch"), [(6, 1), (7, 3), (7, 2)])
def test_outputs_of_one_sample_that_lose_its_dimension_are_refused(
    n: int, micro_batch: int
) -> None:
    net, (x, _) = Squeezed().double(), batch(n)
    with pytest.raises(BatchError, match=r"outputs of one sample has shape \(\).*squeeze\(-1\)"):
        Engine(net, F.mse_loss, micro_batch=micro_batch).backward(x, x[:, 0])
    assert net.head.weight.grad is None


class Penalty(nn.Module):
    """BatchNorm, and the gradient of what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = self.last(self.norm(self.first(x)).tanh())
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + slope.square().sum(1, keepdim=True)


def test_batchnorm_that_is_differentiated_twice_is_refused() -> None:
    with pytest.raises(NotExactError, match="must be differentiated once"):
        Engine(Penalty().double(), F.cross_entropy, micro_batch=5).backward(*batch(12))


class Chunks(nn.Module):
    """Batch normalisation of two halves: of three rows one has a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.norm(half) for half in self.first(x).chunk(2)]))


def test_halves_that_cannot_be_rehearsed_on_few_rows_go_undivided_where_that_fits() -> None:
    net, (x, y) = Chunks().double(), batch(96)
    engines = []

    def run(model: nn.Module) -> Tensor:
        engines.append(Engine(model, F.cross_entropy, memory="100MiB"))
        return engines[0].backward(x, y)

    assert_exact(state_after(net, run), undivided(net, F.cross_entropy, x, y))
    assert engines[0].plan is not None
    assert str(engines[0].plan.exact) == "shown: the batch is not divided"


def test_halves_that_do_not_fit_undivided_are_refused() -> None:
    with pytest.raises(BudgetError, match="undivided it needs"):
        Engine(Chunks().double(), F.cross_entropy, memory="64KiB").backward(*batch(96))
