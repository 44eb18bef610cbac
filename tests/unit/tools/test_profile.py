from __future__ import annotations

import copy
import os
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.pool import ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import anybatch
from anybatch import Engine
from anybatch.reports import Profile
from anybatch.tools.profile import (
    COMPUTE,
    EXCHANGE,
    LOAD,
    PREPARE,
    TRANSFER,
    UPDATE,
    Clock,
    again_and_again,
    profile,
)


class Hands:
    """A clock that goes on where a test says so: what it shows is known to the digit."""

    def __init__(self) -> None:
        self.now = array("d", (0.0, 0.0))  # a number that moves would be looked at

    def on(self, wall: float, core: float = 0.0) -> None:
        self.now[0] += wall
        self.now[1] += core

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now[0], lambda: self.now[1])


class Timed(nn.Module):
    def __init__(self, hands: Hands, seconds: float) -> None:
        super().__init__()
        self.inner, self.hands, self.seconds = nn.Linear(4, 3), hands, seconds

    def forward(self, x: Tensor) -> Tensor:
        self.hands.on(self.seconds, self.seconds)
        found: Tensor = self.inner(x)
        return found


class Step(torch.optim.SGD):
    hands: Hands
    seconds = 0.0

    def step(self, closure: Any = None) -> Any:
        self.hands.on(self.seconds, self.seconds)
        return super().step(closure)


class Read(Dataset[tuple[Tensor, Tensor]]):
    """Waits 0.25 s for the storage and prepares for 0.5 s, each sample."""

    def __init__(self, hands: Hands) -> None:
        self.hands = hands

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.hands.on(0.75, 0.5)
        return torch.ones(4), torch.tensor(index % 3)


class Streamed(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from ((torch.ones(4), torch.tensor(k % 3)) for k in range(32))


def loop(loader_of: Any, micro_batch: int = 2) -> tuple[Hands, Profile]:
    hands = Hands()
    model = Timed(hands, 0.125)
    optimizer = Step(model.parameters(), lr=0.1)
    optimizer.hands, optimizer.seconds = hands, 0.0625
    engine = Engine(model, F.cross_entropy, micro_batch=micro_batch)
    return hands, profile(loader_of(hands), engine, optimizer, steps=5, clock=hands.clock)


def test_seconds_are_those_of_the_parts_to_the_digit() -> None:
    _, found = loop(lambda hands: DataLoader(Read(hands), batch_size=8))
    assert len(found.stages) == 7
    assert {one.name: one.shows for one in found.stages if one.shows} == {
        LOAD: 8 * 0.25, PREPARE: 8 * 0.5, COMPUTE: 4 * 0.125, UPDATE: 0.0625,
    }  # fmt: skip
    assert (found.samples, found.steps) == (8, 5)
    assert found.overhead == (6 + 0.0625) / 0.5
    assert found.bottleneck.name == PREPARE


def test_what_workers_hide_is_measured_and_does_not_show() -> None:
    """A worker's clock is its own: this process waits for it and sees no hand move."""
    _, found = loop(lambda hands: DataLoader(Read(hands), batch_size=8, num_workers=1))
    load, prepare = found.stage(LOAD), found.stage(PREPARE)
    assert (load.shows, prepare.shows) == (0.0, 0.0)
    assert (load.takes, prepare.takes) == (8 * 0.25, 8 * 0.5)
    assert found.overhead == 0.0625 / 0.5


def test_any_iterable_is_a_loader_and_what_it_waits_for_is_loading() -> None:
    def loader(hands: Hands) -> Any:
        class Slow:
            def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
                for _ in range(2):  # fewer than steps: it is started again
                    hands.on(1.0, 0.25)
                    yield torch.ones(6, 4), torch.zeros(6, dtype=torch.int64)

        return Slow()

    _, found = loop(loader)
    assert (found.stage(LOAD).shows, found.stage(PREPARE).shows) == (0.75, 0.25)
    assert found.stage(COMPUTE).shows == 3 * 0.125
    assert "load mini-batches ahead" in found.remedies[0].what


@pytest.mark.parametrize("workers", [0, 1])
def test_data_sets_that_are_streams(workers: int) -> None:
    _, found = loop(lambda _: DataLoader(Streamed(), batch_size=8, num_workers=workers))
    assert found.samples == 8
    assert found.stage(COMPUTE).shows == 4 * 0.125


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3)
    )


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return all that training has moved, with the tensors that hold it."""
    states = [optimizer.state[p] for p in model.parameters() if p in optimizer.state]
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [v for held in states for v in held.values() if isinstance(v, Tensor)]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return (
        [(id(t), t.detach().clone()) for t in tensors],
        [sorted(held) for held in states],
        copy.deepcopy(options),
        torch.get_rng_state(),
    )


def alike(a: Any, b: Any) -> bool:
    same = [i == j and torch.equal(x, y) for (i, x), (j, y) in zip(a[0], b[0], strict=True)]
    return all(same) and a[1:3] == b[1:3] and torch.equal(a[3], b[3])


def a_loop(optimizer: str, *, trained: bool) -> tuple[Any, nn.Module, Any, Engine]:
    torch.manual_seed(0)
    model = network()
    opt = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(24, 4), torch.randint(0, 3, (24,)))
    rng = torch.Generator().manual_seed(1)
    loader = DataLoader(data, batch_size=8, shuffle=True, generator=rng)
    engine = Engine(model, F.cross_entropy, micro_batch=4, optimizer=opt)
    if trained:
        for x, y in loader:
            opt.zero_grad()
            engine.backward(x, y)
            opt.step()
    return loader, model, opt, engine


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adagrad"])
@pytest.mark.parametrize("trained", [False, True])
def test_nothing_is_left_behind(optimizer: str, trained: bool) -> None:
    loader, model, opt, engine = a_loop(optimizer, trained=trained)
    before, rng_state = state(model, opt), loader.generator.get_state()
    anybatch.profile(loader, engine, opt, steps=2)
    assert alike(before, state(model, opt))
    assert torch.equal(rng_state, loader.generator.get_state())


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_nothing_is_left_behind_when_it_is_interrupted(error: type[BaseException]) -> None:
    loader, model, opt, engine = a_loop("AdamW", trained=True)
    before = state(model, opt)

    def stop(done: int, _: int) -> None:
        if done == 2:
            raise error

    with pytest.raises(error):
        anybatch.profile(loader, engine, opt, steps=4, progress=stop)
    assert alike(before, state(model, opt))


def test_training_goes_on_as_if_nothing_had_been_measured() -> None:
    ends = []
    for profiled in (False, True):
        loader, model, opt, engine = a_loop("AdamW", trained=True)
        if profiled:
            anybatch.profile(loader, engine, opt, steps=2)
        for x, y in loader:
            opt.zero_grad()
            engine.backward(x, y)
            opt.step()
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


class Nested(torch.optim.SGD):
    """Keeps lists of tensors, and an option that it adds."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            for p in group["params"]:
                held = self.state[p]
                held.setdefault("history", [torch.zeros(1)])
                held["history"][0] += 1
                held["history"].append(torch.ones(1))
        return super().step(closure)


