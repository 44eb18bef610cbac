"""A size may not be one that the model takes: the training goes on without it."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.oracle import assert_exact, same, state_of, undivided
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine, LazyBatch, Plan, plan
from anybatch.errors import NotExactError

STEPS = 8


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 16).double(), nn.Linear(16, 3).double()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.first(self.meet(x)).tanh()))

    def meet(self, x: Tensor) -> Tensor:
        return x


class Centred(Net):
    """Samples meet: no size but the full batch is exact."""

    def meet(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class NoSingleRow(Net):
    """A last micro-batch of one sample fails; other sizes are exact."""

    def meet(self, x: Tensor) -> Tensor:
        if len(x) < 2:
            raise KeyError("no single rows")
        return x


class OnlyItsOwn(Net):
    """Reshapes to the size of its batches."""

    def meet(self, x: Tensor) -> Tensor:
        return x.reshape(3, -1, 6).flatten(0, 1)


class Counts(Net):
    """Depends on how many rows there are."""

    def meet(self, x: Tensor) -> Tensor:
        return x * len(x) / 33


NETS = Centred, NoSingleRow, OnlyItsOwn, Counts


@pytest.fixture(autouse=True)
def _smaller_may_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anybatch.planner.resident_memory.CACHED", 1)


def rows(size: int = 33) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(size)
    x = torch.randn(size, 6, generator=draw, dtype=torch.float64)
    return x, torch.randint(3, (size,), generator=draw)


@pytest.mark.parametrize("size", [33, 9])
@pytest.mark.parametrize("net", NETS)
def test_every_step_is_exact_and_the_search_ends(
    net: type[Net], size: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, (x, y) = net(), rows(size)
    engine = Engine(model, F.cross_entropy, memory="1GiB", cache=None)
    observed: list[Tensor] = []
    with caplog.at_level(logging.INFO, logger="anybatch"):
        for _ in range(STEPS):
            model.zero_grad()
            wanted = undivided(model, F.cross_entropy, x, y)
            observed.clear()
            loss = engine.backward(x, y, observe=lambda _, y: observed.append(y.clone()))
            assert_exact(state_of(model, loss), wanted)
            assert torch.cat(observed).equal(y)
    assert isinstance(engine.plan, Plan)
    assert "still being found" not in str(engine.plan)
    said = [one.message for one in caplog.records if "cannot be run" in one.message]
    assert len(said) == len(set(said)), "each size is given up once"
    if net is Centred:
        assert said
        assert engine.plan.mechanism == "undivided"


def test_what_a_failed_trial_has_drawn_is_put_back() -> None:
    """All steps are undivided in the end, so the draws are those of a plain loop."""
    (x, y), losses = rows(), []
    for plain in (True, False):
        model = Centred(0.5)
        engine = Engine(model, F.cross_entropy, memory="1GiB", cache=None)
        torch.manual_seed(1)
        found = []
        for _ in range(STEPS):
            model.zero_grad()
            if plain:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
            else:
                loss = engine.backward(x, y)
            found.append(state_of(model, loss.detach()))
        losses.append(found)
    for one, other in zip(*losses, strict=True):
        assert same(one, other)


def test_an_error_of_the_batch_itself_goes_out_in_any_step() -> None:
    model, (x, y) = NoSingleRow(), rows()
    engine = Engine(model, F.cross_entropy, memory="1GiB", cache=None)
    wrong = y.clone()
    wrong[-1] = 3
    for _ in range(STEPS):
        model.zero_grad()
        engine.backward(x, y)
        before = state_of(model, torch.zeros(()))
        with pytest.raises(IndexError, match="out of bounds"):
            engine.backward(x, wrong)
        assert same(state_of(model, torch.zeros(())), before)


def test_an_observer_that_fails_is_called_once() -> None:
    """It may have changed something, so its step is not run again, in a trial either."""
    model, (x, y) = Net(), rows()
    engine = Engine(model, F.cross_entropy, memory="1GiB", cache=None)
    calls: list[int] = []

    def observe(outputs: Tensor, _: Tensor) -> None:
        calls.append(len(outputs))
        raise KeyError("the observer")

    sizes = set()
    for _ in range(STEPS):
        calls.clear()
        with pytest.raises(KeyError, match="the observer"):
            engine.backward(x, y, observe=observe)
        assert len(calls) == 1
        sizes |= set(calls)
        engine.backward(x, y)
    assert len(sizes) > 1, "else no trial was among them"


def test_a_batch_that_is_loaded_goes_on_too() -> None:
    model, (x, y) = Centred(), rows()
    engine = Engine(model, F.cross_entropy, memory="1GiB", cache=None)
    for _ in range(STEPS):
        model.zero_grad()
        wanted = undivided(model, F.cross_entropy, x, y)
        loss = engine.backward(LazyBatch(list(zip(x, y, strict=True))))
        assert_exact(state_of(model, loss), wanted)


@pytest.mark.parametrize("net", NETS)
def test_a_plan_with_seconds_is_made_without_such_sizes(net: type[Net]) -> None:
    model, (x, y) = net(), rows()
    engine = Engine(model, F.cross_entropy, memory="1GiB", cache=None)
    plan = engine.foresee(x, y)
    again = Engine(model, F.cross_entropy, plan=plan)
    wanted = undivided(model, F.cross_entropy, x, y)
    assert_exact(state_of(model, again.backward(x, y)), wanted)


class Squeezed(Net):
    """Fails where one sample has lost its dimension."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh().unsqueeze(0)
        return self.last(h.squeeze() if len(x) > 1 else h.squeeze().index_select(1, x[0].long()))


