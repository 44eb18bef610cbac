from __future__ import annotations

import pickle
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from anybatch.core import generators
from anybatch.core.rng import Dice


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def test_the_same_dice_give_the_same_draws_from_all_generators() -> None:
    dice = Dice.now()
    first = draw()
    second = draw()
    assert all(a != b for a, b in zip(first, second, strict=True))
    dice.put_back()
    assert draw() == first
    dice.put_back()
    assert draw() == first, "a state can be put back any number of times"


def test_taking_the_state_draws_nothing() -> None:
    torch.manual_seed(3)
    Dice.now()
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
def test_the_dice_of_a_later_moment_are_those_of_now(seed: int) -> None:
    """They are not asked again where their memory is the same; here each of them is."""
    order = random.Random(seed)
    kept = [Dice.now()]
    draws = [draw_torch, draw_numpy, draw_normal, draw_python, draw_gauss, lambda: None]
    draws += [lambda: order.choice(kept).put_back(), lambda: kept.append(Dice.now())]
    assert generators.KNOWN
    for _ in range(400):
        order.choice(draws)()
        dice, numpy = Dice.now(), np.random.get_state()
        assert torch.equal(dice.cpu, torch.get_rng_state())
        assert dice.python == random.getstate()
        assert np.array_equal(dice.numpy[1], numpy[1])
        assert dice.numpy[2:] == numpy[2:]


def test_a_normal_number_that_comes_back_alone_is_seen() -> None:
    """The words of numpy's generator are the same with it and without."""
    np.random.seed(0)
    np.random.randn()
    saved = np.random.get_state()
    np.random.randn()
    without = Dice.now()
    np.random.set_state(saved)
    again = Dice.now()
    assert np.array_equal(without.numpy[1], again.numpy[1])
    assert (without.numpy[3], again.numpy[3]) == (0, 1)


def test_a_generator_of_another_kind_is_asked_every_time() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert generators.memory() is None
            first = Dice.now()
            assert first.same_as(Dice.now())
            np.random.rand()
            assert not Dice.now().others_as(first)
            assert Dice.now().checksum() != first.checksum()
    finally:
        np.random.set_bit_generator(before)


def test_the_state_of_the_host_is_that_of_another_process() -> None:
    dice = Dice.on([])
    first, moved = draw(), Dice.on([])
    assert len({dice.checksum(), moved.checksum()}) == 2
    pickle.loads(pickle.dumps(dice)).put_on([])
    assert Dice.on([]).checksum() == dice.checksum()
    assert draw() == first
    assert Dice.on([]).checksum() == moved.checksum()


@pytest.mark.parametrize(
    "move", [lambda: torch.rand(()), random.random, np.random.rand, np.random.randn]
)
def test_a_checksum_tells_states_apart(move: Any) -> None:
    dice = Dice.now()
    move()
    assert Dice.now().checksum() != dice.checksum()
