"""Steps of small networks, with and without offloading, beside each other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from tests.networks import NETWORKS
from tests.peaks import metered
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.reports import Offload

CPU = torch.device("cpu")
LOTS = 1 << 30
TELLS = hasattr(torch._C._autograd.SavedTensor, "data")
"""This torch says what hooks have given a node; without it nothing is computed again."""

Rows = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(1))


def classes(x: Tensor) -> Rows:
    return x, torch.randint(3, (len(x),))


def network(name: str) -> tuple[nn.Module, Loss, Rows]:
    """Return a network, its loss and its rows."""
    if name == "LSTM":
        return Recurrent(), F.cross_entropy, classes(torch.randn(5, 7, 6))
    if name == "transformer":
        return Attentive(), F.cross_entropy, classes(torch.randn(5, 7, 8))
    found = NETWORKS[name]
    return found.small(), found.loss, found.rows(5)


NAMES = ("ResNet-20", "DenseNet", "U-Net", "transformer", "LSTM")


def mlp(width: int = 32, depth: int = 4, rows: int = 64) -> tuple[nn.Module, Tensor]:
    """Return layers whose outputs are all saved, and a batch."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(rows, width)


def states(model: nn.Module) -> list[Tensor]:
    """Return copies of the gradients and buffers of a model."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [tensor.detach().clone() for tensor in (*grads, *model.buffers())]


def equal(found: list[Tensor], wanted: list[Tensor]) -> bool:
    """Say whether tensors are the same bit for bit."""
    pairs = list(zip(found, wanted, strict=True))
    return all(torch.equal(a, b) for a, b in pairs)


def plain(model: nn.Module, step: Callable[[nn.Module], Any], steps: int) -> list[list[Tensor]]:
    """Return what a copy of the model has after each of some steps without offloading."""
    ours, found = copy.deepcopy(model), []
    torch.manual_seed(1)
    for _ in range(steps):
        ours.zero_grad()
        step(ours)
        found.append(states(ours))
    return found


def offloaded(
    model: nn.Module, step: Callable[[nn.Module], Any], off: Offload, steps: int
) -> list[list[Tensor]]:
    """Return the same with it."""
    ours, found = copy.deepcopy(model), []
    torch.manual_seed(1)
    for _ in range(steps):
        ours.zero_grad()
        with off:
            step(ours)
        found.append(states(ours))
    return found


def bounds(model: nn.Module, step: Callable[[nn.Module], Any]) -> tuple[int, int]:
    """Return the bytes that a step holds with everything away, and with nothing away."""
    off = anybatch.offload(memory=LOTS, device="cpu", recompute=False)
    ours = copy.deepcopy(model)
    found = []
    for _ in range(2):
        with off:
            step(ours)
        ours.zero_grad()
        assert off.last is not None
        assert off.last.predicted_bytes is not None
        found.append(off.last.predicted_bytes)
    return found[0], found[1]


def held(model: nn.Module, rows: tuple[Tensor, ...], body: Callable[[], Any]) -> int:
    """Return the most bytes that were live, with those of model and rows."""
    there = [*model.parameters(), *model.buffers(), *rows]
    with metered({"there": there}) as meter:
        body()
    return meter.peak