@pytest.mark.parametrize("net", [Squeezed, NoSingleRow, Centred, Counts, OnlyItsOwn])
@pytest.mark.parametrize("last", [10, 16, 13, 3])
def test_a_last_partial_batch_is_exact_where_it_fits(net: type[Net], last: int) -> None:
    """The fastest size so far may leave one of its samples over, or may not be one at all."""
    model = net()
    last = 12 if net is OnlyItsOwn else last
    engine = Engine(model, F.cross_entropy, memory="1GiB", cache=None)
    for size in (33, 33, 33, 33, last, 33, last, 33, 33, last):
        x, y = rows(size)
        model.zero_grad()
        wanted = undivided(model, F.cross_entropy, x, y)
        assert_exact(state_of(model, engine.backward(x, y)), wanted)


def budget_of(model: nn.Module, n: int, size: int) -> int:
    """Return bytes that are enough for micro-batches of `n`, and not for one more."""
    memory = (
        Engine(model, F.cross_entropy, memory="1GiB", micro_batch=n, cache=None)
        .foresee(*rows(size))
        .memory
    )
    assert memory is not None
    return memory.predicted


def test_a_budget_that_leaves_one_sample_over_is_met_by_a_smaller_size() -> None:
    model, (x, y) = Squeezed(), rows(31)
    budget = budget_of(model, 5, 31)
    engine = Engine(model, F.cross_entropy, memory=budget, cache=None)
    for _ in range(STEPS):
        model.zero_grad()
        wanted = undivided(model, F.cross_entropy, x, y)
        assert_exact(state_of(model, engine.backward(x, y)), wanted)
        assert engine.last is not None
        assert 1 < engine.last.micro_batch <= 5
        assert 31 % engine.last.micro_batch != 1


@pytest.mark.parametrize("net", [Centred, Counts])
def test_what_does_not_fit_undivided_is_refused_once(
    net: type[Net], caplog: pytest.LogCaptureFixture
) -> None:
    model, (x, y) = net(), rows(33)
    budget = budget_of(model, 5, 33)
    engine = Engine(model, F.cross_entropy, memory=budget, cache=None)
    with caplog.at_level(logging.INFO, logger="anybatch"), pytest.raises(NotExactError):
        engine.backward(x, y)
    assert not [one for one in caplog.records if "cannot be run" in one.message]


def test_a_plan_that_was_given_is_obeyed_or_refused() -> None:
    model, (x, y) = NoSingleRow(), rows(33)
    planning = Engine(model, F.cross_entropy, memory="1GiB", micro_batch=11, cache=None)
    plan = planning.foresee(x, y)
    with pytest.raises(NotExactError, match="samples 0 and 1 meet"):
        Engine(Centred(), F.cross_entropy, plan=plan).backward(x, y)


def test_a_size_that_was_asked_for_is_refused() -> None:
    model, (x, y) = Centred(), rows()
    engine = Engine(model, F.cross_entropy, memory="1GiB", micro_batch=11, cache=None)
    with pytest.raises(NotExactError, match="samples 0 and 1 meet"):
        engine.backward(x, y)


def queued(out: Tensor, y: Tensor) -> Tensor:
    """Return a loss of pairs that takes as many samples as its queue has, on real rows."""
    if len(out) > 12:
        raise AssertionError
    pairs = torch.where(y[:, None] == y)
    return (out @ out.T)[pairs].logsumexp(0)


def test_a_loss_that_takes_no_more_samples_than_the_batch_is_planned_on_fewer() -> None:
    net, x, y = Net(), torch.randn(12, 6, dtype=torch.float64), torch.arange(12) % 3
    wanted = undivided(net, queued, x, y)
    found = plan(net, queued, (x, y), memory="1GiB", timed=False)
    assert found.mechanism == "undivided"
    engine = Engine(net, queued, memory=found.memory.predicted)
    assert_exact(state_of(net, engine.backward(x, y)), wanted)
