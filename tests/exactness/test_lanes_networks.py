"""README: BatchNorm is that of the full batch, in the networks that people train.

Every network is trained for two optimizer steps in float64, undivided by torch alone and in lanes,
and loss, gradients, running statistics and counters are compared. Small networks hide what whole
ones show: fifty normalisations in a row make rounding grow, branches meet in their own order,
activations work in place on what others wait with, two heads take part in one loss.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from tests.networks import NETWORKS
from tests.oracle import assert_exact, error_of, state_after, trained, undivided
from torch import Tensor, nn

import anybatch
from anybatch import Engine, Plan
from anybatch.reports import Memory, OffloadPlan

N = 22
SPLITS = [1, 7]
"""22 lanes of one sample; 7, 7, 7 and a single one. The second step has 19 samples."""

State = dict[str, Tensor]


class Case(NamedTuple):
    """A network in float64, its batch, and what torch alone makes of the two."""

    model: nn.Module
    loss: Any
    x: Tensor
    y: Tensor
    want: State
    noise: dict[str, float]


@cache
def case(name: str, *, full: bool = False) -> Case:
    """Return a network after two undivided steps, and how far permuted rows get from that."""
    network = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = (network.full if full else network.small)().double()
        x, y = network.rows(N)
        order = torch.cat([torch.randperm(3), 3 + torch.randperm(N - 3)])
    x = x.double()
    y = y.double() if network.masks else y
    by_torch = partial(trained(partial(plain_step, network.loss)), model)
    want = by_torch(x, y)
    noise = error_of(by_torch(x[order], y[order]), want)
    return Case(model, network.loss, x, y, want, noise)


def plain_step(loss: Any, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A step without an engine."""
    found: Tensor = loss(model(x), y)
    found.backward()
    return found


