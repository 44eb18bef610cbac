"""A net with a body that is to be found, or left alone, and its batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from anybatch import Engine
from anybatch.errors import NotExactError

Body = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """A body between two linear layers, behind a gate where one is wanted."""

    def __init__(self, body: Body, gate: float | None = None, *, draws: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.body, self.draws = body, draws
        self.gate = None if gate is None else nn.Parameter(torch.tensor(gate))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.draws:
            h = h + 0 * torch.randn_like(h)
        out = self.body(h)
        return self.last(out if self.gate is None else h + self.gate * out)


def batch(n: int = 11) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 6, dtype=torch.float64), torch.randint(0, 3, (n,))


def is_shown(net: nn.Module, loss: Any, x: Tensor, y: Tensor, micro_batch: int) -> bool:
    """Say whether a step is not refused, and says that it is exact."""
    engine = Engine(net, loss, micro_batch=micro_batch)
    try:
        engine.backward(x, y)
    except NotExactError:
        return False
    assert engine.plan is not None
    return bool(engine.plan.exact)


def hooked(hook: Body) -> Body:
    def body(h: Tensor) -> Tensor:
        h = h.tanh()
        h.register_hook(hook)
        return h

    return body
