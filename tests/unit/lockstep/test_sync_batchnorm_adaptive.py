"""AGBN's policy: local until converged or while the batch is large; pure and then in the engine."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anybatch import Adaptive, Engine, Plateau


def test_a_plateau_is_when_nothing_improves_for_a_while_and_is_for_ever() -> None:
    plateau = Plateau(patience=2, least=0.1)
    values = [10.0, 8.0, 7.5, 7.0, 6.9, 6.8, 1.0]
    assert [plateau.converged(v) for v in values] == [False, False, False, False, False, True, True]


def test_a_metric_that_is_no_number_is_no_improvement_and_a_negative_one_may_fall() -> None:
    assert Plateau(patience=1).converged(math.nan)
    falls = Plateau(patience=1, least=0.1)
    assert [falls.converged(v) for v in (-1.0, -1.2, -1.25)] == [False, False, True]


MEANINGLESS = [
    lambda: Plateau(0),
    lambda: Plateau(least=-1),
    lambda: Adaptive(every=0),
    lambda: Adaptive(max_batch=0),
]


@pytest.mark.parametrize("make", MEANINGLESS)
def test_numbers_that_mean_nothing_are_refused(make: object) -> None:
    with pytest.raises(ValueError, match="must be >="):
        make()  # type: ignore[operator]


def test_only_a_small_batch_after_convergence_is_global() -> None:
    policy = Adaptive(max_batch=64, criterion=Plateau(patience=1))
    observed = []
    for loss, size in [(1.0, 8), (1.0, 8), (1.0, 63), (1.0, 64), (0.1, 8)]:
        policy.choose(size)
        observed.append(policy.now)
        policy.measured(loss)
    assert observed == ["local", "local", "exact", "local", "exact"]


def test_without_a_metric_the_mean_loss_of_some_steps_is_one() -> None:
    policy = Adaptive(every=2, criterion=Plateau(patience=1))
    for loss in (2.0, 1.0, 1.0):
        policy.step(loss)
    assert not policy.is_converged
    resumed = Adaptive(every=2, criterion=Plateau(patience=1))
    resumed.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    resumed.step(2.0)
    assert resumed.is_converged


def test_an_engine_is_local_first_and_exact_in_the_end() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    x, y = torch.randn(12, 4).double(), torch.randint(3, (12,))
    policy = Adaptive(criterion=Plateau(patience=1))
    engine = Engine(model, F.cross_entropy, micro_batch=4, batchnorm=policy)
    local = Engine(copy.deepcopy(model), F.cross_entropy, micro_batch=4, batchnorm="local")
    assert torch.equal(engine.backward(x, y), local.backward(x, y))
    assert engine.last is not None
    assert engine.plan is not None
    assert (engine.last.batchnorm, bool(engine.plan.exact)) == ("local", False)
    policy.measured(1.0)
    policy.measured(1.0)
    model.zero_grad()
    plain = copy.deepcopy(model)
    loss = F.cross_entropy(plain(x), y)
    assert torch.allclose(engine.backward(x, y), loss.detach(), rtol=1e-12)
    assert (engine.last.batchnorm, bool(engine.plan.exact)) == ("exact", True)
    assert engine.plan.mechanism == "lockstep"


def test_adaptive_by_name_is_the_default_policy() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    engine = Engine(model, nn.MSELoss(), micro_batch=4, batchnorm="adaptive")
    engine.backward(torch.randn(8, 4), torch.randn(8, 6))
    assert engine.last is not None
    assert engine.last.batchnorm == "local"
    with pytest.raises(ValueError, match='must be "exact", "local", "adaptive" or an anybatch.Ada'):
        Engine(model, nn.MSELoss(), batchnorm="global")  # type: ignore[arg-type]
