from __future__ import annotations

import pickle
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from anybatch.rng import Dice


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
    order = random.Random(seed)
    draws = [draw_torch, draw_numpy, draw_normal, draw_python, draw_gauss, lambda: None]
    dice = Dice.now()
    assert dice.memory is not None
    for _ in range(200):
        order.choice(draws)()
        dice = dice.later()
        assert dice.same_as(Dice.now())
        assert dice.numpy[3:] == np.random.get_state()[3:]


def test_a_generator_of_another_kind_is_asked_every_time() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dice = Dice.now()
            assert dice.memory is None
            later = dice.later()
        assert later.memory is None
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
