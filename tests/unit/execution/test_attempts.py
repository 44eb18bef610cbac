from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.oracle import same, snapshot
from torch import nn
from torch.nn import functional as F

from anybatch.errors import NotExactError
from anybatch.execution.attempts import Attempts, Retry, as_it_was


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that training moves, and the tensors that hold it."""
    held = [value for p in optimizer.state.values() for value in p.values()]
    return snapshot(model, optimizer) | {"state ids": list(map(id, held))}


def test_a_learning_rate_and_a_new_state_entry_are_put_back() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    F.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 3, (8,))).backward()
    opt.step()
    before = state(model, opt)
    first = next(iter(model.parameters()))
    with as_it_was([*model.named_modules()], model.parameters(), opt):
        opt.param_groups[0]["lr"] = 7.0
        opt.state[first]["seen"] = 1
        opt.state[first]["exp_avg"] = torch.ones(1)
        del opt.state[list(model.parameters())[-1]]
    assert same(before, state(model, opt))


def test_what_cannot_be_put_back_is_reported_and_the_rest_is() -> None:
    model = nn.Linear(4, 3)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    frozen = nn.Parameter(torch.zeros(1).expand(8), requires_grad=False)
    before = model.weight.detach().clone()
    with (
        pytest.raises(RuntimeError, match="the state that tried steps changed") as failed,
        as_it_was([*model.named_modules()], [frozen, *model.parameters()], opt),
        torch.no_grad(),
    ):
        model.weight += 1
    assert "single memory location" in failed.value.__notes__[0]
    assert torch.equal(model.weight, before)
    with (
        pytest.raises(KeyboardInterrupt) as stopped,
        as_it_was([*model.named_modules()], [frozen, *model.parameters()], opt),
    ):
        raise KeyboardInterrupt
    assert "could not be restored" in stopped.value.__notes__[0]


@pytest.mark.parametrize(
    ("reason", "most"), [("coupled", 1), ("meeting", 2), ("inspection", 2), ("sites", 2)]
)
def test_a_model_that_changes_in_every_attempt_is_refused(reason: Any, most: int) -> None:
    attempts = Attempts()
    for _ in range(most):
        attempts.learn(Retry(reason))
    with pytest.raises(NotExactError, match="depends on how often it is called"):
        attempts.learn(Retry(reason))


def test_only_a_coupled_loss_leaves_the_inspection_as_it_was() -> None:
    attempts = Attempts(traits=object())
    attempts.learn(Retry("coupled"))
    assert attempts.coupled
    assert attempts.traits is not None
    attempts.learn(Retry("memory"))
    assert attempts.coupled
    assert attempts.traits is None
