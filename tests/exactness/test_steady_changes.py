"""A step after many that were alike: what has changed outside since then counts in it.

Each change is made once the engine has nothing to find out any more. The truth is the undivided
batch, run by torch on the same model under the same change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from anybatch import Engine

STEADY = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)
        self.dropout = nn.Dropout(1.0)  # draws nothing, and leaves nothing
        self.register_buffer("scale", torch.ones(5))
        self.power = 1

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh() * self.scale
        return self.last(h**self.power) + self.dropout(h).sum(-1, keepdim=True)


class Doubled(TorchFunctionMode):
    """It doubles what every linear map returns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return 2 * found if func is F.linear else found


Change = Callable[[Net, nn.CrossEntropyLoss, pytest.MonkeyPatch], Any]


def _replaced(net: Net) -> None:
    net.last.weight = nn.Parameter(torch.randn(3, 5, dtype=torch.double))


def _hooked(net: Net) -> None:
    net.first.register_forward_hook(lambda _m, _i, out: 3 * out)


def _clamped(net: Net) -> None:
    net.last.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


CHANGES: dict[str, Change] = {
    "evaluation": lambda net, _l, _p: net.eval(),
    "frozen": lambda net, _l, _p: net.first.requires_grad_(False),
    "a forward hook": lambda net, _l, _p: _hooked(net),
    "a hook on a parameter": lambda net, _l, _p: _clamped(net),
    "another buffer": lambda net, _l, _p: net.register_buffer("scale", 2 * net.scale),
    "a buffer written to": lambda net, _l, _p: net.scale.mul_(2),
    "another parameter": lambda net, _l, _p: _replaced(net),
    "other data of a parameter": lambda net, _l, _p: net.last.weight.data.mul_(2),
    "a switch": lambda net, _l, _p: setattr(net, "power", 3),
    "another layer": lambda net, _l, _p: setattr(net, "last", nn.Linear(5, 3).double()),
    "another forward": lambda _n, _l, patch: patch.setattr(
        Net, "forward", lambda net, x: net.last(net.first(x).exp())
    ),
    "a functional of torch": lambda _n, _l, patch: patch.setattr(
        F, "cross_entropy", lambda *a, **k: 5 * F.nll_loss(a[0], a[1])
    ),
    "an attribute of the loss": lambda _n, loss, _p: setattr(loss, "label_smoothing", 0.3),
    "weights of the loss": lambda _n, loss, _p: setattr(
        loss, "weight", torch.tensor([1.0, 2.0, 5.0], dtype=torch.double)
    ),
    "ignored targets": lambda _n, loss, _p: setattr(loss, "ignore_index", 1),
    "another reduction": lambda _n, loss, _p: setattr(loss, "reduction", "sum"),
    "a function mode": lambda *_: Doubled(),
    "a default device": lambda *_: torch.device("cpu"),
    "no gradients outside": lambda *_: torch.no_grad(),
    "deterministic algorithms": lambda *_: _deterministic(),
}


@pytest.mark.parametrize("memory", [None, "1GiB"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_after_steps_that_were_alike_counts(
    name: str, memory: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net, loss_fn = Net().double(), nn.CrossEntropyLoss()
    engine = Engine(net, loss_fn, micro_batch=5, memory=memory, cache=None)
    x, y = torch.randn(12, 6, dtype=torch.double), torch.randint(3, (12,))
    for _ in range(STEADY):
        net.zero_grad()
        engine.backward(x, y)
    context = CHANGES[name](net, loss_fn, monkeypatch)
    with context if hasattr(context, "__enter__") else _nothing():
        want = _undivided(net, loss_fn, x, y)
        for _ in range(2):
            net.zero_grad()
            assert_exact(state_of(net, engine.backward(x, y)), want)


def _undivided(net: Net, loss_fn: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    net.zero_grad()
    with torch.enable_grad():
        loss = loss_fn(net(x), y)
        loss.backward()
    return state_of(net, loss)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@pytest.mark.parametrize("memory", [None, "1GiB"])
@pytest.mark.parametrize(
    ("samples", "before"),
    [(7, torch.double), (3, torch.double), (1, torch.double), (12, torch.float)],
)
def test_another_batch_after_steps_that_were_alike_counts(
    samples: int, before: torch.dtype, memory: str | None
) -> None:
    torch.manual_seed(0)
    net, loss_fn = Net().to(before), nn.CrossEntropyLoss()
    engine = Engine(net, loss_fn, micro_batch=5, memory=memory, cache=None)
    x, y = torch.randn(12, 6, dtype=before), torch.randint(3, (12,))
    for _ in range(STEADY):
        net.zero_grad()
        engine.backward(x, y)
    net.double()
    x, y = torch.randn(samples, 6, dtype=torch.double), torch.randint(3, (samples,))
    want = _undivided(net, loss_fn, x, y)
    net.zero_grad()
    assert_exact(state_of(net, engine.backward(x, y)), want)