@pytest.mark.parametrize("trained", [False, True])
def test_nested_state_new_options_and_tensors_as_options_are_put_back(trained: bool) -> None:
    model = nn.Linear(4, 3)
    rate = torch.tensor(0.5)
    opt = Nested(model.parameters(), lr=rate)
    batches = [(torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))]
    engine = Engine(model, F.cross_entropy, micro_batch=4)
    if trained:
        engine.backward(*batches[0])
        opt.step()
    lists = [held["history"] for held in opt.state.values()]
    values = [[t.clone() for t in one] for one in lists]
    options = [sorted(group) for group in opt.param_groups]
    anybatch.profile(batches, engine, opt, steps=2)
    assert [held["history"] for held in opt.state.values()] == lists
    for one, before in zip(lists, values, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, before, strict=True))
    assert [sorted(group) for group in opt.param_groups] == options
    assert opt.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5


def test_rng_of_samplers_and_what_ends_are_restored() -> None:
    rng = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 4), torch.randint(0, 3, (24,)))
    loader = DataLoader(data, batch_size=8, sampler=RandomSampler(data, generator=rng))
    _, _, opt, engine = a_loop("SGD", trained=False)
    before = rng.get_state()
    anybatch.profile(loader, engine, opt, steps=2)
    assert torch.equal(before, rng.get_state())
    with pytest.raises(ValueError, match="loader must be one that can be started again"):
        anybatch.profile(iter([]), engine, opt)


class Opened(Dataset[tuple[Tensor, Tensor]]):
    """Holds what only the process that opened it may use."""

    opened_in: int | None = None

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.opened_in is None:
            self.opened_in = os.getpid()
        assert self.opened_in == os.getpid()
        return torch.ones(4), torch.tensor(index % 3)


def test_a_data_set_is_never_read_here_where_workers_read_it() -> None:
    data = Opened()
    _, found = loop(lambda _: DataLoader(data, batch_size=8, num_workers=1))
    assert data.opened_in is None
    assert found.samples == 8


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    _, model, _, engine = a_loop("SGD", trained=False)
    with pytest.raises(anybatch.errors.NotYetError, match="LBFGS needs a closure"):
        anybatch.profile([], engine, torch.optim.LBFGS(model.parameters()))


