from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.unit.offloading.trainings import Make, equal, network, pair, trained, values
from torch import Tensor, nn, optim

import anybatch
from anybatch.core import optimizers
from anybatch.core.optimizers import COPIES, inner_step, state_bound
from anybatch.errors import NotExactError


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "SMALL", 64)


def matrices(class_: type[optim.Optimizer], params: list[Any], **options: Any) -> optim.Optimizer:
    return class_([p for p in params if p.dim() == 2], **options)


WAYS: dict[str, Make] = {
    "Adadelta": optim.Adadelta,
    "Adafactor": optim.Adafactor,
    "Adagrad": optim.Adagrad,
    "Adam": optim.Adam,
    "Adam, AMSGrad": partial(optim.Adam, amsgrad=True),
    "Adamax": optim.Adamax,
    "AdamW": optim.AdamW,
    "AdamW, one by one": partial(optim.AdamW, foreach=False),
    "AdamW, foreach": partial(optim.AdamW, foreach=True),
    "AdamW, fused": partial(optim.AdamW, fused=True),
    "AdamW, AMSGrad, maximize": partial(optim.AdamW, amsgrad=True, maximize=True),
    "ASGD": optim.ASGD,
    "Muon": partial(matrices, optim.Muon),
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "RMSprop": partial(optim.RMSprop, momentum=0.9, centered=True),
    "Rprop": optim.Rprop,
    "SGD": optim.SGD,
    "SGD, momentum": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_parameters_and_state_are_those_in_memory_bit_for_bit(way: str) -> None:
    plain, ours, states = pair(WAYS[way], 16 << 10)
    for part in (range(1), range(1, 4)):
        for one in (plain, ours):
            trained(*one, part)
        assert states.last is not None
        assert states.last.most_bytes <= states.memory
        keeps = any(t.numel() > 16 for s in plain[1].state.values() for t in tensors(s))
        assert (states.last.offloaded_bytes > 0) == keeps
        assert states.last.parts > 1 or part.start  # Adafactor's bound is far from what it makes
    states.back()
    assert equal(values(plain[1]), values(ours[1]))


def tensors(state: dict[Any, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]


@pytest.mark.parametrize("way", WAYS)
def test_no_optimizer_makes_more_state_than_its_bound(way: str) -> None:
    model = network()
    optimizer = WAYS[way](list(model.parameters()))
    trained(model, optimizer, range(2))
    for group in optimizer.param_groups:
        for p in group["params"]:
            made = sum(t.nbytes for t in tensors(optimizer.state.get(p, {})) if t.numel() > 1)
            assert made <= state_bound(optimizer, group, p)


def test_half_precision_and_sparse_gradients() -> None:
    plain, ours, states = pair(optim.AdamW, 16 << 10)
    for model, optimizer in (plain, ours):
        model.to(torch.bfloat16)
        trained(model, optimizer, range(3))
    states.back()
    assert equal(values(plain[1]), values(ours[1]))
    found = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(50, 8, sparse=True)
        optimizer = optim.SparseAdam(table.parameters())
        held = anybatch.offload_states(optimizer, memory="64KiB") if offloaded else None
        for step in range(3):
            optimizer.zero_grad()
            table(torch.tensor([step, 7, 7])).square().sum().backward()
            optimizer.step()
        if held is not None:
            held.back()
        found.append(values(optimizer))
    assert equal(*found)


def test_every_optimizer_of_torch_is_recognised_or_refused() -> None:
    every = {v for v in vars(optim).values() if isinstance(v, type)}
    every = {v for v in every if issubclass(v, optim.Optimizer) and v is not optim.Optimizer}
    assert every - set(COPIES) == {optim.LBFGS}


class Stepping(optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Named(optim.AdamW):
    pass


class Foreign(optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        return None


@pytest.mark.parametrize("variant", [optim.LBFGS, Stepping, Foreign])
def test_an_optimizer_that_is_not_recognised_is_refused_by_name(variant: Any) -> None:
    match = rf"each parameter is updated by itself.* of \S*{variant.__name__} that is not known"
    with pytest.raises(NotExactError, match=match):
        anybatch.offload_states(variant(network().parameters()))


def test_a_subclass_that_overrides_no_step_is_accepted_hooked_or_not() -> None:
    for _ in range(2):
        optimizer = Named(network().parameters())
        assert inner_step(optimizer) is inner_step(optim.Adam(network().parameters()))


def test_a_step_within_a_graph_and_parameters_on_two_devices_are_refused() -> None:
    with pytest.raises(NotExactError, match="made with differentiable=True"):
        anybatch.offload_states(optim.AdamW(network().parameters(), differentiable=True))
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))]
    with pytest.raises(NotExactError, match="the parameters are on cpu, meta"):
        anybatch.offload_states(optim.SGD(params))
