"""Ranks bring the same to several steps, and then something else; steps fail on one of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.faults import in_backward, unwalked
from tests.oracle import assert_exact, same, state_of
from tests.pool import Pool, ranks
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine
from anybatch.devices import Group

SIZE, MICRO = 3, 2
STEPS = 5
"""Steps in which all bring the same before one fails."""
KINDS = ("streamed", "coupled", "lanes", "ignored")


@pytest.fixture(scope="module")
def workers() -> Iterator[Pool]:
    with ranks(SIZE) as found:
        yield found


def net(variant: str) -> nn.Module:
    torch.manual_seed(2)
    norm = nn.BatchNorm1d(6) if variant == "lanes" else nn.Tanh()
    return nn.Sequential(nn.Linear(5, 6), norm, nn.Linear(6, 3)).double()


def loss_of(variant: str) -> Any:
    if variant == "coupled":
        return lambda out, y: (out.T @ F.one_hot(y, 3).double()).square().mean()
    return lambda out, y: F.cross_entropy(out, y, ignore_index=1 if variant == "ignored" else -100)


def shards_of(seed: int, steps: int) -> list[tuple[int, ...]]:
    """Samples of each rank in each step: the same for a while, then others on one rank or all."""
    draw = random.Random(seed)
    found, now = [], [4, 4, 4]
    while len(found) < steps:
        found += [tuple(now)] * draw.randint(2, 5)
        now[draw.randrange(SIZE)] = draw.choice([0, 1, 3, 4, 5])
        now = [4, 4, 4] if draw.random() < 0.3 or sum(now) < 2 else now
    return found[:steps]


def batch_of(step: int, shards: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """[n, 5] and [n] of all ranks; none of the targets is ignored in all of them."""
    draw = torch.Generator().manual_seed(step)
    n = sum(shards)
    y = torch.randint(3, (n,), generator=draw)
    y[0] = 0
    return torch.randn(n, 5, generator=draw, dtype=torch.float64), y


def mine(rank: int, shards: tuple[int, ...], tensor: Tensor) -> Tensor:
    begin = sum(shards[:rank])
    return tensor[begin : begin + shards[rank]]


def trained(rank: int, _size: int, variant: str, seed: int, steps: int) -> list[Any]:
    """Return loss, gradients and buffers of each step, and the loss of an evaluation now and then.

    Weights stay as they are.
    """
    model, found = net(variant), []
    engine = Engine(model, loss_of(variant), micro_batch=MICRO)
    for step, shards in enumerate(shards_of(seed, steps)):
        x, y = (mine(rank, shards, t) for t in batch_of(step, shards))
        if step % 17 == 16:
            engine.evaluate(x, y)
        model.zero_grad()
        found.append(state_of(model, engine.backward(x, y)))
    return found


@pytest.mark.large(few=2)
@pytest.mark.parametrize("variant", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_batches_that_change_on_some_ranks_give_the_gradient_of_all_samples(
    workers: Pool, variant: str, seed: int
) -> None:
    steps = 30
    every = workers.run(trained, variant, seed, steps)
    model = net(variant)
    for step, shards in enumerate(shards_of(seed, steps)):
        x, y = batch_of(step, shards)
        if step % 17 == 16:
            model(x)
        model.zero_grad()
        loss = loss_of(variant)(model(x), y)
        loss.backward()
        want = state_of(model, loss)
        for found in every:
            assert_exact(found[step], want)


def counted(rank: int, _size: int) -> list[tuple[int, int]]:
    """Return, for each step, how many gathers it took and how many forwards were run."""
    gathers, forwards, steps = [0], [0], []
    started = Group._started

    def noted(self: Group, collective: Any, *args: Any, **named: Any) -> Any:
        gathers[0] += getattr(collective, "__name__", "") == "all_gather"
        return started(self, collective, *args, **named)

    model = net("streamed")
    model.register_forward_pre_hook(lambda *_: forwards.__setitem__(0, forwards[0] + 1))
    engine = Engine(model, loss_of("streamed"), micro_batch=MICRO)
    Group._started = noted  # type: ignore[method-assign]
    try:
        for step in range(STEPS):
            x, y = (mine(rank, (4, 4, 4), t) for t in batch_of(step, (4, 4, 4)))
            gathers[0] = forwards[0] = 0
            engine.backward(x, y)
            steps.append((gathers[0], forwards[0]))
    finally:
        Group._started = started  # type: ignore[method-assign]
    return steps


def test_a_later_step_gathers_its_beginning_its_denominators_and_its_end(workers: Pool) -> None:
    for steps in workers.run(counted):
        assert steps[-1] == (3, 2)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def failing(rank: int, _size: int, where: str, error: str) -> Any:
    """Fail on one rank in a later step; then make it, and the next."""
    model, shards = net("streamed"), (4, 4, 4)
    faults = unwalked([0])
    engine = Engine(model, loss_of("streamed"), micro_batch=MICRO)
    raised = {"fault": ValueError("a fault"), "interrupt": KeyboardInterrupt("stop")}
    raised |= {"memory": RuntimeError("can't allocate memory")}

    def fail(*_: Any) -> None:
        if faults()[0]:
            faults()[0] = 0
            raise raised[error]

    layer = model[0] if where == "forward" else model[2]
    if where == "forward":
        layer.register_forward_pre_hook(fail)
    else:
        in_backward(layer, fail)
    x, y = (mine(rank, shards, t) for t in batch_of(0, shards))
    for _ in range(STEPS):
        model.zero_grad()
        engine.backward(x, y)
    before, said = gradients(model), ""
    if rank == 1:
        faults()[0] = 1
    model.zero_grad()
    try:
        engine.backward(x, y)
    except BaseException as caught:
        said = f"{type(caught).__name__}: {caught}"
        engine.backward(x, y)
    return said, before, gradients(model)


@pytest.mark.product
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", ["fault", "interrupt", "memory"])
def test_a_failure_in_a_later_step_is_one_on_all_ranks(
    workers: Pool, where: str, error: str
) -> None:
    for rank, (said, before, after) in enumerate(workers.run(failing, where, error)):
        assert ("rank 1" in said) == (rank != 1 and error != "memory")
        if error == "memory":
            assert said == ""
            assert_exact(after, before)
        else:
            assert same(before, after)
