"""MBS, Algorithm 1, to the letter: equal to the paper's formula, and exact only when even."""

from __future__ import annotations

import pytest
import torch
from tests.oracle import assert_exact, error_of, state_after, tolerance, undivided
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine, LazyBatch, Loss


def paper(model: nn.Module, x: Tensor, y: Tensor, micro_batch: int) -> Tensor:
    """Lines 1-14 as printed."""
    n_b = len(x)  # 1
    n_mu = min(micro_batch, n_b)  # 2-4
    n_s = -(-n_b // n_mu)  # 5
    total = torch.zeros((), dtype=x.dtype)
    for i in range(n_s):  # 7-8, 13-14
        rows = slice(i * n_mu, (i + 1) * n_mu)  # 6
        loss = F.cross_entropy(model(x[rows]), y[rows])  # 9-10
        (loss / n_s).backward()  # 11-12
        total += loss.detach() / n_s
    return total


@pytest.mark.parametrize(("micro_batch", "exact"), [(5, True), (4, False), (3, False), (20, True)])
def test_the_named_option_is_the_papers_formula(micro_batch: int, exact: bool) -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = torch.randn(10, 5, dtype=torch.float64), torch.randint(0, 3, (10,))
    loss = Loss.algorithm1(F.cross_entropy)
    got = state_after(model, lambda m: Engine(m, loss, micro_batch=micro_batch).backward(x, y))
    assert_exact(got, state_after(model, lambda m: paper(m, x, y, micro_batch)))
    error = max(error_of(got, undivided(model, F.cross_entropy, x, y)).values())
    assert (error <= tolerance()) is exact
    lazy = LazyBatch(torch.utils.data.TensorDataset(x, y))
    again = state_after(model, lambda m: Engine(m, loss, micro_batch=micro_batch).backward(lazy))
    assert_exact(again, got)


def test_without_line_11_the_sum_is_n_s_times_the_goal() -> None:
    """Equation 13: gradients of the micro-batches' means, added up as they are."""
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = torch.randn(12, 5, dtype=torch.float64), torch.randint(0, 3, (12,))

    def unnormalised(m: nn.Module) -> Tensor:
        losses = [F.cross_entropy(m(x[i : i + 3]), y[i : i + 3]) for i in range(0, 12, 3)]
        for loss in losses:
            loss.backward()
        return torch.stack(losses).sum().detach()

    def goal_times_4(m: nn.Module) -> Tensor:
        loss = 4 * F.cross_entropy(m(x), y)
        loss.backward()
        return loss.detach()

    assert_exact(state_after(model, unnormalised), state_after(model, goal_times_4))
