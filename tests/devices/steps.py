"""Steps of every mechanism on the device, that tests interrupt or starve."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tests.oracle import snapshot
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine

N = 10


def coupled(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out - out.mean(0), y)


KINDS: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "streaming": (lambda: nn.GroupNorm(2, 4), F.cross_entropy, "host"),
    "streaming, pinned": (lambda: nn.GroupNorm(2, 4), F.cross_entropy, "pinned"),
    "two-pass": (lambda: nn.GroupNorm(2, 4), coupled, "host"),
    "lockstep": (lambda: nn.BatchNorm2d(4), F.cross_entropy, "host"),
    "lockstep, coupled": (lambda: nn.BatchNorm2d(4), coupled, "device"),
}


class Setting(NamedTuple):
    """A model on the device with gradients, its engine, its loss and its batch."""

    model: nn.Module
    engine: Engine
    loss: Any
    batch: tuple[Tensor, Tensor]

    def step(self) -> Tensor:
        return self.engine.backward(*self.batch)

    def state(self) -> dict[str, Any]:
        torch.cuda.synchronize()
        found = snapshot(self.model) | {"device's rng": torch.cuda.get_rng_state()}
        torch.cuda.synchronize()
        return found


def setting(variant: str, *, first: bool, drop: float = 0.5, micro_batch: int = 3) -> Setting:
    """Return one whose next step is its first, or its third."""
    norm, loss, place = KINDS[variant]
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3), norm(), nn.ReLU(), nn.Dropout(drop), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(4 * 16, 3)).double().cuda()
    x, y = torch.randn(N, 2, 6, 6, dtype=torch.float64), torch.randint(3, (N,))
    put = {"host": lambda t: t, "pinned": Tensor.pin_memory, "device": Tensor.cuda}[place]
    made = Setting(model, Engine(model, loss, micro_batch=micro_batch), loss, (put(x), put(y)))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for _ in range(0 if first else 2):
        state = copy.deepcopy(model.state_dict())
        made.step()
        model.load_state_dict(state)
    torch.manual_seed(1)
    torch.cuda.synchronize()
    return made


def values(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state without the places of its tensors in memory."""
    return {name: value for name, value in state.items() if not name.endswith("ids")}
