"""Trainings of small networks whose optimizer's state is away, beside those in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import anybatch

CPU = torch.device("cpu")
ROWS = 5
Make = Callable[[list[Any]], torch.optim.Optimizer]


def network() -> nn.Module:
    """Layers of several sizes; one parameter gets no gradient, one is two-dimensional and odd."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 31), nn.Linear(31, 3))
    model.spare = nn.Parameter(torch.ones(50, 7))
    return model


def values(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return parameters, and what the optimizer keeps of them in the order it was made."""
    found: list[Tensor] = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            found += [p.detach(), *(t for t in state.values() if isinstance(t, Tensor))]
    return [t.detach().clone() for t in found]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Say whether tensors are the same bit for bit."""
    same = [torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(one, other, strict=True)]
    return all(same)


def gradients(model: nn.Module, step: int) -> Tensor:
    """Give a model the gradients of a step, and return its loss."""
    generator = torch.Generator().manual_seed(step)
    dtype = next(model.parameters()).dtype
    x = torch.randn(ROWS, 12, generator=generator).to(dtype)
    loss = model(x).square().sum()
    loss.backward()
    return loss


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        gradients(model, step)
        optimizer.step()


def pair(
    make: Make, memory: int, **options: Any
) -> tuple[Any, Any, anybatch.reports.OffloadedStates]:
    """Return ``(model, optimizer)`` in memory, the same with its state away, and what holds it."""
    plain, ours = network(), copy.deepcopy(network())
    one, other = make(list(plain.parameters())), make(list(ours.parameters()))
    states = anybatch.offload_states(other, memory=memory, **options)
    return (plain, one), (ours, other), states
