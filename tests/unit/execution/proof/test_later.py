"""What a model does at a later step, or in a later call, is found there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_of, undivided
from tests.unit.execution.proof.nets import Net, batch, hooked
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine
from anybatch.errors import NotExactError


class Later(nn.Module):
    """A body that comes in at the second step, perhaps beside a BatchNorm.

    Attributes:
        on: it is in.
        stored: for the body.
    """

    def __init__(self, body: Callable[[Later, Tensor], Tensor], norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), norm, nn.Linear(8, 3)
        self.body, self.on, self.stored = body, False, list[Any]()
        self.number: Any = None
        self.centres = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        return self.last(self.body(self, h) if self.on else h)


def first_stored(net: Later, h: Tensor) -> Tensor:
    if net.number is None:
        net.number = h.detach().mean(0)
    return h - net.number


def first_in_a_list(net: Later, h: Tensor) -> Tensor:
    if not net.stored:
        net.stored.append(h.detach().mean(0))
    return h - net.stored[0]


LATER: dict[str, Callable[[Later, Tensor], Tensor]] = {
    "mean": lambda _, h: h - h.mean(0),
    "length": lambda _, h: h * len(h) ** -0.5,
    "a hook": lambda _, h: hooked(lambda g: g / g.norm())(h),
    "what the first call has kept": first_stored,
    "what the first call has put into a list": first_in_a_list,
}


@pytest.mark.product
@pytest.mark.parametrize("norm", [nn.Identity, partial(nn.BatchNorm1d, 8)])
@pytest.mark.parametrize("name", LATER)
def test_what_changes_at_the_second_step_is_found_there(
    name: str, norm: Callable[[], nn.Module]
) -> None:
    net, (x, y) = Later(LATER[name], norm()).double(), batch()
    engine = Engine(net, F.cross_entropy, micro_batch=3)
    engine.backward(x, y)
    net.on = True
    with pytest.raises(NotExactError):
        engine.backward(x, y)


@pytest.mark.parametrize("norm", [nn.Identity, partial(nn.BatchNorm1d, 8)])
def test_what_was_refused_once_is_refused_again(norm: Callable[[], nn.Module]) -> None:
    def detached(net: Later, h: Tensor) -> Tensor:
        return h - h.detach().mean(0) if net.number else h - h.new_zeros(8)

    net, (x, y) = Later(detached, norm()).double(), batch()
    net.on = True
    engine = Engine(net, F.cross_entropy, micro_batch=3)
    for net.number in (False, True, True, False, True):
        if not net.number:
            engine.backward(x, y)
            continue
        with pytest.raises(NotExactError, match="in mean"):
            engine.backward(x, y)


def test_a_loss_that_changes_at_a_later_step_is_found_there() -> None:
    on = []

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs / outputs.norm() if on else outputs, y)

    net, (x, y) = nn.Linear(6, 3).double(), batch()
    engine = Engine(net, loss, micro_batch=3)
    engine.backward(x, y)
    net.zero_grad()
    on.append(1)
    want = undivided(net, loss, x, y)
    got = state_of(net, engine.backward(x, y))
    assert engine.plan is not None
    assert engine.plan.mechanism == "two-pass"
    assert_exact(got, want)


def test_graphs_that_change_without_end_are_not_shown() -> None:
    class Deeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.depth = nn.Linear(6, 3), 0

        def forward(self, x: Tensor) -> Tensor:
            h = self.head(x)
            for _ in range(self.depth):
                h = h.tanh()
            return h

    net, (x, y) = Deeper().double(), batch()
    engine = Engine(net, F.cross_entropy, micro_batch=3)
    shown = []
    for net.depth in range(18):
        engine.backward(x, y)
        assert engine.plan is not None
        shown.append(bool(engine.plan.exact))
    assert shown == [True] * 16 + [False] * 2
    assert "builds another graph from step to step" in str(engine.plan.exact)


@pytest.mark.parametrize("norm", [nn.Identity, partial(nn.BatchNorm1d, 8)])
def test_a_number_that_is_set_in_every_step_does_not_hide_another(
    norm: Callable[[], nn.Module],
) -> None:
    def annealed(net: Later, h: Tensor) -> Tensor:
        h = h / net.number
        return h - (h.detach().mean(0) if net.centres else h.new_zeros(8))

    net, (x, y) = Later(annealed, norm()).double(), batch()
    net.on = True
    engine = Engine(net, F.cross_entropy, micro_batch=3)
    for step in range(20):
        net.number = 1 / (1 + step / 100)
        engine.backward(x, y)
    net.centres = True
    with pytest.raises(NotExactError, match="in mean"):
        engine.backward(x, y)


@pytest.mark.parametrize("norm", [nn.Identity, partial(nn.BatchNorm1d, 8)])
def test_inputs_that_forward_writes_to_remain_after_a_second_inspection(
    norm: Callable[[], nn.Module],
) -> None:
    net = Later(lambda _, h: h.tanh(), norm())
    net.register_forward_pre_hook(lambda _, args: args[0].mul_(2.0).__class__ and None)
    (x, y), net = batch(), net.double()
    was = x.clone()
    engine = Engine(net, F.cross_entropy, micro_batch=3)
    for net.on in [False] * 8 + [True] * 4:
        engine.backward(x, y)
    assert torch.equal(x, was)


@pytest.mark.parametrize("norm", [nn.Identity, partial(nn.BatchNorm1d, 8)])
def test_reads_are_noted_under_any_mode_of_ours_that_passes_them_on(
    norm: Callable[[], nn.Module],
) -> None:
    net, (x, y) = Later(lambda _, h: h * (1 + 0 * float(h.max())), norm()).double(), batch()
    net.on = True
    engine = Engine(net, F.cross_entropy, micro_batch=3)
    engine.backward(x, y)
    assert engine.plan is not None
    assert "Python reads a number of the samples" in str(engine.plan.exact)


@pytest.mark.parametrize("gate", [None, 0.0])
def test_numbers_that_calls_move_are_refused_behind_a_gate(gate: float | None) -> None:
    calls: list[int] = []

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, h: Tensor) -> Tensor:
            self.calls += 1
            calls.append(len(h))
            return h * (1 + 0.2 * self.calls)

    counts = Counts()
    net, (x, y) = Net(counts, gate).double(), batch()
    with pytest.raises(NotExactError, match="Counts.* computes mul with 1.2 in one call and with"):
        Engine(net, F.cross_entropy, micro_batch=3).backward(x, y)
    assert counts.calls == 0, "a look is no call"
