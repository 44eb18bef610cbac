"""The device has no more memory than the budget: no allocation fails, and the forecast is close."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from benchmarks.mbs.cases import CASES, Case
from tests.oracle import assert_exact, state_of, undivided
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Engine
from anybatch.core.tree import map_tensors
from anybatch.tools.exactness import error_of

N = 96
ABOVE = 1.02
"""A forecast is at most so many times what a step holds."""


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.LSTM(16, 64, batch_first=True), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x)[0][:, -1])


def images(norm: Any) -> nn.Module:
    layers = [nn.Conv2d(3, 16, 3, padding=1), norm(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
    more = [norm(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 5)]
    return nn.Sequential(*layers, *more)


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(8 * 32, 5))


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 5)), (64,)),
    "images, GroupNorm": (lambda: images(lambda c: nn.GroupNorm(2, c)), (3, 32, 32)),
    "images, BatchNorm": (lambda: images(nn.BatchNorm2d), (3, 32, 32)),
    "lstm": (Recurrent, (12, 16)),
    "transformer": (transformer, (8, 32)),
}


@pytest.mark.parametrize("share", [0.3, 0.6])
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_a_step_is_what_was_foreseen(
    stand_in: Any, name: str, where: str, share: float
) -> None:
    gc.collect()  # what other tests have left would be counted, and be gone
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make().double().cuda()
    x, y = torch.randn(N, *shape).double(), torch.randint(5, (N,))
    there = x.cuda(), y.cuda()
    want = undivided(model, F.cross_entropy, *there)
    order = torch.randperm(N)
    noise = error_of(undivided(model, F.cross_entropy, there[0][order], there[1][order]), want)
    batch, state = there if where == "device" else (x, y), copy.deepcopy(model.state_dict())
    stand_in.clear_workspaces()
    found = anybatch.plan(model, F.cross_entropy, batch, memory="4GiB", timed=False).memory
    assert found is not None
    budget = int(found.floor + share * (found.whole - found.floor))
    plan = anybatch.plan(model, F.cross_entropy, batch, memory=budget, timed=False)
    engine = Engine(model, F.cross_entropy, plan=plan)
    stand_in.cap(budget)
    failures = stand_in.statistics()["failures"]
    peaks = []
    for _ in range(3):
        model.load_state_dict(state)
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        loss = engine.backward(*batch)
        peaks.append(torch.cuda.max_memory_reserved())
    stand_in.cap(1 << 40)
    assert stand_in.statistics()["failures"] == failures
    assert plan.memory is not None
    assert max(peaks) <= plan.memory.predicted
    if "BatchNorm" not in name:  # waiting micro-batches may hold less than they have room for
        assert plan.memory.predicted <= ABOVE * max(peaks)
    assert_exact(state_of(model, loss), want, noise)


ROUNDED = pytest.mark.xfail(reason="one block of 512 bytes of a recurrent layer is not foreseen")
LOSSES = [
    pytest.param(case, id=case.name, marks=ROUNDED if case.name.endswith("-lstm") else ())
    for case in CASES
    if case.make(0).declared is None
]


@pytest.mark.large(of="capped losses", few=16)
@pytest.mark.parametrize("case", LOSSES)
def test_no_allocation_fails_over_the_catalogue(stand_in: Any, case: Case) -> None:
    problem = case.make(0)
    model, loss = problem.model.cuda(), problem.loss_fn
    if isinstance(loss, nn.Module):
        loss.cuda()
    x, y = (map_tensors(Tensor.cuda, t) for t in (problem.inputs, problem.targets))
    undivided(model, loss, x, y)
    stand_in.clear_workspaces()
    found = anybatch.plan(model, loss, (x, y), memory="4GiB", timed=False).memory
    assert found is not None
    budget = (found.floor + found.whole) // 2
    plan = anybatch.plan(model, loss, (x, y), memory=budget, timed=False)
    engine = Engine(model, loss, plan=plan)
    stand_in.cap(budget)
    failures = stand_in.statistics()["failures"]
    for _ in range(2):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        engine.backward(x, y)
        assert plan.memory is not None
        assert torch.cuda.max_memory_reserved() <= plan.memory.predicted
    stand_in.cap(1 << 40)
    assert stand_in.statistics()["failures"] == failures
