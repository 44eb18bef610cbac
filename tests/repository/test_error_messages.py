"""What was an error of torch's, or an assertion of ours, is one sentence with what to do."""

from __future__ import annotations

import pytest
import torch
from tests.oracle import assert_exact, copy_of, state_of
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine
from anybatch.errors import BudgetError, NotExactError, NotYetError

N = 7


class Squeezed(nn.Module):
    """Takes out every dimension of size 1, before BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 3, 8, 8] -> [n, 4]."""
        pooled = F.adaptive_avg_pool2d(self.conv(x), 1)
        return self.last(self.norm(pooled.squeeze()))


class Slopes(nn.Module):
    """Differentiates with torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 6] -> [n, 4]."""
        return self.last(torch.func.grad(lambda z: self.first(z).tanh().sum())(x))


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_a_forward_that_fails_on_one_sample_is_reported(micro_batch: int) -> None:
    """It was torch's own ValueError of dimensions."""
    x, y = torch.randn(N, 3, 8, 8), torch.randint(4, (N,))
    model = Squeezed()
    with pytest.raises(NotExactError, match=r"one sample.*fails on it.*flatten\(1\)"):
        Engine(model, F.cross_entropy, micro_batch=micro_batch).backward(x, y)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_forward_that_never_gets_one_sample_may_fail_on_it() -> None:
    x, y = torch.randn(8, 3, 8, 8).double(), torch.randint(4, (8,))
    model = Squeezed().double()
    full = copy_of(model)
    expected = F.cross_entropy(full(x), y)
    expected.backward()  # type: ignore[no-untyped-call]
    found = Engine(model, F.cross_entropy, micro_batch=4).backward(x, y)
    assert_exact(state_of(model, found), state_of(full, expected))


def test_a_derivative_that_cannot_be_offloaded_is_reported() -> None:
    x, y = torch.randn(12, 6), torch.randint(4, (12,))
    with pytest.raises(NotYetError, match=r"torch.func.*give more memory"):
        Engine(Slopes(), F.cross_entropy, memory=1).backward(x, y)
    Engine(Slopes(), F.cross_entropy, micro_batch=4).backward(x, y)


def test_sparse_gradients_that_cannot_be_offloaded_are_reported() -> None:
    """It was an assertion of how kernels are counted."""
    model = nn.Sequential(nn.Embedding(100, 8, sparse=True), nn.Flatten(), nn.Linear(48, 4))
    x, y = torch.randint(100, (64, 6)), torch.randint(4, (64,))
    with pytest.raises(BudgetError, match="a step must fit in memory") as refused:
        Engine(model, F.cross_entropy, memory=1).backward(x, y)
    assert any("sparse=False" in note for note in refused.value.__notes__)
    Engine(model, F.cross_entropy, memory=refused.value.needed, cache=None).backward(x, y)


def test_classes_among_the_outputs_are_of_the_full_batch() -> None:
    """What counts them was read of outputs without data."""
    torch.manual_seed(0)

    class Keys(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.head(x), (x[:, 0] > 0).long().masked_fill(x[:, 1] > 1, -100)

    def loss(outputs: tuple[Tensor, Tensor], _y: Tensor) -> Tensor:
        return F.cross_entropy(*outputs)

    model, x = Keys().double(), torch.randn(N, 6).double()
    loss(model(x), x).backward()
    expected = model.head.weight.grad
    assert expected is not None
    model.zero_grad()
    Engine(model, loss, micro_batch=3).backward(x, torch.zeros(N))
    assert model.head.weight.grad is not None
    torch.testing.assert_close(model.head.weight.grad, expected)
