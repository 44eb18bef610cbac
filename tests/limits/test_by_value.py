"""Memory that depends on the values of a batch: noticed, planned again, said, and exact."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from benchmarks.guide.values.networks import SIZE, TOKENS, WAYS, Values, batch, masked
from tests.oracle import assert_exact, error_of, state_of, tolerance, undivided
from tests.peaks import metered
from tests.pool import ranks
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine
from anybatch.errors import BudgetError

KIB = 1024


def peaks(net: Values, engine: Engine, shares: list[float]) -> list[int]:
    """Return the bytes of exact steps, in each of which a share of the tokens is routed."""
    held = []
    for number, share in enumerate(shares):
        x, y = batch(share, number)
        net.zero_grad()
        wanted = undivided(net, F.cross_entropy, x, y)
        with metered({"parameters": net.parameters()}) as meter:
            loss = engine.backward(x, y)
        assert_exact(state_of(net, loss), wanted)
        held.append(int(meter.peak))
    return held


@pytest.mark.large(few=2)
@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_a_step_over_its_forecast_is_noticed_and_the_next_ones_fit(
    way: Callable[[Values, Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """Few tokens are routed at first, then many: an undivided step holds twice the budget."""
    torch.manual_seed(0)
    net = Values(way).double()
    budget = 1400 * KIB
    engine = Engine(net, F.cross_entropy, memory=budget)
    with caplog.at_level(logging.INFO, logger="anybatch"):
        held = peaks(net, engine, [0.02, 0.02, 0.6, 0.6, 0.6, 0.6, 0.6, 0.02])
    assert held[2] > 1.5 * budget, "else there is nothing to notice"
    one = 600 * KIB  # the result of a kernel, after which a step is stopped
    assert max(held[3:]) <= budget + one
    assert max(held[4:]) <= budget
    assert [r.message for r in caplog.records if "depends on the values" in r.message]


class Normalised(Values):
    """The same with BatchNorm: micro-batches wait for each other."""

    def __init__(self, way: Callable[[Values, Tensor], Tensor]) -> None:
        super().__init__(way)
        self.norm = nn.BatchNorm1d(TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x) / 8 + x)


@pytest.mark.large(few=2)
@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_lanes_are_planned_again_by_rows_of_such_values(
    way: Callable[[Values, Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    net = Normalised(way).double()
    engine = Engine(net, F.cross_entropy, memory=1400 * KIB)
    held = peaks(net, engine, [0.02, 0.6, 0.6, 0.6, 0.6])
    assert engine.plan is not None
    assert engine.plan.mechanism == "lockstep"
    assert held[1] > 1400 * KIB, "else there is nothing to notice"
    assert max(held[3:]) <= 1400 * KIB


def test_where_not_even_one_sample_fits_the_step_is_run_and_the_next_one_refused() -> None:
    """A person has no error for the batch that shows it, and one sentence for the next."""
    torch.manual_seed(0)
    net = Values(masked).double()
    engine = Engine(net, F.cross_entropy, memory=250 * KIB)
    engine.backward(*batch(0.0, 0))
    with pytest.raises(BudgetError, match="micro-batches of one sample"):
        for number in range(1, 8):
            net.zero_grad()
            x, y = batch(1.0, number)
            wanted = undivided(net, F.cross_entropy, x, y)
            assert_exact(state_of(net, engine.backward(x, y)), wanted)
    assert number > 1


SHARE = SIZE // 2
"""Samples of a rank."""


def on_rank(rank: int, size: int) -> tuple[list[int], list[float]]:
    """Return what each step held and its error; the tokens of one rank become many."""
    torch.manual_seed(0)
    net = Values(masked).double()
    engine, held, errors = Engine(net, F.cross_entropy, memory=800 * KIB), [], []
    for number, share in enumerate([0.02, 0.02, 0.6, 0.6, 0.6, 0.6]):
        few, many = batch(0.02, number), batch(share, number + 100)
        x, y = (torch.cat([a[:SHARE], b[:SHARE]]) for a, b in zip(few, many, strict=True))
        wanted = undivided(net, F.cross_entropy, x, y)
        mine = slice(rank * SIZE // size, (rank + 1) * SIZE // size)
        with metered({"parameters": net.parameters()}) as meter:
            loss = engine.backward(x[mine], y[mine])
        errors.append(max(error_of(state_of(net, loss), wanted).values()))
        held.append(meter.peak)
        net.zero_grad()
    return held, errors


def test_one_rank_of_two_notices_what_its_own_samples_hold() -> None:
    with ranks(2, fresh=True) as pool:
        (_, errors), (heavy, other) = pool.run(on_rank)
    assert max(errors + other) <= tolerance()
    assert heavy[2] > 800 * KIB
    assert heavy[-1] <= 800 * KIB


def triplets(out: Tensor, y: Tensor) -> Tensor:
    """Return a loss of all triplets: as many as there are, which no dry run knows."""
    same = y[:, None] == y
    a, p, q = torch.where(same[:, :, None] & ~same[:, None])
    near, far = (out[a] - out[p]).square().sum(1), (out[a] - out[q]).square().sum(1)
    return (near - far + 1).relu().mean()


def test_a_budget_error_after_a_step_that_held_more_asks_for_more_than_there_was() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 6))
    engine = Engine(net.double(), triplets, memory=1600 * KIB)
    with pytest.raises(BudgetError) as caught:
        engine.backward(torch.randn(48, 64, dtype=torch.float64), torch.arange(48) % 5)
    assert caught.value.needed > caught.value.budget == 1600 * KIB
    assert "depend on the values" in caught.value.__notes__[0]


def indexed(outputs: Tensor, labels: Tensor) -> Tensor:
    """Pairs of one class beside the nearest sample of another, by the places of a mask."""
    distances, alike = torch.cdist(outputs, outputs), labels[:, None] == labels
    one, other = torch.where(alike)
    nearest = distances.masked_fill(alike, 9.0).amin(1)
    return F.relu(distances[one, other] - nearest[one] + 0.3).mean()


def masked_pairs(outputs: Tensor, labels: Tensor) -> Tensor:
    """Squares of distances within classes, and margins between them, by a mask and its opposite."""
    squares = (outputs[:, None] - outputs).square().sum(2)
    alike = labels[:, None] == labels
    return squares[alike].mean() + F.relu(1 - squares[~alike]).mean()


def chosen(outputs: Tensor, labels: Tensor) -> Tensor:
    """Similarities within classes and between them, by `masked_select`."""
    similar, alike = outputs @ outputs.T, labels[:, None] == labels
    return similar.masked_select(~alike).relu().mean() - similar.masked_select(alike).mean()


@pytest.mark.parametrize(("loss", "share"), [(indexed, 1.5), (masked_pairs, 1.0), (chosen, 1.0)])
def test_pairs_that_a_loss_selects_are_foreseen(
    loss: Callable[[Tensor, Tensor], Tensor], share: float
) -> None:
    """A few rows have few pairs: a step held more than its budget, or twice its forecast."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 16)).double()
    x, labels = torch.randn(256, 64, dtype=torch.double), torch.arange(256) % 7
    wanted = undivided(model, loss, x, labels)
    model.zero_grad()
    with metered({"parameters": model.parameters()}) as meter:
        loss(model(x), labels).backward()
    model.zero_grad()
    budget = int(share * meter.peak)
    engine = Engine(model, loss, memory=budget)
    with metered({"parameters": model.parameters()}) as meter:
        found = engine.backward(x, labels)
    assert engine.last is not None
    assert engine.last.predicted_bytes is not None
    assert meter.peak <= engine.last.predicted_bytes <= budget
    assert_exact(state_of(model, found), wanted)
