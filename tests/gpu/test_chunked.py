"""Wide linear maps and their losses in chunks of rows, on a CUDA device."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.oracle import assert_exact, state_of
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine, chunked_losses
from anybatch.planner import memory_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

V, L, D, N = 3000, 24, 16, 12
WEIGHT = torch.linspace(0.1, 2, V).double()


class Net(nn.Module):
    """Tokens, a body, and a head for a vocabulary."""

    def __init__(self, words: int = V) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, D), nn.Linear(D, words)
        self.body = nn.Sequential(nn.Linear(D, 64), nn.Tanh(), nn.Linear(64, D))

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.head(self.body(self.embedding(x)))
        return z


def flat(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), ignore_index=3, label_smoothing=0.1)


def log_probabilities(z: Tensor, y: Tensor) -> Tensor:
    return -(z.float().double().log_softmax(-1).gather(-1, y[..., None])[..., 0]).mean()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "smooth, ignored": flat,
    "weighted": lambda z, y: F.cross_entropy(z.mT, y, weight=WEIGHT.to(z)),
    "soft cap": lambda z, y: flat(30 * torch.tanh(z / 30), y),
    "of each token": lambda z, y: (
        F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none") * (y.flatten() % 2)
    ).sum(),
    "log-probabilities": log_probabilities,
}


def made() -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    net = Net().double().cuda()
    return net, torch.randint(V, (N, L)).cuda(), torch.randint(V, (N, L)).cuda()


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_in_chunks_are_those_of_all_logits(loss: str) -> None:
    net, x, y = made()
    want_net = copy.deepcopy(net)
    want = LOSSES[loss](want_net(x), y)
    want.backward()
    with chunked_losses(40) as report:
        found = LOSSES[loss](net(x), y)
        found.backward()
    assert report.chunked
    assert not report.materialised
    assert_exact(state_of(net, found), state_of(want_net, want))


def test_autocast_is_as_near_to_float64_as_all_logits_at_once() -> None:
    net, x, y = made()
    flat(net(x), y).backward()
    want = net.head.weight.grad
    assert want is not None
    errors = {}
    for way, rows in (("at once", None), ("in chunks", 24)):
        other = copy.deepcopy(net).float()
        other.zero_grad()
        with (
            chunked_losses(rows) if rows else torch.enable_grad(),
            torch.autocast("cuda", torch.bfloat16),
        ):
            loss = flat(other(x), y)
        loss.backward()
        assert other.head.weight.grad is not None
        errors[way] = float((other.head.weight.grad - want).norm() / want.norm())
    assert errors["in chunks"] <= 1.5 * errors["at once"]


@pytest.mark.parametrize("mib", [48, 80, 600])
def test_a_budget_without_room_for_all_logits_is_kept(
    mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside cuBLAS's workspace, 64 MiB where it has one, and tensors of other tests."""
    monkeypatch.setattr(memory_model, "CHUNKS", (8 << 20, 2 << 20))
    torch.manual_seed(0)
    net = Net(16_000).double().cuda()
    x, y = (torch.randint(16_000, (4, 256)).cuda() for _ in range(2))
    want_net = copy.deepcopy(net)
    want = flat(want_net(x), y)
    want.backward()
    memory = torch.cuda.memory_allocated() + (64 + mib << 20)
    engine = Engine(net, flat, memory=memory, cache=None)
    for _ in range(2):
        net.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        loss = engine.backward(x, y)
        assert engine.last is not None
        assert engine.plan is not None
        assert engine.plan.memory is not None
        assert (engine.plan.memory.chunked > 0) == (mib < 600)
        assert torch.cuda.max_memory_allocated() <= memory
        assert_exact(state_of(net, loss), state_of(want_net, want))
