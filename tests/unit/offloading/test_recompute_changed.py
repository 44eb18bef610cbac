"""What is computed again is what forward saved, or the step ends in an error and none is after it.

Each program once gave a wrong gradient without a word: the first step's numbers did not show it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.offloads import slow_link, small_leave
from tests.unit.offloading.steps import TELLS, bounds, equal, offloaded, plain, states
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Engine
from anybatch.errors import NotReproducibleError

pytestmark = pytest.mark.skipif(
    not TELLS, reason="this torch does not say what hooks have given a node"
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_leave(monkeypatch)
    slow_link(monkeypatch)


class Layers(nn.Module):
    """Linear layers, and what is done to their results; `calm` at first, and then not."""

    def __init__(self, change: Callable[[Any, nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.gain = nn.Parameter(torch.zeros(32))
        self.change, self.steps = change, 0

    @property
    def calm(self) -> bool:
        """Whether nothing is out of bounds yet."""
        return self.steps < 2

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.silu(self.change(self, layer, layer(x)))
        self.steps += 1
        return x


def detached(net: Any, _layer: nn.Linear, h: Tensor) -> Tensor:
    h.detach().clamp_(*((-9, 9) if net.calm else (-0.1, 0.1)))
    return h


def data(net: Any, _layer: nn.Linear, h: Tensor) -> Tensor:
    h.data.clamp_(*((-9, 9) if net.calm else (-0.1, 0.1)))
    return h


def only_when_needed(net: Any, _layer: nn.Linear, h: Tensor) -> Tensor:
    if not net.calm:
        with torch.no_grad():
            h.clamp_(-0.1, 0.1)
    return h


def bias_after_its_use(net: Any, layer: nn.Linear, h: Tensor) -> Tensor:
    with torch.no_grad():
        layer.bias.clamp_(*((-9, 9) if net.calm else (-0.1, 0.1)))
    return h


def bias_by_data(net: Any, layer: nn.Linear, h: Tensor) -> Tensor:
    layer.bias.data.mul_(1.0 if net.calm else 0.5)
    return h


def another_bias(net: Any, layer: nn.Linear, h: Tensor) -> Tensor:
    if not net.calm:
        layer.bias.data = layer.bias.data + 1
    return h


def mean_in_double(net: Any, _layer: nn.Linear, h: Tensor) -> Tensor:
    gain = net.gain if net.calm else net.gain + 1
    return (h.unsqueeze(0) * gain).mean(0, dtype=torch.float64).float()


def dropout_switched_off(net: Any, _layer: nn.Linear, h: Tensor) -> Tensor:
    return torch.native_dropout(h.tanh(), 0.5, net.calm)[0]


def everything_dropped(_net: Any, _layer: nn.Linear, h: Tensor) -> Tensor:
    return torch.native_dropout(h.tanh(), 1.0, True)[0]


def own_epsilon(net: Any, _layer: nn.Linear, h: Tensor) -> Tensor:
    return F.layer_norm(h * (1e4 if net.calm else 0.1), (32,), eps=2e-4)


CHANGES = (
    detached,
    data,
    only_when_needed,
    bias_after_its_use,
    bias_by_data,
    another_bias,
    mean_in_double,
    dropout_switched_off,
    everything_dropped,
    own_epsilon,
)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("change", CHANGES)
def test_no_gradient_is_wrong_without_an_error(
    change: Callable[[Any, nn.Linear, Tensor], Tensor], share: float
) -> None:
    net = Layers(change)
    rows = torch.randn(5, 64, 32)

    def step(ours: nn.Module) -> None:
        ours(rows[ours.steps % 5]).square().sum().backward()  # type: ignore[index]

    low, high = bounds(net, step)
    wanted = plain(net, step, 5)
    off = anybatch.offload(memory=int(low + share * (high - low)), device="cpu")
    ours, errors = Layers(change), 0
    torch.manual_seed(1)
    for gradients in wanted:
        ours.zero_grad()
        try:
            with off:
                step(ours)
        except NotReproducibleError:
            errors += 1
            continue
        assert equal(states(ours), gradients)
        assert off.last is not None
        assert not (errors and off.last.remade_bytes), "it goes on computing again"
    assert errors <= 1


def test_a_row_that_is_no_number_changes_no_other_row() -> None:
    net = nn.Sequential(*(one for _ in range(4) for one in (nn.Linear(32, 32), nn.LayerNorm(32))))
    rows = torch.randn(64, 32)
    rows[0] = torch.nan

    def step(ours: nn.Module) -> None:
        ours(rows)[1:].square().sum().backward()

    low, high = bounds(net, step)
    found = offloaded(net, step, off := anybatch.offload(memory=(low + high) // 2, device="cpu"), 3)
    assert off.last is not None
    assert off.last.remade_bytes > 0
    for ours, wanted in zip(found, plain(net, step, 3), strict=True):
        assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(ours, wanted, strict=True))
        assert equal([a.nan_to_num() for a in ours], [b.nan_to_num() for b in wanted])


@pytest.mark.parametrize("change", [detached, data, dropout_switched_off])
def test_an_engine_runs_such_a_step_again(
    change: Callable[[Any, nn.Linear, Tensor], Tensor],
) -> None:
    net, other = Layers(change), Layers(change)
    x, y = torch.randn(512, 32), torch.randn(512, 32)
    torch.manual_seed(1)
    engine = Engine(
        net, F.mse_loss, memory="450KiB", micro_batch=512, rungs=["offload"], cache=None
    )
    again, generator = [], torch.get_rng_state()
    for _ in range(5):
        for one, run in ((other, F.mse_loss), (net, None)):
            torch.set_rng_state(generator)
            one.zero_grad()
            F.mse_loss(one(x), y).backward() if run else engine.backward(x, y)
        generator = torch.get_rng_state()
        for ours, wanted in zip(net.parameters(), other.parameters(), strict=True):
            assert (ours.grad is None) == (wanted.grad is None)
            assert ours.grad is None or torch.equal(ours.grad, wanted.grad)
        assert engine.last is not None
        again.append(engine.last.remade_bytes)
    assert max(again[:2]) > 0


def test_long_chains_of_results_and_views_are_no_deep_recursion() -> None:
    net = nn.Sequential(*(one for _ in range(600) for one in (nn.Linear(4, 4), nn.Tanh())))
    rows = torch.randn(8, 4)

    def step(ours: nn.Module) -> None:
        h = ours(rows)
        for _ in range(500):
            h = h.view(4, 8).view(8, 4)
        F.silu(h).square().sum().backward()

    low, high = bounds(net, step)
    off = anybatch.offload(memory=(low + high) // 2, device="cpu")
    for ours, wanted in zip(offloaded(net, step, off, 3), plain(net, step, 3), strict=True):
        assert equal(ours, wanted)
    assert off.last is not None
    assert off.last.remade_bytes > 0