def in_lanes(loss: Any, model: nn.Module, x: Tensor, y: Tensor, *, micro_batch: int) -> Tensor:
    """A step in lanes of which nothing stays on the device while it waits."""
    engine = Engine(model, loss, micro_batch=micro_batch)
    found = engine.backward(x, y)
    assert engine.plan is not None
    assert (engine.plan.mechanism, bool(engine.plan.exact)) == ("lockstep", True)
    assert engine.last is not None
    assert engine.last.micro_batches == -(-len(x) // micro_batch)
    assert engine.last.moved_bytes > 0
    return found


@pytest.mark.large(few=1)
@pytest.mark.parametrize("micro_batch", SPLITS)
@pytest.mark.parametrize("name", NETWORKS)
def test_two_steps_in_lanes_are_two_steps_of_the_whole_batch(name: str, micro_batch: int) -> None:
    model, loss, x, y, want, noise = case(name)
    got = trained(partial(in_lanes, loss, micro_batch=micro_batch))(model, x, y)
    assert_exact(got, want, noise)


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """Whether networks have their full depth."""
    return bool(request.config.getoption("--soak"))


@pytest.mark.large(few=3)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_split_of_the_full_networks(
    name: str, full: bool, counted: Callable[[int], int]
) -> None:
    """From 2 lanes to 22; an ordinary run takes one split of the small networks."""
    model, loss, x, y, want, noise = case(name, full=full)
    every = range(1, N - 3)
    for micro_batch in random.Random(name).sample(every, counted(len(every))):
        got = trained(partial(in_lanes, loss, micro_batch=micro_batch))(model, x, y)
        assert_exact(got, want, noise)


def with_capacity(found: Case, capacity: int, inside: int | None = None) -> tuple[State, int]:
    """Return what a step in lanes of 6 leaves, and the bytes it moved; `capacity` bytes may stay.

    `inside`: bytes that may stay of the lane that runs, too.
    """
    memory = Memory(2**40, "as given", 0, (), 0, 0, "not at all", waiting_capacity=capacity)
    offloaded = None if inside is None else OffloadPlan("file", None, (inside, inside), 0, 0, 1)
    plan = Plan(6, "lockstep", "in place", "as written", True, (), memory, offload=offloaded)
    engines: list[Engine] = []

    def run(model: nn.Module) -> Tensor:
        engines.append(Engine(model, found.loss, plan=plan))
        return engines[0].backward(found.x, found.y)

    state, last = state_after(found.model, run), engines[0].last
    assert last is not None
    assert last.micro_batches == 4
    return state, last.moved_bytes


@pytest.mark.large(few=1)
@pytest.mark.parametrize("name", NETWORKS)
def test_what_leaves_the_device_and_what_stays_changes_no_bit(name: str) -> None:
    found = case(name)
    parked, most = with_capacity(found, 0)
    for capacity, bound in ((most // 16, most), (most, 1)):
        state, moved = with_capacity(found, capacity)
        assert moved < bound, (capacity, moved, most)
        assert state.keys() == parked.keys()
        assert all(torch.equal(state[name], parked[name]) for name in parked)
    for inside in (0, most // 64):  # between any two kernels everything leaves, or what must
        state, moved = with_capacity(found, 0, inside)
        assert moved > most or inside
        assert all(torch.equal(state[name], parked[name]) for name in parked)
    assert_exact(parked, undivided(found.model, found.loss, found.x, found.y), found.noise)


@pytest.mark.large(few=1)
@pytest.mark.parametrize("name", ["ResNet-20", "U-Net"])
def test_in_a_budget_they_are_exact_too(name: str, full: bool) -> None:
    model, loss, x, y, want, noise = case(name)
    memory = anybatch.plan(model, loss, (x, y), memory="1GiB", timed=False).memory
    assert memory is not None
    for share in (0.0, 0.2, 0.5, 0.8) if full else (0.5,):
        budget = int(memory.floor + share * (memory.undivided - memory.floor))
        plan = anybatch.plan(model, loss, (x, y), memory=budget, timed=False)
        assert plan.mechanism == "lockstep"

        def step(model: nn.Module, x: Tensor, y: Tensor, plan: Plan = plan) -> Tensor:
            return Engine(model, loss, plan=plan).backward(x, y)

        assert_exact(trained(step)(model, x, y), want, noise)


@pytest.mark.large(few=3)
@pytest.mark.parametrize("name", NETWORKS)
def test_channels_last_is_exact_and_stays_channels_last(name: str) -> None:
    found, layout = case(name), torch.channels_last
    model: Any = copy.deepcopy(found.model)
    model = model.to(memory_format=layout)
    x = found.x.contiguous(memory_format=layout)
    want = undivided(model, found.loss, x, found.y)
    got = state_after(model, lambda m: Engine(m, found.loss, micro_batch=6).backward(x, found.y))
    assert_exact(got, want, found.noise)
    assert_exact(got, undivided(found.model, found.loss, found.x, found.y), found.noise)
    assert {n: t.stride() for n, t in got.items()} == {n: t.stride() for n, t in want.items()}


def distance(got: State, want: State, variant: str) -> float:
    """Return how far tensors of one kind are from the true ones, as a share of their length."""
    names = [name for name in want if name.endswith(variant)]
    gap = sum(float((got[name].double() - want[name]).square().sum()) for name in names)
    return float((gap / sum(float(want[name].square().sum()) for name in names)) ** 0.5)


@pytest.mark.large(few=2)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", NETWORKS)
def test_in_bfloat16_lanes_are_as_near_to_the_truth_as_the_undivided_batch(
    name: str, layout: torch.memory_format
) -> None:
    found = case(name)
    model: Any = copy.deepcopy(found.model).float()
    model = model.to(memory_format=layout)
    x, y = found.x.float().contiguous(memory_format=layout), found.y
    y = y.float() if y.is_floating_point() else y
    exact = undivided(copy.deepcopy(model).double(), found.loss, x.double(), found.y)
    with torch.autocast("cpu", torch.bfloat16):
        plain = undivided(model, found.loss, x, y)
        got = state_after(model, lambda m: Engine(m, found.loss, micro_batch=6).backward(x, y))
    for variant in (".grad", "running_mean (buffer)", "running_var (buffer)"):
        assert 0 < distance(got, exact, variant) <= 2 * distance(plain, exact, variant), variant
    assert {n: t.dtype for n, t in got.items()} == {n: t.dtype for n, t in plain.items()}