def test_the_plan_that_was_made_is_saved_and_tells_of_memory() -> None:
    _, model, opt, _ = a_loop("SGD", trained=False)
    data = TensorDataset(torch.randn(24, 4), torch.randint(0, 3, (24,)))
    engine = Engine(model, F.cross_entropy, optimizer=opt, memory="1MiB")
    observed: list[int] = []
    found = anybatch.profile(
        DataLoader(data, batch_size=8), engine, opt, steps=3,
        progress=lambda done, every: observed.append(done * 10 + every),
    )  # fmt: skip
    assert engine.plan is not None
    assert observed == [13, 23, 33]
    assert found.samples == 8


def test_a_mini_batch_is_split_as_one_says() -> None:
    model = nn.Linear(4, 3)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [{"x": torch.ones(8, 4), "y": torch.zeros(8, dtype=torch.int64)}]
    engine = Engine(model, F.cross_entropy, micro_batch=4)
    found = anybatch.profile(
        batches, engine, opt, steps=1, split=lambda batch: (batch["x"], batch["y"])
    )
    assert found.samples == 8


def test_what_cannot_be_profiled_is_refused() -> None:
    loader, _, opt, engine = a_loop("SGD", trained=False)
    with pytest.raises(ValueError, match="steps must be an integer of at least 1, and it is 0"):
        anybatch.profile(loader, engine, opt, steps=0)
    with pytest.raises(ValueError, match="loader must yield mini-batches, and it yields none"):
        anybatch.profile([], engine, opt)


def test_what_is_lazy_or_waits_elsewhere_is_refused() -> None:
    batches = [(torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))]
    lazy = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 3))
    engine = Engine(lazy, F.cross_entropy, micro_batch=4)
    optimizer = torch.optim.SGD(lazy[1].parameters(), lr=0.1)
    with pytest.raises(anybatch.errors.NotYetError, match="parameters must have data before"):
        anybatch.profile(batches, engine, optimizer)
    model = nn.Linear(4, 3)
    adam = torch.optim.AdamW(model.parameters())
    plan = anybatch.plan(
        model, F.cross_entropy, batches[0], memory="1MiB", optimizer=adam, states="file"
    )
    engine = Engine(model, F.cross_entropy, optimizer=adam, plan=plan)
    with pytest.raises(anybatch.errors.NotYetError, match="with offloaded optimizer state"):
        anybatch.profile(batches, engine, adam)


def exchanged(_rank: int, _size: int) -> tuple[Any, bool]:
    _, model, opt, engine = a_loop("AdamW", trained=False)
    batches = [(torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))]
    before = state(model, opt)
    found = anybatch.profile(batches, engine, opt, steps=3)
    return found, alike(before, state(model, opt))


def test_ranks_see_what_they_exchange() -> None:
    with ranks(2) as pool:
        for found, untouched in pool.run(exchanged):
            assert untouched
            assert found.samples == 16
            one = found.stage(EXCHANGE)
            assert one.shows > 0
            assert one.takes > 0
            assert found.stage(TRANSFER).takes == 0


def one_is_longer(rank: int, _size: int) -> int:
    model = nn.Sequential(nn.Linear(4, 3), Shortened())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(model, F.cross_entropy, optimizer=optimizer, memory="64MiB")
    long = [40 if (rank, index) == (0, 3) else 8 for index in range(6)]
    rows = [(torch.randn(6, length, 4), torch.randint(3, (6,))) for length in long]
    return profile(rows, engine, optimizer, steps=3).steps


class Shortened(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """[n, L, classes] -> [n, classes]."""
        return x.mean(1)


def test_ranks_take_as_many_steps_where_one_of_them_plans_anew() -> None:
    """One did not count the step that its longer mini-batch planned, and waited for the other."""
    with ranks(2) as pool:
        assert pool.run(one_is_longer) == [3, 3]


def test_a_step_that_plans_for_another_size_of_batch_is_not_counted() -> None:
    """The last mini-batch of an epoch came third, and its forecast was told as a step's seconds."""
    hands = Hands()
    model = nn.Sequential(Timed(hands, 0.125), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(model, F.cross_entropy, memory="1MiB", micro_batch=2)
    rows = [(torch.randn(n, 4), torch.randint(3, (n,))) for n in (8, 8, 5)]
    found = profile(rows, engine, optimizer, steps=3, clock=hands.clock)
    assert engine.plan is not None
    assert engine.plan.mechanism == "lockstep"
    assert found.stage(COMPUTE).shows == pytest.approx((4 + 4 + 3) * 0.125 / 3)


def test_the_first_mini_batch_of_an_epoch_is_distinguished_from_the_others() -> None:
    observed = [first for (first, _), _ in zip(again_and_again([*"abc"]), range(7), strict=False)]
    assert observed == [True, False, False, True, False, False, True]
