"""Models with a part in TorchScript: exact, or refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.oracle import state_of
from torch import Tensor, nn

import anybatch
from anybatch.errors import NotExactError
from anybatch.tools.exactness import error_of, tolerance

LOSS = nn.CrossEntropyLoss()
X, Y = torch.linspace(-3, 2, 7 * 6, dtype=torch.float64).sin().view(7, 6), torch.arange(7) % 3
METERED = "kernels of a step must be metered for a budget"
"""What torch makes of a trace that it optimises in one of the first calls under a mode."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(6, 6), inner, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.inner(self.first(x)))
        return out


def _inner(*norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *norm, nn.ReLU(), nn.Linear(8, 8)).double()


def _scripted(inner: nn.Module) -> nn.Module:
    return Around(torch.jit.script(inner)).double()


def _traced(inner: nn.Module) -> nn.Module:
    return Around(torch.jit.trace(inner, X, check_trace=False)).double()


def _throughout(inner: nn.Module) -> nn.Module:
    return torch.jit.script(Around(inner).double())


def _frozen(inner: nn.Module) -> nn.Module:
    return Around(torch.jit.freeze(torch.jit.script(inner.eval()))).double()


WAYS = (_scripted, _traced, _throughout, _frozen)


@pytest.mark.product
@pytest.mark.parametrize("norm", [(), (nn.GroupNorm(2, 8),)])
@pytest.mark.parametrize("make", WAYS)
def test_scripts_in_which_no_samples_meet_are_exact(
    make: Callable[[nn.Module], nn.Module], norm: tuple[nn.Module, ...]
) -> None:
    _exact(make(_inner(*norm)))


def test_frozen_statistics_are_exact() -> None:
    _exact(_frozen(_inner(nn.BatchNorm1d(8))))
    net = _traced(_inner(nn.BatchNorm1d(8)).eval())
    _exact(net)


def _undivided(net: nn.Module) -> dict[str, Tensor]:
    """Return what the full batch gives; a copy of a script has no leaves."""
    net.zero_grad()
    loss = LOSS(net(X), Y)
    loss.backward()
    found = state_of(net, loss)
    net.zero_grad()
    return found


def _exact(net: nn.Module) -> None:
    wanted = _undivided(net)
    for options in ({"micro_batch": 3}, {"micro_batch": 1}, {"memory": "1MiB"}, {"memory": "9KiB"}):
        engine = anybatch.Engine(net, LOSS, **options)
        net.zero_grad()
        found = state_of(net, engine.backward(X, Y))
        assert max(error_of(found, wanted).values()) <= tolerance()


@pytest.mark.parametrize("make", WAYS[:3])
def test_batch_norm_in_a_script_is_refused_where_the_batch_is_divided(
    make: Callable[[nn.Module], nn.Module],
) -> None:
    net = make(_inner(nn.BatchNorm1d(8)))
    divided = "is a torch.jit.ScriptModule with BatchNorm in training mode, where they cannot"
    metered = f"{divided}|{METERED}" if make is _traced else divided
    for options, match in (({"micro_batch": 3}, divided), ({"memory": "3KiB"}, metered)):
        with pytest.raises(NotExactError, match=match):
            anybatch.Engine(net, LOSS, **options).backward(X, Y)
        assert all(p.grad is None for p in net.parameters())
    wanted = _undivided(net)
    found = state_of(net, anybatch.Engine(net, LOSS, micro_batch=7).backward(X, Y))
    pairs = (({k: v for k, v in of.items() if "buffer" not in k}) for of in (found, wanted))
    assert max(error_of(*pairs).values()) <= tolerance()  # buffers have moved twice


def test_a_script_that_torch_cannot_optimise_under_a_budget_is_refused() -> None:
    net = _traced(_inner(nn.BatchNorm1d(8)))
    LOSS(net(X), Y).backward()  # torch optimises it in its second call
    with pytest.raises(NotExactError, match=METERED):
        anybatch.Engine(net, LOSS, memory="1MiB").backward(X, Y)
