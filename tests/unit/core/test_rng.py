from __future__ import annotations

import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anybatch.core import rng
from anybatch.core.rng import RNGState


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def test_the_same_rng_states_give_the_same_draws_from_all_generators() -> None:
    rng_state = RNGState.now()
    first = draw()
    second = draw()
    assert all(a != b for a, b in zip(first, second, strict=True))
    rng_state.put_back()
    assert draw() == first
    rng_state.put_back()
    assert draw() == first, "a state can be put back any number of times"


def test_taking_the_state_draws_nothing() -> None:
    torch.manual_seed(3)
    RNGState.now()
    a = torch.rand(())
    torch.manual_seed(3)
    assert torch.equal(a, torch.rand(()))


def draw_torch() -> None:
    torch.rand(())


def draw_numpy() -> None:
    np.random.rand()


def draw_normal() -> None:
    """Numpy makes two at once and keeps one, which it hands out without touching its words."""
    np.random.randn()


def draw_python() -> None:
    random.random()


def draw_gauss() -> None:
    """Python keeps one, too."""
    random.gauss(0, 1)


@pytest.mark.parametrize("seed", range(3))
def test_the_rng_states_of_a_later_moment_are_those_of_now(seed: int) -> None:
    """They are not asked again where their memory is the same; here each of them is."""
    order = random.Random(seed)
    retained = [RNGState.now()]
    draws = [draw_torch, draw_numpy, draw_normal, draw_python, draw_gauss, lambda: None]
    draws += [lambda: order.choice(retained).put_back(), lambda: retained.append(RNGState.now())]
    assert rng.LOCATED
    for _ in range(400):
        order.choice(draws)()
        rng_state, numpy = RNGState.now(), np.random.get_state()
        assert torch.equal(rng_state.cpu, torch.get_rng_state())
        assert rng_state.python == random.getstate()
        assert np.array_equal(rng_state.numpy[1], numpy[1])
        assert rng_state.numpy[2:] == numpy[2:]


def test_a_normal_number_that_comes_back_by_itself_is_detected() -> None:
    """The words of numpy's generator are the same with it and without."""
    np.random.seed(0)
    np.random.randn()
    saved = np.random.get_state()
    np.random.randn()
    without = RNGState.now()
    np.random.set_state(saved)
    again = RNGState.now()
    assert np.array_equal(without.numpy[1], again.numpy[1])
    assert (without.numpy[3], again.numpy[3]) == (0, 1)


def test_a_generator_of_another_sort_is_queried_every_time() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert rng.memory() is None
            first = RNGState.now()
            assert first.same_as(RNGState.now())
            np.random.rand()
            assert not RNGState.now().others_as(first)
            assert RNGState.now().checksum() != first.checksum()
    finally:
        np.random.set_bit_generator(before)


def test_the_state_of_the_host_is_that_of_another_process() -> None:
    rng_state = RNGState.on([])
    first, moved = draw(), RNGState.on([])
    assert len({rng_state.checksum(), moved.checksum()}) == 2
    pickle.loads(pickle.dumps(rng_state)).put_on([])
    assert RNGState.on([]).checksum() == rng_state.checksum()
    assert draw() == first
    assert RNGState.on([]).checksum() == moved.checksum()


@pytest.mark.parametrize(
    "move", [lambda: torch.rand(()), random.random, np.random.rand, np.random.randn]
)
def test_a_checksum_distinguishes_states(move: Any) -> None:
    rng_state = RNGState.now()
    move()
    assert RNGState.now().checksum() != rng_state.checksum()


def test_a_state_is_saved_as_plain_data(tmp_path: Path) -> None:
    rng_state = RNGState.now()
    torch.save(rng_state.to_dict(), tmp_path / "state")
    first = draw()
    RNGState.from_dict(torch.load(tmp_path / "state", weights_only=True)).put_back()
    assert RNGState.now().same_as(rng_state)
    assert draw() == first


def test_accelerators_that_are_not_all_here_are_left_out() -> None:
    other = RNGState.now()._replace(devices=(("cuda:0", torch.zeros(1)), ("cuda:1", torch.ones(1))))
    found = RNGState.from_dict(other.to_dict())
    assert len(found.devices) in (0, 2 * (torch.cuda.device_count() == 2))
