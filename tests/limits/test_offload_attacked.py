"""Random programs under random budgets: every gradient bit for bit, every byte foreseen."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from tests.offloads import slow_link, small_leave
from tests.unit.offloading.steps import LOTS, equal, held, states
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import anybatch

WIDTH = 16


class Program(nn.Module):
    """A random row of operations: views, writes in place, branches, shared weights, checkpoints."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, rng = seed, random.Random(seed)
        self.names = [rng.choice(list(OPERATIONS)) for _ in range(rng.randint(3, 12))]
        self.own = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in self.names)
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in self.names)
        self.shared, self.conv = nn.Linear(WIDTH, WIDTH), nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        past, rng = [x], random.Random(self.seed)
        for i, name in enumerate(self.names):
            now = OPERATIONS[name](self, i, past[-1], rng.choice(past))
            past.append(now.clamp(-10, 10))
        return past[-1]


Operation = Callable[[Program, int, Tensor, Tensor], Tensor]


def _halves(h: Tensor) -> Tensor:
    a, b = h.chunk(2, 1)
    return torch.cat([a * b, a.exp()], 1)


def _pairs(h: Tensor, other: Tensor) -> Tensor:
    both = torch.cat([h, other], 1)
    return both[:, ::2] * both[:, 1::2]


def _again(m: Program, i: int, h: Tensor, *, reentrant: bool) -> Tensor:
    if not h.requires_grad:
        h = m.shared(h)
    return checkpoint(lambda t: m.own[i](t).tanh().exp(), h, use_reentrant=reentrant)


def _square(h: Tensor) -> Tensor:
    square = h.view(-1, 4, 4)
    return (square.transpose(1, 2) @ square).reshape(-1, WIDTH)


OPERATIONS: dict[str, Operation] = {
    "linear": lambda m, i, h, o: m.own[i](h),
    "tanh": lambda m, i, h, o: h.tanh(),
    "relu in place": lambda m, i, h, o: F.relu_(m.own[i](h)),
    "sigmoid in place": lambda m, i, h, o: (h * 1.5).sigmoid_(),
    "products": lambda m, i, h, o: h * h.detach().cos() * o,
    "views": lambda m, i, h, o: _square(h),
    "skip": lambda m, i, h, o: h + o.sin(),
    "joined": lambda m, i, h, o: _pairs(h, o),
    "checkpoint": lambda m, i, h, o: _again(m, i, h, reentrant=False),
    "reentrant": lambda m, i, h, o: _again(m, i, h, reentrant=True),
    "attention": lambda m, i, h, o: (h @ h.t() / WIDTH).softmax(1) @ h,
    "dropout": lambda m, i, h, o: F.dropout(h, 0.3),
    "unit": lambda m, i, h, o: m.own[i](F.relu_(m.norms[i](m.shared(h)))),
    "sum": lambda m, i, h, o: m.own[i](torch.sub(m.norms[i](m.own[i](h)), o.relu(), alpha=0.5)),
    "gate": lambda m, i, h, o: m.own[i](F.silu(m.shared(h)) * F.gelu(m.own[i](h))),
    "layer norm": lambda m, i, h, o: m.own[i](F.layer_norm(m.shared(h), (WIDTH,)) * 2).tanh(),
    "norm": lambda m, i, h, o: m.norms[i](h),
    "shared": lambda m, i, h, o: m.shared(h).tanh(),
    "halves": lambda m, i, h, o: _halves(h),
    "expanded": lambda m, i, h, o: h * h[:1].expand_as(h),
    "conv": lambda m, i, h, o: m.conv(h.unsqueeze(1)).squeeze(1),
}


def once(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


def twice(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def two_losses(model: nn.Module, x: Tensor) -> None:
    out = model(x)
    out.sin().mean().backward(retain_graph=True)
    out.square().mean().backward()


STEPS = (once, once, twice, two_losses)


def test_random_programs(counted: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    small_leave(monkeypatch)
    kinds: set[str] = set()
    for seed in range(counted(200, 20)):
        torch.manual_seed(seed)
        model, x = Program(seed), torch.randn((3, 8, 20)[seed % 3], WIDTH)
        step = STEPS[seed % len(STEPS)]
        if not model(x).requires_grad:
            continue
        low, high = (_run(model, x, step, LOTS, steps)[1] for steps in (1, 2))
        wanted = _run(model, x, step, None, 3)[0]
        for memory in (low, (2 * low + high) // 3, (low + high) // 2):
            if seed % 2:
                slow_link(monkeypatch)
            found = _run(model, x, step, memory, 3)
            assert equal(found[0], wanted), (seed, memory)
            kinds.add(found[2])
    assert kinds == {"planned", "on demand"}


def _run(
    model: nn.Module,
    x: Tensor,
    step: Callable[[nn.Module, Tensor], None],
    memory: int | None,
    steps: int,
) -> tuple[list[Tensor], int, str]:
    """Return states, predicted bytes, and the kind of the last of some steps."""
    ours = copy.deepcopy(model)
    off = (
        None
        if memory is None
        else anybatch.offload(memory=memory, device="cpu", recompute=memory != LOTS)
    )
    torch.manual_seed(1)
    idle = 0
    for k in range(steps):
        ours.zero_grad()

        def body() -> None:
            with off or nullcontext():
                step(ours, x)

        most = held(ours, (x,), body)
        if off is None or memory is None:
            continue
        assert off.last is not None
        assert off.last.predicted_bytes is not None
        if k == 0:
            idle = most - off.last.predicted_bytes  # weights that no operation uses
        assert most - idle <= off.last.predicted_bytes <= memory
    if off is None or off.last is None or off.last.predicted_bytes is None:
        return states(ours), 0, ""
    return states(ours), off.last.predicted_bytes, off.last.mode
